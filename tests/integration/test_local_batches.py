"""Local batches as a second terminal sees them: their progress while they run, and that nobody runs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.conftest import CASES
from tests.invariants import chat_line, chat_lines
from tests.servers import MODEL, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

    from tests.servers import Process, Workplace

ECHO = ("--local", "--engine", "echo", "--model", MODEL)
NOT_RUNNING = "(not running; the same command goes on with it)"

#: One shard, which stays open for its last request: what has finished is in the broker alone.
LINES = [*chat_lines(9), chat_line("slow", "x", echo={"latency_s": 300})]


@contextmanager
def running(workplace: Workplace, **environment: str) -> Iterator[tuple[Process, str]]:
    """A submit whose quick requests are done, and its batch's id."""
    path = workplace.write("in.jsonl", LINES)
    process = workplace.start_producer("submit", str(path), *ECHO, **environment)
    try:
        wait_until(lambda: "requests in" in process.stderr or not process.running, 30, "the batch is durable")
        yield process, process.stderr.partition(":")[0]
    finally:
        process.stop()


def look(workplace: Workplace, *arguments: str, **environment: str) -> str:
    """What a look prints."""
    result = workplace.producer(*arguments, "--local", timeout_s=20, **environment)
    assert result.code == 0, result.stderr
    return result.stdout.decode()


def done(workplace: Workplace, batch_id: str, **environment: str) -> int:
    """How many requests the batch object counts as completed."""
    shown = json.loads(look(workplace, "status", batch_id, "--json", **environment))
    assert shown["status"] == "in_progress"
    counted: int = shown["request_counts"]["completed"]
    return counted


def broker_of(workplace: Workplace) -> psutil.Process:
    (found,) = (each for each in workplace.alive() if "valkey" in each.name() or "redis" in each.name())
    return found


@pytest.mark.parametrize("short", [False, True], ids=["socket elsewhere", "socket in the folder"])
def test_a_second_terminal_sees_the_progress_of_a_running_batch(workplace: Workplace, short: bool) -> None:
    with tempfile.TemporaryDirectory() as state:  # the workplace's own folder is too long for a socket
        there = {"XDG_STATE_HOME": state} if short else {}
        with running(workplace, **there) as (process, batch_id):
            wait_until(lambda: done(workplace, batch_id, **there) == 9, 30, "the quick ones are done")

            for command in (("status",), ("status", batch_id), ("list",)):
                (line,) = look(workplace, *command, **there).splitlines()
                assert batch_id in line
                assert "9/10 done" in line
                assert "(" not in line
            assert process.running
            process.send(signal.SIGINT)
            assert process.wait(30).code == 130

        assert NOT_RUNNING in look(workplace, "status", **there)
        assert not workplace.alive()


def test_a_batch_that_nobody_runs_shows_what_is_stored_and_how_it_goes_on(workplace: Workplace) -> None:
    lines = [*chat_lines(40), chat_line("slow", "x", echo={"latency_s": 300})]
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"
    process = workplace.start_producer("submit", str(path), *ECHO, "-o", str(output))
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 16, 60, "a shard is sealed")
    process.send(signal.SIGKILL)
    process.wait(10)
    wait_until(lambda: not workplace.alive(), 30, "processes of a killed producer end")
    for folder in workplace.temp.glob("fleet-*"):
        shutil.rmtree(folder)  # nobody is left to remove it

    (line,) = look(workplace, "status").splitlines()

    assert line.endswith(NOT_RUNNING)
    assert int(line.split("/")[0].split()[-1]) >= 16
    assert not workplace.alive(), "no look starts anything"


def test_a_closed_batch_has_no_note(workplace: Workplace) -> None:
    assert workplace.producer("submit", str(CASES / "base40.jsonl"), *ECHO, "-o", "out.jsonl").code == 0

    (line,) = look(workplace, "list").splitlines()

    assert "40/40 done" in line
    assert "(" not in line


def test_a_broker_that_is_silent_costs_a_moment_and_is_no_absence(workplace: Workplace) -> None:
    with running(workplace) as (process, batch_id):
        wait_until(lambda: done(workplace, batch_id) == 9, 30, "the quick ones are done")
        frozen = broker_of(workplace)
        frozen.suspend()
        try:
            (line,) = look(workplace, "status").splitlines()
        finally:
            frozen.resume()

        assert line.endswith("(running; its broker does not tell yet what is not stored)")
        assert "0/10 done" in line
        process.send(signal.SIGINT)
        process.wait(30)


def test_a_socket_that_nobody_listens_on_is_no_absence(workplace: Workplace) -> None:
    """As between a broker's death and the moment in which its producer sees it."""
    with running(workplace) as (process, _):
        process.send(signal.SIGSTOP)
        os.kill(broker_of(workplace).pid, signal.SIGKILL)
        try:
            (line,) = look(workplace, "status").splitlines()
        finally:
            process.send(signal.SIGCONT)

        assert line.endswith("(running; its broker does not tell yet what is not stored)")
        process.wait(30)
