"""Publishing: a batch's shards against `apply_async` in a loop, in interleaved pairs.

    python -m tests.bench.publishing [--requests 100000] [--loop 5000] [--pairs 5]

Both publish the same small chats with the chord's options to a server of their own that nobody consumes from. The loop
is what one would write from Celery's manual: a task, its arguments, a chord's body, `apply_async`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from celery import Celery

from common import broker
from common.dispatch import publish_shard
from common.routes import Routes
from common.settings import GPU_QUEUE
from common.store import LocalStore
from tests.bench.report import Report
from tests.bench.worker import chat, make_batch
from tests.servers import BrokerServer


def in_a_loop(url: str, count: int) -> float:
    """Requests per second of `apply_async`."""
    app = Celery("stock", broker=url, set_as_current=False)
    app.conf.update(task_default_queue="stock", task_ignore_result=True)

    @app.task(name="stock.run_request", shared=False)
    def run_request(**_: Any) -> int:
        return 1

    body = app.signature("fleet.seal_shard", kwargs={"batch_id": "b", "run": 1, "shard": 0})
    started = time.perf_counter()
    for index in range(count):
        arguments = {"batch_id": "b", "run": 1, "shard": 0, "index": index, "count": count, "line": chat(index)}
        run_request.apply_async(kwargs=arguments, queue="stock", group_id="g", group_index=index, chord=body)
    rate = count / (time.perf_counter() - started)
    app.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--loop", type=int, default=5_000)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    report = Report("publishing", requests=options.requests)
    ratios = []
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        store = LocalStore(Path(folder) / "store")
        run = make_batch(store, options.requests, chat)
        for number in range(options.pairs):
            with BrokerServer(Path(folder) / f"b{number}", dict(os.environ)) as server:
                loop = in_a_loop(server.url, options.loop)
                app = broker.make_app(server.url)
                spent, started = time.process_time(), time.perf_counter()
                first_s = 0.0
                for shard in run.shards:
                    publish_shard(app, store, run, shard, routes=Routes())
                    first_s = first_s or time.perf_counter() - started
                seconds, cpu_s = time.perf_counter() - started, time.process_time() - spent
                assert server.client.llen(GPU_QUEUE) == options.requests
                app.close()
            rate = options.requests / seconds
            ratios.append(rate / loop)
            report.row(
                pair=number,
                fleet_per_s=round(rate),
                loop_per_s=round(loop),
                cpu_us=round(1e6 * cpu_s / options.requests, 1),
                first_thousand_s=round(first_s, 3),
                ratio=round(ratios[-1], 2),
            )
    report.ratio(ratios, fleet_per_s=round(rate), loop_per_s=round(loop))


if __name__ == "__main__":
    main()
