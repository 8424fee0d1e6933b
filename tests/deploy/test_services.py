"""The compose file's services as processes: exactly its commands, environment and health checks, without an engine.

Changed are only what containers bring: host names, folders, and ports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.deploy.composefile import config, env_file
from tests.deploy.conftest import TOP
from tests.invariants import assert_complete, input_lines
from tests.servers import START_S, Process, Workplace, free_port, server_binary, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = {"worker": ["-m", "workers"], "producer": ["-m", "producer"], "python3": []}


class Services:
    """The services of the compose file, started by hand."""

    def __init__(self, folder: Path) -> None:
        env = env_file(folder)
        self.read = config(env, FLEET_MODEL="smollm2")["services"]
        self.place = Workplace(folder / "place", PYTHONPATH=str(TOP))
        self.passwords = dict(re.findall(r"^(\w+)=(.*)$", env.read_text(), re.MULTILINE))
        self.redis_port = free_port()
        self.ports = {name: free_port() for name in self.read}
        self.files = folder / "files"
        self.files.mkdir()

    def ours(self, name: str, text: str) -> str:
        """What stands in the file, for a process on this machine."""
        for before, after in {
            "@redis:6379": f"@127.0.0.1:{self.redis_port}",
            "file:///store": (self.place.folder / "store").as_uri(),
            "0.0.0.0": "127.0.0.1",
        }.items():
            text = text.replace(before, after)
        return re.sub(r"\b(9464|9465|5555)\b", str(self.ports[name]), text)

    def environment(self, name: str) -> dict[str, str]:
        given = self.read[name]["environment"]
        return {key: self.ours(name, str(value)) for key, value in given.items() if value is not None}

    def start_redis(self) -> Process:
        folder = self.place.folder / "redis"
        folder.mkdir()
        (command,) = self.read["redis"]["command"]
        binary = server_binary()
        assert binary is not None
        own = {"REDIS_SERVER": binary, "REDIS_RUN": str(folder / "run"), "PATH": os.environ["PATH"]}
        script = str(TOP / "deploy/redis" / os.path.basename(command))
        options = ["--port", str(self.redis_port), "--bind", "127.0.0.1", "--dir", str(folder)]
        process = Process("redis", [script, *options], folder, self.environment("redis") | own)
        self.place.processes.append(process)
        return process

    def start(self, name: str, *arguments: str) -> Process:
        service = self.read[name]
        words = [*(service.get("entrypoint") or []), *(arguments or service["command"])]
        program, *rest = (self.ours(name, word) for word in words)
        return self.place.start(name, *PROGRAMS[program], *rest, **self.environment(name))

    def is_healthy(self, name: str) -> bool:
        """What the file's own health check says."""
        kind, program, *rest = self.read[name]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python3")
        checked = subprocess.run(
            [sys.executable, *(self.ours(name, word) for word in rest)], capture_output=True, timeout=20, check=False
        )
        return checked.returncode == 0

    def get(self, name: str, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}{path}", timeout=10) as answer:
            return str(answer.read().decode())


@pytest.fixture
def services(server: str, tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path)
    with closing(made.place):
        yield made


def number(page: str, series: str) -> float:
    (value,) = re.findall(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(value)


def test_the_compose_files_services_do_a_batch_and_show_it(services: Services) -> None:
    """From nothing to rows, metrics and the numbers that an autoscaler reads; healthy means ready, and nothing else."""
    redis = services.start_redis()
    running = {name: services.start(name) for name in ("aggregator", "worker-cpu", "exporter", "flower")}
    for name, process in running.items():
        wait_until(
            lambda name=name, process=process: services.is_healthy(name) or not process.running,
            START_S,
            f"{name} is up",
        )
        assert process.running, process.stderr

    lines = TOP / "examples/chat.jsonl"
    output = services.files / "chat.out.jsonl"
    run = services.start("producer", "submit", str(lines), "-o", str(output)).wait(60)
    worker = services.get("worker-cpu", "/metrics")
    wait_until(
        lambda: json.loads(services.get("exporter", "/scale"))["workers_ready"] == 1, START_S, "the exporter saw it"
    )
    exporter, scale = services.get("exporter", "/metrics"), json.loads(services.get("exporter", "/scale"))
    # Without Redis it would not end before Docker kills it.
    running.pop("flower").stop()
    redis.kill()
    wait_until(lambda: not services.is_healthy("exporter"), START_S, "the exporter is not ready without Redis")
    alive = {name: json.dumps(services.get(name, "/healthz")) for name in ("aggregator", "worker-cpu", "exporter")}
    for process in running.values():
        process.send(15)
    codes = {name: process.wait(60).code for name, process in running.items()}

    assert run.code == 0, run.stderr
    count = len(assert_complete(input_lines(lines), output.read_bytes()))
    assert number(worker, 'fleet_requests_total{model="smollm2",outcome="completed"}') == count
    assert number(exporter, "fleet_up") == 1
    assert number(exporter, 'fleet_remaining_requests{queue="gpu"}') == 0
    assert scale["remaining_requests"] == scale["desired_replicas"] == 0
    assert set(alive) == {"aggregator", "worker-cpu", "exporter"}
    assert codes == dict.fromkeys(running, 0)
    logs = b"".join(services.place.logs().values())
    assert not [name for name, word in services.passwords.items() if "PASSWORD" in name and word.encode() in logs]
