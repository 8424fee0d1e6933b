"""Results of benchmarks: JSON lines, printed and appended to a file, and a table made from them.

    python -m tests.bench.report [bench-results.jsonl]

prints the summaries as a Markdown table. `FLEET_BENCH_RESULTS` names the file (default: `bench-results.jsonl`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.servers import BrokerServer


def results() -> Path:
    """The file of the results."""
    return Path(os.environ.get("FLEET_BENCH_RESULTS", "bench-results.jsonl"))


class Report:
    """The rows of one benchmark. `settings` stand on each of them."""

    def __init__(self, bench: str, **settings: Any) -> None:
        self._head = {"bench": bench, **settings}

    def row(self, **values: Any) -> None:
        """One measurement."""
        line = {**self._head, **values, "load": round(os.getloadavg()[0], 1), "at": int(time.time())}
        print(json.dumps(line), flush=True)
        with results().open("a") as file:
            file.write(json.dumps(line) + "\n")

    def summary(self, **values: Any) -> None:
        """What the rows come to; the table is made of these."""
        self.row(summary=True, **values)

    def ratio(self, ratios: Sequence[float], **values: Any) -> None:
        """The median of paired ratios, and how far they spread."""
        self.summary(
            ratio=round(statistics.median(ratios), 3), low=round(min(ratios), 3), high=round(max(ratios), 3),
            pairs=len(ratios), **values,
        )  # fmt: skip


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def served_s(server: BrokerServer) -> float:
    """User and system time of a broker."""
    spent = server.client.info("cpu")
    return float(spent["used_cpu_user"]) + float(spent["used_cpu_sys"])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(f"{name} {each}" for name, each in value.items())
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else results()
    print("| benchmark | settings and results | ratio (lowest to highest, pairs) |\n| --- | --- | --- |")
    for raw in path.open():
        line = json.loads(raw)
        if not line.pop("summary", False):
            continue
        bench, ratio = line.pop("bench"), line.pop("ratio", None)
        spread = f"{ratio:g} ({line.pop('low'):g} to {line.pop('high'):g}, {line.pop('pairs')})" if ratio else ""
        line.pop("at")
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in line.items())
        print(f"| {bench} | {shown} | {spread} |")


if __name__ == "__main__":
    main()
