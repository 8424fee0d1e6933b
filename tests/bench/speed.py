"""Requests per second of the fleet, against the same engine driven in-process without a queue.

    python tests/bench/speed.py MODEL_FOLDER [--pairs 5] [--requests 256] [-- ENGINE FLAGS]

One worker and one in-process engine with the same settings stay loaded side by side; the pairs are interleaved, so
that both meet the same noise. Engine start is excluded. Prints one JSON line per pair, and one with the median ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common.batch import first_run
from common.settings import FleetSettings
from common.store import open_store
from producer import control, intake
from producer.local import LocalFleet
from workers.engine import Request
from workers.engine.vllm import VllmEngine

DEFAULT_FLAGS = [
    "--served-model-name", "smollm2", "--max-model-len", "1024", "--enforce-eager", "--dtype", "bfloat16",
    "--kv-cache-memory-bytes", "128M",
]  # fmt: skip

TOPICS = ("rivers", "bridges", "bees", "tea", "maps", "glass", "chess", "snow")


class Quiet:
    """Reports nothing."""

    def say(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def update(self, **_: int) -> None: ...


def write_requests(path: Path, count: int, max_tokens: int) -> list[str]:
    lines = [
        json.dumps(
            {
                "custom_id": f"speed-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "smollm2",
                    "messages": [
                        {"role": "user", "content": f"Write one sentence about {TOPICS[number % 8]}, number {number}."}
                    ],
                    "max_tokens": max_tokens,
                    "min_tokens": max_tokens,
                    "temperature": 0,
                },
            }
        )
        for number in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return lines


async def in_process(engine: VllmEngine, lines: list[str]) -> float:
    started = time.perf_counter()
    replies = await asyncio.gather(*(engine.run(Request(line)) for line in lines))
    took_s = time.perf_counter() - started
    assert all(reply.failure is None for reply in replies)
    return took_s


def through_the_fleet(fleet: control.Fleet, path: Path) -> float:
    checked = intake.check(str(path), str(path))
    manifest = control.write_batch(fleet.store, checked, digest="bench", max_shard_size=fleet.settings.shard_size)
    started = time.perf_counter()
    control.start(fleet, first_run(manifest))
    while (end := control.read_end(fleet.store, manifest.batch_id, 1)) is None:
        time.sleep(0.01)
    took_s = time.perf_counter() - started
    assert end.counts.failed == 0, end
    return took_s


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"] or DEFAULT_FLAGS
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        store = open_store(f"file://{folder}/store")
        path = Path(folder) / "in.jsonl"
        lines = write_requests(path, arguments.requests, arguments.max_tokens)
        local = LocalFleet(
            "batch_" + "0" * 24, store_uri=store.uri, model=arguments.model, engine="vllm", workers=1, engine_args=flags
        )
        with local:
            engine = VllmEngine(arguments.model, flags)
            await engine.start()
            fleet = control.Fleet.connect(FleetSettings(broker_url=local.broker_url, store=store.uri), store)
            while not any(worker.state == "ready" for worker in fleet.ledger.workers()):
                local.check()
                await asyncio.sleep(0.1)
            await in_process(engine, lines)
            through_the_fleet(fleet, path)
            ratios = []
            for pair in range(arguments.pairs):
                alone_s = await in_process(engine, lines)
                fleet_s = through_the_fleet(fleet, path)
                ratios.append(alone_s / fleet_s)
                print(
                    json.dumps(
                        {
                            "pair": pair,
                            "in_process_rps": round(len(lines) / alone_s, 2),
                            "fleet_rps": round(len(lines) / fleet_s, 2),
                            "ratio": round(ratios[-1], 3),
                            "load": os.getloadavg()[0],
                        }
                    ),
                    flush=True,
                )
            await engine.stop()
        print(
            json.dumps(
                {
                    "requests": len(lines),
                    "median_ratio": round(statistics.median(ratios), 3),
                    "min": round(min(ratios), 3),
                    "max": round(max(ratios), 3),
                }
            )
        )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
