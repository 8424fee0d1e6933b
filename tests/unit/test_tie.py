"""An engine's process ends with its worker and hears none of its group's signals.

With real processes and no vLLM: a worker stands in for the fleet's, its spawned child for vLLM's engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workers.engine import tie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]

WORKER = '''
import multiprocessing, signal, sys

def engine(conn, how):
    """Answer pings. Ends by SIGINT's KeyboardInterrupt, or by SIGKILL; not by the worker's end of the pipe."""
    from workers.engine import tie
    if how == "register":
        tie.register()
    elif how == "kernel":
        assert tie.tie_by_kernel(multiprocessing.parent_process())
    elif how == "thread":
        tie.tie_by_thread(multiprocessing.parent_process())
    conn.send("ready")
    while True:
        try:
            conn.send(conn.recv())
        except (EOFError, OSError):
            signal.pause()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs, sys.argv[1]))
    child.start()
    theirs.close()
    print(child.pid, ours.recv(), flush=True)
    for line in sys.stdin:
        try:
            ours.send(line)
            ours.recv()
            print("alive", flush=True)
        except (EOFError, OSError):
            print("dead", flush=True)
'''


class Worker:
    """A worker process that leads a process group of its own, and its engine."""

    def __init__(self, script: Path, how: str, *, armed: bool) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
        env["PYTHONPATH"] = str(ROOT)
        if armed:
            env[tie.WORKER_ENV] = "1"
        self.process = subprocess.Popen(
            [sys.executable, str(script), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        pid, ready = self.process.stdout.readline().split()
        assert ready == "ready"
        self.engine_pid = int(pid)

    def ask_engine(self) -> str:
        """Whether the engine still answers. It takes a pending signal before it reads the question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("ping\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        """End both processes by their ids."""
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.engine_pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            # What is still buffered for a killed worker cannot be flushed.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers; ends them, and their engines, after the test."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    workers: list[Worker] = []

    def start(how: str = "register", *, armed: bool = True) -> Worker:
        workers.append(Worker(script, how, armed=armed))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def is_running(pid: int) -> bool:
    """False also for a zombie: where pid 1 does not reap, a killed process stays one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        ps = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return ps.stdout.strip() != "" and "Z" not in ps.stdout
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return once `predicate` holds; fail with `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "how",
    [
        "register",
        "thread",
        pytest.param("kernel", marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")),
    ],
)
def test_an_engine_ends_with_a_killed_worker(start_worker: Callable[..., Worker], how: str) -> None:
    """SIGKILL of the worker leaves no process on the GPU."""
    worker = start_worker(how)
    assert is_running(worker.engine_pid)
    worker.process.kill()
    worker.process.wait(10)
    wait_until(lambda: not is_running(worker.engine_pid), 10, "the engine ends with its worker")


def test_ctrl_c_does_not_reach_the_engine(start_worker: Callable[..., Worker]) -> None:
    """SIGINT to the worker's group leaves the engine answering."""
    worker = start_worker()
    os.killpg(worker.process.pid, signal.SIGINT)
    assert worker.ask_engine() == "alive"


def test_without_the_shield_ctrl_c_ends_the_engine(start_worker: Callable[..., Worker]) -> None:
    """The control of the test above; and the plugin does nothing in programs that are no workers."""
    worker = start_worker(armed=False)
    os.killpg(worker.process.pid, signal.SIGINT)
    assert worker.ask_engine() == "dead"


def test_register_does_nothing_in_a_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker itself loads the plugin too; it keeps its session."""
    monkeypatch.setenv(tie.WORKER_ENV, "1")
    session = os.getsid(0)
    tie.register()
    assert os.getsid(0) == session


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": "fleet"}),
        ({"VLLM_PLUGINS": "mine"}, {"VLLM_PLUGINS": "mine,fleet"}),
        ({"VLLM_PLUGINS": "fleet,mine"}, {"VLLM_PLUGINS": "fleet,mine"}),
    ],
)
def test_a_users_allow_list_names_our_plugin(before: dict[str, str], after: dict[str, str]) -> None:
    """A user's VLLM_PLUGINS does not switch off the tie."""
    tie.allow_plugin(before)
    assert before == after


def test_the_first_reason_of_a_failed_start_is_kept(tmp_path: Path) -> None:
    """The cause wins over what follows from it, and errors of a running engine are not kept."""
    path = tmp_path / "reason"
    tie.keep_start_failure(str(path))
    engine, executor = (logging.getLogger(name) for name in tie._START_LOGGERS)
    try:
        _log_failure(engine, "EngineCore encountered a fatal error.", ValueError("a prompt"))
        assert not path.exists()
        _log_failure(executor, "WorkerProc failed to start.", ValueError("no memory\nmore of it"))
        _log_failure(engine, "EngineCore failed to start.", RuntimeError("a worker process failed"))
        assert path.read_text() == "no memory"
    finally:
        for logger in (engine, executor):
            for handler in list(logger.handlers):
                logger.removeHandler(handler)


def _log_failure(logger: logging.Logger, message: str, exc: Exception) -> None:
    try:
        raise exc
    except type(exc):
        logger.exception(message)
