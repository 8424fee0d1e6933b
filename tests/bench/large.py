"""A large file on the echo engine: peak memory of every process, time to the first row, rows per second.

    python tests/bench/large.py [--lines 100000] [--workers 1]

Prints one JSON line. Peaks are the kernel's own (VmHWM), in MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def peak_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def role(process: psutil.Process) -> str:
    # A worker's title, once it has one, is "[celeryd: serve-PID@HOST…".
    command = " ".join(process.cmdline())
    if "unixsocket" in command:
        return "broker"
    for name, kind in (("aggregate", "aggregator"), ("serve", "worker")):
        if f"workers {name}" in command or f"{name}-" in command:
            return kind
    return "other"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with source.open("w") as file:
            for number in range(options.lines):
                body = {"model": "m", "messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 8}
                line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        started = time.perf_counter()
        producer = subprocess.Popen(
            [
                sys.executable, "-m", "producer", "submit", str(source), "-o", str(output), "--local",
                "--engine", "echo", "--model", "m", "--workers", str(options.workers),
            ],
            env={**os.environ, "XDG_STATE_HOME": folder},
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        first_row_s = None
        peaks: dict[str, float] = {}
        watched = psutil.Process(producer.pid)
        while producer.poll() is None:
            if first_row_s is None and output.exists() and output.stat().st_size:
                first_row_s = time.perf_counter() - started
            try:
                peaks["producer"] = max(peaks.get("producer", 0.0), peak_mb(producer.pid))
                for child in watched.children():
                    name = role(child)
                    peaks[name] = max(peaks.get(name, 0.0), peak_mb(child.pid))
            except psutil.Error:
                pass
            time.sleep(0.1)
        took_s = time.perf_counter() - started
        rows = sum(1 for _ in output.open("rb"))
        print(
            json.dumps(
                {
                    "lines": options.lines,
                    "rows": rows,
                    "exit": producer.returncode,
                    "seconds": round(took_s, 1),
                    "rows_per_s": round(rows / took_s),
                    "first_row_s": first_row_s and round(first_row_s, 2),
                    "peak_mb": {name: round(peak) for name, peak in sorted(peaks.items())},
                    "load": os.getloadavg()[0],
                }
            )
        )


if __name__ == "__main__":
    main()
