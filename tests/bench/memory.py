"""What a request costs in Redis: published, leased, and as a row of a shard that is not sealed.

    python tests/bench/memory.py [--requests 4000] [--sizes 200 4000 16000]

Prints one JSON line for each size of prompts and answers, in bytes of `used_memory` per request.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from tests.invariants import chat_line
from tests.servers import FleetServers, wait_until

TOP = Path(__file__).parents[2]
#: In the way of sealing: one request of each shard never ends.
SHARD = 100


def measure(size: int, count: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="fleet-bench-"))
    servers = FleetServers(folder, FLEET_WINDOW=str(2 * count), FLEET_SHARD_SIZE=str(SHARD), PYTHONPATH=str(TOP))
    try:
        lines = [
            chat_line(f"r{n:06d}", "x" * size, echo={"hang": True} if n % SHARD == 0 else {"result_bytes": size})
            for n in range(count)
        ]

        def used() -> int:
            return int(servers.client.info("memory")["used_memory"])

        empty = used()
        source = servers.write("in.jsonl", lines)
        run = servers.producer("submit", str(source), "--detach", timeout_s=120)
        assert run.code == 0, run.stderr
        batch_id = run.stdout.decode().strip()
        wait_until(lambda: servers.waiting() == count, 60, "all requests are published")
        published = used() - empty
        servers.aggregator()
        servers.worker("--max-inflight", "256")
        hung = -(-count // SHARD)
        wait_until(lambda: servers.finished(batch_id) == count - hung, 120, "all but the hanging ones are finished")
        wait_until(lambda: servers.taken() == hung, 20, "the others are acknowledged")
        rows = used() - empty
        assert servers.producer("cancel", batch_id).code == 0
        wait_until(lambda: servers.is_closed(batch_id), 60, "the batch is closed")
        return {
            "line_bytes": round(sum(map(len, lines)) / count),
            "published_bytes": round(published / count),
            "row_bytes": round(rows / count),
            "closed_bytes": round((used() - empty) / count),
        }
    finally:
        servers.end()
        servers.broker.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 4000, 16000])
    options = parser.parse_args()
    for size in options.sizes:
        figures = measure(size, options.requests)
        print(json.dumps({"bench": "memory", "size_bytes": size, "requests": options.requests, **figures}), flush=True)


if __name__ == "__main__":
    main()
