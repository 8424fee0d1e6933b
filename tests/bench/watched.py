"""A fleet of echo workers that come and go, and every engine call of it, as Redis saw it.

Counts what a fleet repeats: the ledger's own scripts tell of each call by a mark and a count, and of each row, and
MONITOR shows both with the server's time. So nothing is lost with a worker that dies.
"""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis

from tests.invariants import assert_complete, chat_line
from tests.servers import MODEL, START_S, FleetServers, Process, wait_until

if TYPE_CHECKING:
    from pathlib import Path


def latency_lines(count: int, shortest_s: float, longest_s: float, seed: int) -> list[str]:
    """Requests that take between the two, evenly."""
    dice = random.Random(seed)
    return [
        chat_line(f"r{n:06d}", f"number {n}", echo={"latency_s": round(dice.uniform(shortest_s, longest_s), 3)})
        for n in range(count)
    ]


@dataclass
class Call:
    """One engine call of a request, on the worker with this process id."""

    pid: int
    began: float
    ended: float | None = None


@dataclass
class Calls:
    """All engine calls, by shard and index."""

    by_request: dict[tuple[str, str], list[Call]] = field(default_factory=dict)
    rows: int = 0

    def see(self, at: float, words: list[str], marks: dict[tuple[str, str], int]) -> None:
        """One command of a script."""
        if len(words) < 4 or not words[1].startswith("fleet:batch_"):
            return
        kind, _, shard = words[1].rpartition(":")
        request = (shard, words[2])
        verb = words[0].upper()
        if verb == "HSET" and kind.endswith(":marks"):
            marks[request] = int(words[3].partition("/")[0].split("-")[-2])
        elif verb == "HINCRBY" and kind.endswith(":calls"):
            self.by_request.setdefault(request, []).append(Call(marks[request], at))
        elif verb == "HSETNX" and kind.endswith(":rows"):
            self.rows += 1
            last = self.by_request[request][-1]
            last.ended = last.ended or at


class WatchedFleet:
    """A broker, an aggregator, workers that are started and stopped, and the calls that they made."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.servers = FleetServers(folder, **environment)
        self.calls = Calls()
        self.ready_at: dict[int, float] = {}
        self.left_at: dict[int, float] = {}
        self._monitor = self.servers.client.monitor()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._watching = threading.Event()
        self._thread.start()
        assert self._watching.wait(START_S)

    def _watch(self) -> None:
        marks: dict[tuple[str, str], int] = {}
        # The broker's end is the end of this thread.
        with self._monitor as monitor, suppress(redis.ConnectionError):
            self._watching.set()
            while not self._ended.is_set():
                seen = monitor.next_command()
                # Values of no interest may hold blanks and quotes; keys, indexes and marks never do.
                words = [word.strip('"') for word in str(seen["command"]).split(" ", 4)[:4]]
                self.calls.see(float(seen["time"]), words, marks)

    def start_worker(self, inflight: int) -> Process:
        """Start a worker; it counts as ready when its heartbeat says so: call `note_ready` now and then."""
        return self.servers.start_worker("--max-inflight", str(inflight))

    def note_ready(self, workers: list[Process]) -> int:
        """How many of these are ready; remembers since when."""
        for worker in workers:
            if worker.pid not in self.ready_at and worker.running and self.servers.is_ready(worker):
                self.ready_at[worker.pid] = time.time()
        return sum(worker.pid in self.ready_at and worker.running for worker in workers)

    def note_left(self, worker: Process) -> None:
        """The worker takes no more: from now on it is not idle."""
        self.left_at.setdefault(worker.pid, time.time())

    def report(self, lines: list[str], output: bytes, ended: dict[int, float], inflight: int) -> dict[str, Any]:
        """What was lost, repeated and idle. `ended` tells when workers that were stopped let their requests go."""
        assert_complete(lines, output)
        wait_until(lambda: self.calls.rows >= len(lines), 20, "all rows were seen")
        repeated_s, busy_s, twice, unexplained = 0.0, dict.fromkeys(self.ready_at, 0.0), 0, 0
        for calls in self.calls.by_request.values():
            twice += len(calls) > 1
            for call in calls:
                until = call.ended or ended.get(call.pid)
                if until is None:
                    unexplained += 1
                    continue
                busy_s[call.pid] = busy_s.get(call.pid, 0.0) + max(0.0, until - call.began)
                if call.ended is None:
                    repeated_s += max(0.0, until - call.began)
        total = sum(len(calls) for calls in self.calls.by_request.values())
        ready_s = {pid: self.left_at.get(pid, time.time()) - since for pid, since in self.ready_at.items()}
        idle_s = sum(max(0.0, seconds - busy_s[pid] / inflight) for pid, seconds in ready_s.items())
        return {
            "requests": len(lines),
            "rows_lost": len(lines) - len(output.splitlines()),
            "engine_calls": total,
            "run_more_than_once": twice,
            # Neither was its worker stopped nor did the call end in a row.
            "unexplained_repeats": unexplained,
            "extra_calls_percent": round(100 * (total - len(lines)) / len(lines), 2),
            "repeated_work_s": round(repeated_s, 1),
            "all_work_s": round(sum(busy_s.values()), 1),
            "repeated_percent": round(100 * repeated_s / max(1e-9, sum(busy_s.values())), 2),
            "ready_worker_s": round(sum(ready_s.values()), 1),
            "idle_worker_s": round(idle_s, 1),
        }

    def submit(self, lines: list[str]) -> tuple[Process, Path]:
        """Start a producer that waits for the rows."""
        source, output = self.servers.write("in.jsonl", lines), self.servers.folder / "out.jsonl"
        return self.servers.start_producer("submit", str(source), "-o", str(output)), output

    def close(self) -> None:
        """End everything that is left."""
        self._ended.set()
        self.servers.end()
        self.servers.broker.stop()


def show(figures: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps({"model": MODEL, **figures}), flush=True)
