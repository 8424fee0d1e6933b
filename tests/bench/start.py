"""From the command to the first row and to the last one, with the engine's start, against vLLM's own runner.

    python -m tests.bench.start MODEL_FOLDER [--requests 256] [--pairs 3] [-- ENGINE FLAGS]

`producer submit --local` and `vllm run-batch` run one after the other on the same file, each with all that it starts;
the memory is the largest sum of its processes' resident sets, looked at four times a second.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.bench.report import Report
from tests.bench.speed import CHAT_FLAGS, chats


def resident_mb(process: psutil.Process) -> float:
    """What a process and all below it have in memory."""
    total = 0
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total / 1024**2


def timed(command: list[str], output: Path, folder: str) -> dict[str, Any]:
    """Run a command that writes rows to `output`."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, "XDG_STATE_HOME": folder}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    watched, first_row_s, peak_mb = psutil.Process(process.pid), 0.0, 0.0
    try:
        while process.poll() is None:
            if not first_row_s and output.exists() and output.stat().st_size:
                first_row_s = time.perf_counter() - started
            peak_mb = max(peak_mb, resident_mb(watched))
            time.sleep(0.25)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    wall_s = time.perf_counter() - started
    assert process.returncode == 0, (command, process.returncode)
    return {
        "first_row_s": round(first_row_s or wall_s, 2), "wall_s": round(wall_s, 2), "peak_mb": round(peak_mb),
        "rows": output.read_bytes().count(b"\n"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options, flags = parser.parse_args(words[:cut]), words[cut + 1 :] or CHAT_FLAGS
    report = Report("start", requests=options.requests)
    firsts, walls = [], []
    for number in range(options.pairs):
        found = {}
        for kind in ("fleet", "run_batch"):
            with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
                source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
                source.write_text("\n".join(chats(options.requests, options.max_tokens)) + "\n")
                files = ["-i", str(source), "-o", str(output)]
                command = {
                    "fleet": ["producer", "submit", *files, "--local", "--model", options.model, "--", *flags],
                    "run_batch": ["vllm.entrypoints.launchers.run_batch", *files, "--model", options.model, *flags],
                }[kind]
                found[kind] = timed([sys.executable, "-m", *command], output, folder)
                assert found[kind].pop("rows") == options.requests
            report.row(pair=number, kind=kind, **found[kind])
        firsts.append(found["fleet"]["first_row_s"] - found["run_batch"]["first_row_s"])
        walls.append(found["run_batch"]["wall_s"] / found["fleet"]["wall_s"])
    report.ratio(walls, yardstick="run_batch, whole wall", first_row_later_s=round(sorted(firsts)[len(firsts) // 2], 2))


if __name__ == "__main__":
    main()
