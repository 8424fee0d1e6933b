"""A file on the echo engine at any size: peak memory of every process, time to the first row, rows per second.

    python -m tests.bench.large [--lines 10000 100000] [--result-bytes 0] [--mixed] [--workers 1]

Several sizes run one after the other, and the last line says whether time and memory grow with them. `--result-bytes`
makes every row so large. `--mixed` puts lines of 1 MB and 12 MB between the short ones, and compares the short ones'
time with a run without the large ones. Peaks are the kernel's own (VmHWM), in MB; the broker's is also what it
reports itself.
"""

from __future__ import annotations

import argparse
import json
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
import redis

from tests.bench.report import Report

MEGABYTE = 1024 * 1024


def peak_mb(pid: int) -> float:
    """The most memory that a process ever had."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def role(process: psutil.Process) -> str:
    """What a process of a local fleet is."""
    # A worker's title, once it has one, is "[celeryd: serve-PID@HOST…".
    command = " ".join(process.cmdline())
    if "unixsocket" in command:
        return "broker"
    for name, kind in (("aggregate", "aggregator"), ("serve", "worker")):
        if f"workers {name}" in command or f"{name}-" in command:
            return kind
    return "other"


def broker_peak_mb(process: psutil.Process) -> float:
    """What the broker says that it used at most."""
    command = " ".join(process.cmdline())
    path = command.partition("unixsocket")[2].lstrip(": ").split()[0]
    with redis.Redis(unix_socket_path=path) as client:
        return float(client.info("memory")["used_memory_peak"]) / MEGABYTE


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and its children, as far as they live."""
    with suppress(psutil.Error):
        return [process, *process.children()]
    return []


def write(path: Path, count: int, *, result_bytes: int = 0, mixed: bool = False) -> None:
    """The input: short chats; if mixed, one in 500 has 1 MB, and one in 5,000 has 12 MB."""
    filler = "lorem-ipsum-" * MEGABYTE  # one word: echo refuses more than 8,192
    with path.open("w") as file:
        for number in range(count):
            text = f"number {number}"
            if mixed and number % 500 == 250:
                text += filler[: 12 * MEGABYTE if number % 5000 == 250 else MEGABYTE]
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
            if result_bytes:
                body["echo"] = {"result_bytes": result_bytes}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def check_output(path: Path, count: int, result_bytes: int) -> None:
    """Every row once and in order, and of the size that was asked for."""
    with path.open("rb") as rows:
        for number, row in enumerate(rows):
            assert f'"custom_id":"r{number}"'.encode() in row[:200], number
            assert len(row) >= result_bytes, number
    assert number + 1 == count, (number, count)


def measure(folder: Path, count: int, workers: int, *, result_bytes: int = 0, mixed: bool = False) -> dict[str, Any]:
    """One run from `submit --local` to its end."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write(source, count, result_bytes=result_bytes, mixed=mixed)
    started = time.perf_counter()
    producer = subprocess.Popen(
        [
            sys.executable, "-m", "producer", "submit", str(source), "-o", str(output), "--local",
            "--engine", "echo", "--model", "m", "--workers", str(workers),
        ],
        env={**os.environ, "XDG_STATE_HOME": str(folder)},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    first_row_s = None
    peaks: dict[str, float] = {}
    spent: dict[int, tuple[str, float]] = {}
    broker_mb = 0.0
    watched = psutil.Process(producer.pid)
    try:
        while producer.poll() is None:
            if first_row_s is None and output.exists() and output.stat().st_size:
                first_row_s = time.perf_counter() - started
            for process in family(watched):
                with suppress(psutil.Error, redis.RedisError):
                    name = "producer" if process is watched else role(process)
                    peaks[name] = max(peaks.get(name, 0.0), peak_mb(process.pid))
                    times = process.cpu_times()
                    spent[process.pid] = (name, times.user + times.system)
                    if name == "broker":
                        broker_mb = max(broker_mb, broker_peak_mb(process))
            time.sleep(0.25)
    except BaseException:
        producer.send_signal(signal.SIGTERM)
        producer.wait()
        raise
    took_s = time.perf_counter() - started
    assert producer.returncode == 0, producer.returncode
    check_output(output, count, result_bytes)
    cpu: dict[str, float] = {}
    for name, seconds in spent.values():
        cpu[name] = cpu.get(name, 0.0) + seconds
    return {
        "seconds": round(took_s, 1),
        "rows_per_s": round(count / took_s),
        "first_row_s": first_row_s and round(first_row_s, 2),
        "peak_mb": {name: round(peak) for name, peak in sorted(peaks.items())},
        "broker_used_mb": round(broker_mb),
        "cpu_ms_per_row": {name: round(1000 * seconds / count, 3) for name, seconds in sorted(cpu.items())},
    }


def run(count: int, workers: int, **options: Any) -> dict[str, Any]:
    """One run in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        return measure(Path(folder), count, workers, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--result-bytes", type=int, default=0)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    name = "large and short lines" if options.mixed else "large rows" if options.result_bytes else "large file"
    report = Report(name, workers=options.workers)
    found = {}
    for count in options.lines:
        if options.mixed:
            plain = run(count, options.workers)
            report.row(lines=count, mixed=False, **plain)
        found[count] = run(count, options.workers, result_bytes=options.result_bytes, mixed=options.mixed)
        report.row(lines=count, result_bytes=options.result_bytes, mixed=options.mixed, **found[count])
    if options.mixed:
        report.summary(lines=count, seconds_without=plain["seconds"], **found[count])
        return
    least, most = min(found), max(found)
    if least != most:
        # Seconds per row between the sizes, so that starting up does not count.
        slope_us = 1e6 * (found[most]["seconds"] - found[least]["seconds"]) / (most - least)
        grown = {each: peak - found[least]["peak_mb"].get(each, 0) for each, peak in found[most]["peak_mb"].items()}
        report.summary(lines=[least, most], us_per_row=round(slope_us), peak_mb_grown=grown, **found[most])
    else:
        report.summary(lines=most, result_bytes=options.result_bytes, **found[most])


if __name__ == "__main__":
    main()
