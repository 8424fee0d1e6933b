"""CPU per task of a Celery worker over kombu's stock Redis transport and over ours, in interleaved rounds.

    python -m tests.bench.transport [--tasks 4000] [--rounds 3] [--inflight 256]

The tasks do nothing, so what is left is the price of a delivery: receive, lease, run, acknowledge. Two pools: Celery's
threads and the fleet's asyncio pool on a bare loop. Start-up is excluded. Prints one JSON line per round and pool, and
one with the medians; CPU is user and system time of the worker's process, and of the broker's.
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

import psutil
from celery import Celery

from tests.servers import BrokerServer, Process, wait_until

APP = """
import asyncio, os, threading, types
from concurrent.futures import Future
from celery import Celery
from common.transport import fleet_url, transport_options
from workers.pool import EngineCapacity

class Host:
    dead = False
    inflight = int(os.environ["INFLIGHT"])
    def __init__(self):
        self.loop = asyncio.new_event_loop()
    def start(self):
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        ready = Future()
        ready.set_result(None)
        return ready
    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)

url = os.environ["URL"]
app = Celery("bench", broker=fleet_url(url) if os.environ["TRANSPORT"] == "ours" else url, set_as_current=True)
app.conf.update(
    task_acks_late=True, worker_prefetch_multiplier=1, task_ignore_result=True, task_default_queue="q",
    broker_connection_retry_on_startup=True, worker_redirect_stdouts=False,
    broker_transport_options={**transport_options(30), "body_encoding": "utf-8", "max_connections": 64},
)
app.fleet = types.SimpleNamespace(make_host=Host, settings=types.SimpleNamespace(drain_s=5.0))
if os.environ["POOL"] == "asyncio":
    app.steps["worker"].add(EngineCapacity)
    @app.task(name="work")
    async def work(payload):
        return 1
else:
    @app.task(name="work")
    def work(payload):
        return 1
"""

POOLS = {"threads": "threads", "asyncio": "workers.pool:TaskPool"}


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def served_s(broker: BrokerServer) -> float:
    spent = broker.client.info("cpu")
    return float(spent["used_cpu_user"]) + float(spent["used_cpu_sys"])


def measure(
    broker: BrokerServer, folder: Path, pool: str, transport: str, tasks: int, inflight: int
) -> dict[str, float]:
    broker.client.flushall()
    environment = {
        **os.environ, "URL": broker.url, "TRANSPORT": transport, "POOL": pool, "INFLIGHT": str(inflight),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        "CELERY_CUSTOM_WORKER_POOL": POOLS[pool],
    }  # fmt: skip
    kind = "custom" if pool == "asyncio" else pool
    words = ["-m", "celery", "-A", "bench_app", "worker", "--pool", kind, "-c", str(inflight), "--without-gossip",
             "--without-mingle", "--loglevel", "WARNING"]  # fmt: skip
    worker = Process("worker", [sys.executable, *words], folder, environment)
    try:
        app = Celery(broker=broker.url, set_as_current=False)
        app.conf.update(task_default_queue="q", broker_transport_options={"body_encoding": "utf-8"})

        def publish(count: int) -> None:
            with app.producer_pool.acquire(block=True) as producer, producer.batch(max_size=500):
                for _ in range(count):
                    app.send_task("work", ("x" * 1000,), ignore_result=True, producer=producer, retry=False)

        def done() -> bool:
            return not broker.client.llen("q") and not broker.client.hlen("unacked")

        publish(50)  # warm up, and know that it is ready
        wait_until(lambda: not worker.running or done(), 60, "the worker is warm")
        assert worker.running, worker.stderr
        before, served = cpu_s(worker.pid), served_s(broker)
        started = time.monotonic()
        publish(tasks)
        while not done():
            time.sleep(0.05)
        seconds = time.monotonic() - started
        spent = cpu_s(worker.pid) - before
        server = served_s(broker) - served
        app.close()
        return {
            "cpu_ms_per_task": round(1000 * spent / tasks, 3),
            "broker_ms_per_task": round(1000 * server / tasks, 3),
            "tasks_per_s": round(tasks / seconds),
        }
    finally:
        worker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inflight", type=int, default=256)
    options = parser.parse_args()
    spent: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, BrokerServer(Path(name), dict(os.environ)) as broker:
        (Path(name) / "bench_app.py").write_text(APP)
        for number in range(options.rounds):
            for pool in POOLS:
                for transport in ("stock", "ours"):
                    found = measure(broker, Path(name), pool, transport, options.tasks, options.inflight)
                    spent.setdefault((pool, transport), []).append(found["cpu_ms_per_task"])
                    print(json.dumps({"round": number, "pool": pool, "transport": transport, **found}), flush=True)
    medians = {f"{pool}/{transport}": statistics.median(values) for (pool, transport), values in spent.items()}
    print(json.dumps({"median_cpu_ms_per_task": medians, "tasks": options.tasks, "inflight": options.inflight}))


if __name__ == "__main__":
    main()
