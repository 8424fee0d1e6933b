"""Workers on nodes that go: one is taken per minute, with notice or without.

    python tests/bench/spot.py --notice-s 120 [--minutes 10]
    python tests/bench/spot.py --notice-s 0

With notice a worker gets SIGTERM and, when the notice is over, SIGKILL; without it SIGKILL at once. Each is replaced at
once. Prints one JSON line: engine calls beyond one per request, and the work that was done again.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from tests.bench.watched import WatchedFleet, latency_lines, show
from tests.servers import START_S, Process, wait_until

TOP = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--notice-s", type=float, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every-s", type=float, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--inflight", type=int, default=32)
    parser.add_argument("--shortest-s", type=float, default=1.0)
    parser.add_argument("--longest-s", type=float, default=60.0)
    parser.add_argument("--drain-s", type=float, default=60.0, help="as in deploy/k8s/overlays/spot")
    options = parser.parse_args()
    mean_s = (options.shortest_s + options.longest_s) / 2
    # Enough for a little longer than the losses go on.
    count = int(options.workers * options.inflight * (options.minutes * 60 + 20) / mean_s)
    lines = latency_lines(count, options.shortest_s, options.longest_s, seed=7)
    folder = Path(tempfile.mkdtemp(prefix="fleet-bench-"))
    fleet = WatchedFleet(folder, FLEET_DRAIN_S=str(options.drain_s), PYTHONPATH=str(TOP))
    dice, taken, let_go = random.Random(8), 0, {}
    leaving: list[tuple[float, Process]] = []
    try:
        fleet.servers.aggregator()
        running = [fleet.start_worker(options.inflight) for _ in range(options.workers)]
        wait_until(lambda: fleet.note_ready(running) == options.workers, START_S, "the workers are ready")
        producer, output = fleet.submit(lines)
        began = next_at = time.time()
        next_at += options.every_s
        while producer.running:
            now = time.time()
            if now >= next_at and now - began <= options.minutes * 60 + 1:
                next_at += options.every_s
                going = running.pop(dice.randrange(len(running)))
                fleet.note_left(going)
                taken += 1
                going.send(signal.SIGTERM if options.notice_s else signal.SIGKILL)
                let_go[going.pid] = now + (min(options.drain_s, options.notice_s) if options.notice_s else 0)
                leaving.append((now + options.notice_s, going))
                running.append(fleet.start_worker(options.inflight))
            for deadline, going in leaving:
                if now > deadline:
                    going.send(signal.SIGKILL)
            fleet.note_ready(running)
            assert now - began < options.minutes * 60 + 600, "too slow"
            time.sleep(0.25)
        assert producer.wait(1).code == 0, producer.stderr
        figures = fleet.report(lines, output.read_bytes(), let_go, options.inflight)
        show(
            {
                "bench": "spot",
                "notice_s": options.notice_s,
                "workers_taken": taken,
                **figures,
                "wall_s": round(time.time() - began, 1),
                **{name: getattr(options, name) for name in ("workers", "inflight", "longest_s", "every_s")},
            }
        )
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
