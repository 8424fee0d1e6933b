"""Replay every case against a running fleet, and print a table: case, who answered, expected, got, verdict.

    python tests/cases/replay.py [--engine echo] [CASE…]

Cases that need a real engine are replayed on vLLM with a small chat model (FLEET_TEST_MODEL) and with an embedding
model (FLEET_TEST_EMBEDDING_MODEL); `make cases` prepares both. With `--engine echo` only what the echo engine can show
is replayed. Exit 1 when any verdict is not "right"; a case whose model is missing is "not run", which is not right.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A script's own folder is on the path; the tests' packages lie two above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.replays import ALL, C_LOCALE, IN_C_LOCALE, Target, judge
from tests.servers import STOP_S, FleetServers, wait_until
from tests.vllm_flags import FLAGS, SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.replays import Case
    from tests.servers import Process

#: Every case ends within this: nothing may wait without end.
LIMIT_S = 120.0
#: A real engine loads for 15 s, and longer on a busy machine.
LOAD_S = 300.0

#: Where the models of real engines are looked for, as in the tests.
MODELS: dict[Target, str] = {"chat": "FLEET_TEST_MODEL", "embeddings": "FLEET_TEST_EMBEDDING_MODEL"}


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    case: str
    on: str
    expected: str
    got: str
    verdict: str


def model_folder(target: Target) -> Path | None:
    """Where the model of a real engine lies; None where it is missing."""
    folder = Path(os.environ.get(MODELS[target]) or "none")
    return folder.resolve() if (folder / "config.json").is_file() else None


class Fleet:
    """A running fleet with one engine of the kind that its cases need."""

    def __init__(self, folder: Path, target: Target, model: Path | None, **environment: str) -> None:
        self.servers = FleetServers(folder, **environment)
        self._stack = ExitStack()
        self._stack.callback(self.servers.close)
        self._listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._listener.setblocking(False)
        try:
            self.servers.aggregator()
            self.worker = self.servers.worker() if target == "echo" else self._real(str(model), target)
        except BaseException:
            self.close()
            raise

    def _real(self, model: str, target: Target) -> Process:
        flags = FLAGS if target == "chat" else SMALL
        worker = self.servers.start("engine", "-m", "workers", "serve", model, *flags)
        wait_until(lambda: self.servers.is_ready(worker) or not worker.running, LOAD_S, "the engine is loaded")
        assert worker.running, worker.stderr[-2000:]
        return worker

    def close(self) -> None:
        """End it; fails when it leaves anything behind."""
        self.servers.stop_all()
        # What Python's multiprocessing starts ends a moment after its parent. The broker is still there.
        wait_until(lambda: len(self.servers.alive()) <= 1, STOP_S, "only the broker is left")
        self._stack.close()

    def engine(self) -> set[int]:
        """The worker's processes: an engine that was replaced is not the same one."""
        return {process.pid for process in self.servers.alive("Engine")} | {self.worker.pid}

    def replay(self, case: Case) -> tuple[str, list[str]]:
        """What came of the case, and what is wrong with it."""
        name = case.file.removesuffix(".jsonl")
        source = case.write(self.servers.folder / case.file, listener_port=self._listener.getsockname()[1])
        output = self.servers.folder / f"{name}.out"
        before = self.engine()
        run = self.servers.producer("submit", str(source), "-o", str(output), timeout_s=LIMIT_S)
        outcome = judge(case, source, run, output)
        problems = list(outcome.problems)
        if self.engine() != before or not self.worker.running:
            problems.append("the engine is another one now")
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            pass
        else:
            problems.append("somebody connected to this machine")
        return outcome.got, problems


def replay(cases: list[Case], target: Target) -> Iterator[Line]:
    """Replay cases on one kind of engine."""
    model = None
    if target != "echo" and (model := model_folder(target)) is None:
        for case in cases:
            yield Line(case.file, target, case.expected, "", f"not run: {MODELS[target]} names no model folder")
        return
    for in_c_locale in (False, True):
        chosen = [case for case in cases if (case.file in IN_C_LOCALE) == in_c_locale]
        if not chosen:
            continue
        environment = C_LOCALE if in_c_locale else {}
        try:
            with (
                tempfile.TemporaryDirectory(prefix="replay-") as folder,
                closing(Fleet(Path(folder), target, model, **environment)) as fleet,
            ):
                for case in chosen:
                    yield replay_one(fleet, case, target)
        except AssertionError as exc:
            yield Line("fleet", target, "starts, and ends clean", "", f"WRONG: {exc}")


def replay_one(fleet: Fleet, case: Case, target: Target) -> Line:
    """Replay one case."""
    try:
        got, problems = fleet.replay(case)
    except AssertionError as exc:  # it did not end
        got, problems = "", [str(exc)[:200]]
    verdict = "right" if not problems else f"WRONG: {'; '.join(problems)}"
    return Line(case.file, target, case.expected, got, verdict)


def show(line: Line) -> None:
    """Print one line of the table."""
    cells: Any = (line.case.removesuffix(".jsonl"), line.on, line.expected, line.got, line.verdict)
    print("{:<7} {:<10} {:<28} {:<28} {}".format(*cells), flush=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Replay the cases of tests/cases against a running fleet.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="for example I27; default: all")
    parser.add_argument("--engine", choices=("all", "echo"), default="all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the fleet would outlive us
    chosen = [case for case in ALL.values() if not options.cases or case.id in options.cases]
    lines: list[Line] = []
    show(Line("case", "on", "expected", "got", "verdict"))
    targets: list[Target] = ["echo"] if options.engine == "echo" else ["echo", "chat", "embeddings"]
    for target in targets:
        for line in replay([case for case in chosen if target in case.targets], target):
            lines.append(line)
            show(line)
    wrong = [line for line in lines if line.verdict != "right"]
    print(f"{len(lines)} replays, {len(lines) - len(wrong)} right, {len(wrong)} wrong or not run")
    return 1 if wrong or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
