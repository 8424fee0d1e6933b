"""Echo workers with latency: 1, 2 and 4 of them against linear, and a heavy tail against the same work evenly long.

    python -m tests.bench.scaling [--requests 4000] [--latency-s 0.5] [--inflight 64] [--pairs 3]
    python -m tests.bench.scaling --tail [--requests 20000] [--pairs 3]

A worker with `inflight` slots and this latency can do `inflight / latency` requests per second, so what is measured is
whether the fleet keeps the slots full. With `--tail` 1 % of the requests take 200 times as long as the others,
the window is small, and the clock stops when 98 % are finished; the yardstick is as many that all take the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from tests.bench.report import Report
from tests.servers import FleetServers, wait_until

SHORT_S = 0.05
LONG_S = 200 * SHORT_S


def lines(latencies: list[float]) -> list[str]:
    """Chats that echo answers after these seconds."""
    found = []
    for number, latency_s in enumerate(latencies):
        knobs = {"echo": {"latency_s": latency_s}}
        body = {"model": "test-model", "messages": [{"role": "user", "content": f"number {number}"}], **knobs}
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        found.append(json.dumps(line))
    return found


def seconds_for(latencies: list[float], workers: int, inflight: int, *, window: int, share: float = 1.0) -> float:
    """Seconds from the first to the last row, or until a share of them is recorded; the workers are warm."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        fleet = FleetServers(
            Path(folder) / "f", FLEET_WINDOW=str(window), PYTHONPATH=os.pathsep.join([os.getcwd(), *_path()])
        )
        try:
            fleet.aggregator()
            for _ in range(workers):
                fleet.worker("--max-inflight", str(inflight))
            source = fleet.write("in.jsonl", lines(latencies))
            producer = fleet.start_producer("submit", str(source), "-o", str(fleet.folder / "out.jsonl"))
            wait_until(lambda: fleet.batch_ids() or not producer.running, 60, "the batch is there")
            (batch_id,) = fleet.batch_ids()
            wait_until(lambda: fleet.finished(batch_id) > 0, 60, "the first row")
            started = time.monotonic()
            wait_until(lambda: fleet.finished(batch_id) >= share * len(latencies), 600, "all rows")
            seconds = time.monotonic() - started
            assert producer.wait(120).code == 0
            return seconds
        finally:
            fleet.close()


def _path() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]


def scale(options: argparse.Namespace) -> None:
    report = Report("scaling", latency_s=options.latency_s, inflight=options.inflight)
    ratios: dict[int, list[float]] = {2: [], 4: []}
    for number in range(options.pairs):
        one = 0.0
        for workers in (1, 2, 4):
            count = options.requests * workers
            seconds = seconds_for([options.latency_s] * count, workers, options.inflight, window=16_384)
            rate = count / seconds
            one = one or rate
            if workers > 1:
                ratios[workers].append(rate / (workers * one))
            report.row(
                pair=number, workers=workers, requests=count, requests_per_s=round(rate, 1),
                slots_busy=round(rate * options.latency_s / (workers * options.inflight), 3),
            )  # fmt: skip
    for workers, found in ratios.items():
        report.ratio(found, workers=workers)


def tail(options: argparse.Namespace) -> None:
    report = Report("heavy tail", requests=options.requests, inflight=options.inflight, window=2 * options.inflight)
    latencies = [LONG_S if number % 100 == 50 else SHORT_S for number in range(options.requests)]
    mean_s = sum(latencies) / len(latencies)
    ratios = []
    for number in range(options.pairs):
        even_s = seconds_for([mean_s] * len(latencies), 1, options.inflight, window=2 * options.inflight, share=0.98)
        tail_s = seconds_for(latencies, 1, options.inflight, window=2 * options.inflight, share=0.98)
        ratios.append(even_s / tail_s)
        work_s = 0.98 * sum(latencies) / options.inflight
        report.row(
            pair=number, even_s=round(even_s, 2), tail_s=round(tail_s, 2), busy=round(work_s / tail_s, 3),
            busy_even=round(work_s / even_s, 3),
        )  # fmt: skip
    report.ratio(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.5)
    parser.add_argument("--inflight", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    options.requests = options.requests or (20_000 if options.tail else 2_000)
    (tail if options.tail else scale)(options)


if __name__ == "__main__":
    main()
