"""CPU per request of one worker on the echo engine, against a stock Celery threads pool with the same task.

    python -m tests.bench.worker [--requests 20000] [--rounds 5] [--latency-s 0.05] [--only fleet]
    python -m tests.bench.worker --packs 16 [--latency-s 0]

Both run the same requests through chords of 1,000, answer them with the same engine and write each row to Redis under
its index, the first one wins. The stock worker does so as one would write it from Celery's manual: kombu's own Redis
transport, 256 threads, late acknowledgements. The fleet's does what it always does. Rounds are interleaved; start-up
is excluded, and the queue is full before the clock starts. CPU is user and system time of the worker's process.
With `--packs` both are the fleet's, and run embeddings: one in each message, and so many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import broker, layout
from common.batch import Manifest, Run, first_run
from common.dispatch import publish_shard
from common.ledger import Ledger
from common.routes import Routes
from common.settings import GPU_QUEUE
from common.store import LocalStore
from tests.bench.report import Report, cpu_s, served_s
from tests.servers import BrokerServer, Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

SHARD = 1000
INFLIGHT = 256

STOCK = """
import os, time
import redis
from celery import Celery
from workers.engine import Request
from workers.engine.echo import EchoEngine

app = Celery("stock", broker=os.environ["URL"], backend=os.environ["URL"], set_as_current=True)
app.conf.update(
    task_acks_late=True, worker_prefetch_multiplier=1, task_ignore_result=True, task_default_queue="gpu",
    broker_connection_retry_on_startup=True, worker_redirect_stdouts=False,
    broker_transport_options={"visibility_timeout": 3600, "body_encoding": "utf-8", "max_connections": 512},
    result_backend_transport_options={"result_chord_ordered": False},
)
engine = EchoEngine("m")
client = redis.Redis.from_url(os.environ["REDIS"], max_connections=512)
latency_s = float(os.environ["LATENCY"])

@app.task(name="fleet.run_request")
def run_request(*, batch_id, run, shard, index, count, line):
    if latency_s:
        time.sleep(latency_s)
    try:
        engine.run(Request(line, 0)).send(None)
    except StopIteration as answer:
        row = answer.value.row
    key = f"fleet:{batch_id}:{run}:rows:{shard}"
    client.hsetnx(key, index, row)
    if client.hlen(key) > count:
        raise RuntimeError
    return 1
"""


def chat(number: int) -> str:
    """A small chat request."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 8}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def embedding(number: int) -> str:
    """A small embedding request, whose answer has as few numbers as echo knows."""
    body = {"model": "m", "input": f"number {number}"}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/embeddings", "body": body})


def make_batch(store: LocalStore, count: int, line: Callable[[int], str]) -> Run:
    """A durable batch in shards of 1,000."""
    counts = tuple(min(SHARD, count - first) for first in range(0, count, SHARD))
    manifest = Manifest(
        batch_id=layout.new_batch_id(), created_at=1, input_name="in", endpoint="/v1/chat/completions", digest="d",
        total=count, counts=counts,
    )  # fmt: skip
    run = first_run(manifest)
    for shard in run.shards:
        with store.writing(layout.shard_input(manifest.batch_id, shard.number)) as out:
            for index in shard.indexes:
                out.write(line(index).encode() + b"\n")
    with store.writing(layout.manifest(manifest.batch_id)) as out:
        out.write(manifest.model_dump_json().encode())
    return run


def start(kind: str, place: Path, server: BrokerServer, latency_s: float) -> Process:
    """A worker of either kind."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "FLEET_BROKER_URL": server.url, "FLEET_STORE": (place / "store").as_uri(), "URL": server.url, "REDIS": f"unix://{server.socket}",
        "LATENCY": str(latency_s),
    }  # fmt: skip
    if kind != "stock":
        flags = ["--engine", "echo", "--latency-s", str(latency_s), "--max-inflight", str(INFLIGHT)]
        return Process("worker", [sys.executable, "-m", "workers", "serve", "m", *flags], place, environment)
    (place / "stock_app.py").write_text(STOCK)
    words = ["-m", "celery", "-A", "stock_app", "worker", "-P", "threads", "-c", str(INFLIGHT), "-Q", GPU_QUEUE,
             "--without-gossip", "--without-mingle", "--loglevel", "WARNING"]  # fmt: skip
    return Process("worker", [sys.executable, *words], place, environment)


def measure(kind: str, place: Path, requests: int, latency_s: float, packs: int) -> dict[str, Any]:
    """One worker, one queue full of requests."""
    line = embedding if packs else chat
    sizes = {GPU_QUEUE: packs if kind == "packed" else 1}
    with BrokerServer(place / "b", dict(os.environ)) as server:
        store = LocalStore(place / "store")
        app = broker.make_app(server.url)
        ledger = Ledger(server.client)
        run, warm = make_batch(store, requests, line), make_batch(store, 500, line)
        worker = start(kind, place, server, latency_s)
        try:
            for each in (warm, run):
                ledger.restore(each.batch_id, 1, total=each.total, shards=len(each.shards), step=10**9)  # no feeds
                if each is run:
                    before, served, started = cpu_s(worker.pid), served_s(server), time.monotonic()
                for shard in each.shards:
                    publish_shard(app, store, each, shard, routes=Routes(), packs=sizes)
                seals = len(each.shards) + (each is run)
                wait_until(
                    lambda seals=seals: server.client.llen("aggregate") >= seals or not worker.running, 300, "all done"
                )
                assert worker.running, worker.stderr
            seconds = time.monotonic() - started
            wait_until(lambda: not server.client.hlen("unacked"), 30, "all acknowledged")
            rows = sum(server.client.hlen(f"fleet:{run.batch_id}:1:rows:{n}") for n in range(len(run.shards)))
            assert rows == requests
            return {
                "requests_per_s": round(requests / seconds),
                "cpu_ms": round(1000 * (cpu_s(worker.pid) - before) / requests, 3),
                "broker_ms": round(1000 * (served_s(server) - served) / requests, 3),
            }
        finally:
            worker.stop()
            app.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--only", choices=("fleet", "stock", "packed"))
    parser.add_argument("--packs", type=int, default=0)
    options = parser.parse_args()
    both = ("fleet", "packed") if options.packs else ("stock", "fleet")
    kinds = (options.only,) if options.only else both
    report = Report(
        "worker", requests=options.requests, latency_s=options.latency_s, inflight=INFLIGHT, packs=options.packs
    )
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    rates: dict[str, list[int]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
                each = measure(kind, Path(folder), options.requests, options.latency_s, options.packs)
            found[kind].append(each["cpu_ms"])
            rates[kind].append(each["requests_per_s"])
            report.row(round=number, kind=kind, **each)
    medians = {f"{kind}_cpu_ms": statistics.median(values) for kind, values in found.items()}
    if options.packs or options.only:
        medians |= {f"{kind}_per_s": statistics.median(values) for kind, values in rates.items()}
    if options.only:
        report.summary(kind=options.only, **medians)
    else:
        before, after = (found[kind] for kind in kinds)
        ratios = [ours / theirs for ours, theirs in zip(after, before, strict=True)]
        report.ratio(ratios, **medians)


if __name__ == "__main__":
    main()
