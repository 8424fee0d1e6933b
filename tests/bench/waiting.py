"""A waiting producer's share of a core, while its batch runs for half a minute.

python -m tests.bench.waiting [--seconds 30] [--requests 2000]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from tests.bench.report import Report, cpu_s
from tests.bench.scaling import lines
from tests.servers import FleetServers, wait_until


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=2000)
    options = parser.parse_args()
    report = Report("waiting producer", requests=options.requests, seconds=options.seconds)
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        fleet = FleetServers(Path(folder) / "f", PYTHONPATH=path)
        try:
            fleet.aggregator()
            fleet.worker("--max-inflight", "256")
            latency_s = 1.3 * options.seconds * 256 / options.requests
            source = fleet.write("in.jsonl", lines([latency_s] * options.requests))
            producer = fleet.start_producer("submit", str(source), "-o", str(fleet.folder / "out.jsonl"))
            wait_until(fleet.batch_ids, 60, "the batch is there")
            (batch_id,) = fleet.batch_ids()
            wait_until(lambda: fleet.finished(batch_id) > 0, 60, "the first row")
            before, started = cpu_s(producer.pid), time.monotonic()
            time.sleep(options.seconds)
            share = (cpu_s(producer.pid) - before) / (time.monotonic() - started)
            assert producer.running, producer.stderr
            report.summary(core_share=round(share, 4))
            assert producer.wait(120).code == 0
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
