"""Local batches as a second terminal sees them: their progress while they run, and their end when nobody does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from common.batch import BatchStatus
from common.store import LocalStore
from producer import local_batches
from tests.conftest import CASES
from tests.invariants import chat_line, chat_lines, rows_of
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
    workplace.write("in.jsonl", LINES)
    process = workplace.start_producer("submit", "in.jsonl", *ECHO, **environment)
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
    (found,) = workplace.alive("valkey", "redis")
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


def interrupted(workplace: Workplace, number: signal.Signals = signal.SIGINT) -> str:
    """The id of a batch whose quick requests are done, and that nobody runs any more."""
    with running(workplace) as (process, batch_id):
        wait_until(lambda: done(workplace, batch_id) == 9, 30, "the quick ones are done")
        process.send(number)
        process.wait(30)
    wait_until(lambda: not workplace.alive(), 30, "everything has ended")
    return batch_id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_batch_that_nobody_runs_is_cancelled_at_once(workplace: Workplace, number: signal.Signals) -> None:
    """Rows that are in the broker's file alone are kept."""
    batch_id = interrupted(workplace, number)
    for folder in workplace.temp.glob("fleet-*"):
        shutil.rmtree(folder)  # nobody is left to remove it

    result = workplace.producer("cancel", batch_id, "--local")

    assert result.code == 0, result.stderr
    assert f"{batch_id} was not running and is cancelled now" in result.stderr
    workplace.assert_nothing_left()
    assert not list(workplace.state.glob("batch-fleet/local/*"))
    (line,) = look(workplace, "list").splitlines()
    assert "cancelled    10/10 done, 1 failed" in line
    assert workplace.producer("fetch", batch_id, "--local", "-o", "out.jsonl").code == 4
    rows = rows_of((workplace.folder / "out.jsonl").read_bytes())
    assert [row["error"] and row["error"]["code"] for row in rows] == [None] * 9 + ["cancelled"]


def test_a_batch_that_runs_is_left_to_its_command(workplace: Workplace) -> None:
    with running(workplace) as (process, batch_id):
        wait_until(lambda: done(workplace, batch_id) == 9, 30, "the quick ones are done")

        result = workplace.producer("cancel", batch_id, "--local")

        assert result.code == 0
        assert "within seconds if its command runs" in result.stderr
        assert process.wait(30).code == 4
    assert "9 ok, 1 failed" in process.stderr


def test_a_batch_whose_broker_s_file_is_elsewhere_is_not_ended_here(workplace: Workplace) -> None:
    """On the machine where it ran, in a store that both share, are rows that this one does not know."""
    batch_id = interrupted(workplace)
    elsewhere = {"FLEET_STORE": str(workplace.state / "batch-fleet"), "XDG_STATE_HOME": str(workplace.folder / "s2")}

    result = workplace.producer("cancel", batch_id, "--local", **elsewhere)

    assert "when that runs again" in result.stderr
    assert NOT_RUNNING in look(workplace, "status")
    assert "is cancelled now" in workplace.producer("cancel", batch_id, "--local").stderr
    assert "10/10 done, 1 failed" in look(workplace, "list")


def test_a_batch_that_cannot_be_ended_keeps_the_wish(workplace: Workplace) -> None:
    batch_id = interrupted(workplace)
    server = workplace.folder / "valkey-server"
    server.write_text("#!/bin/sh\nexit 1\n")
    server.chmod(0o755)

    result = workplace.producer("cancel", batch_id, "--local", PATH=f"{workplace.folder}:{os.environ['PATH']}")

    assert result.code == 0
    assert "could not be ended here (broker died" in result.stderr
    again = workplace.producer("submit", "in.jsonl", *ECHO)
    assert again.code == 4, again.stderr
    assert "9 ok, 1 failed" in again.stderr
    assert f"producer resume --local … {batch_id}" in again.stderr


def test_a_local_batch_in_a_fleets_store_is_cancelled_without_saying_local(workplace: Workplace) -> None:
    """No watchdog of the fleet would end it, and its finished rows are in its own broker's file."""
    there = {"FLEET_STORE": (workplace.folder / "shared").as_uri()}
    with running(workplace, **there) as (process, batch_id):
        wait_until(lambda: done(workplace, batch_id, **there) == 9, 30, "the quick ones are done")
        process.send(signal.SIGINT)
        assert process.wait(30).code == 130

    result = workplace.producer("cancel", batch_id, **there)

    assert result.code == 0
    assert f"{batch_id} was not running and is cancelled now" in result.stderr
    (line,) = look(workplace, "list", **there).splitlines()
    assert "cancelled    10/10 done, 1 failed" in line


def test_a_local_fleet_of_another_user_is_no_reason_to_list_nothing(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: str) -> str | None:
        raise PermissionError(13, "Permission denied")

    with running(workplace) as (process, _):
        process.send(signal.SIGINT)
        process.wait(30)
    store = LocalStore(workplace.state / "batch-fleet")
    monkeypatch.setattr(local_batches, "running_broker", refused)

    (seen,) = local_batches.see_all(store, None, local=True)

    assert seen.state.status is BatchStatus.IN_PROGRESS
    assert seen.note
