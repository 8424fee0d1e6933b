"""`producer submit --local`: a whole fleet on this machine that is gone with the command, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from common import layout
from common.ledger import Ledger
from common.store import LocalStore
from tests.conftest import CASES
from tests.invariants import assert_complete, assert_prefix, chat_line, chat_lines, input_lines
from tests.servers import MODEL, wait_until

if TYPE_CHECKING:
    from tests.servers import Process, Result, Workplace

ECHO = ("--local", "--engine", "echo", "--model", MODEL)

#: Fast requests that fill the first shards, slow ones behind them: an interruption finds some parts and some not.
SLOW_S = 3.0


def half_slow(slow_s: float = SLOW_S) -> list[str]:
    return [*chat_lines(48), *(chat_line(f"slow{n}", f"slow text {n}", echo={"latency_s": slow_s}) for n in range(32))]


def rows_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_one_sentence(result: Result) -> str:
    """The reason is one line for people; returns it."""
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, result.stderr
    return said[0]


def local_folders(workplace: Workplace) -> list[str]:
    """The folders of local brokers that are kept for the same command to go on with."""
    folder = workplace.state / "batch-fleet" / "local"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def local_broker(workplace: Workplace) -> redis.Redis:
    """A client of the running local broker."""
    (path,) = (path for path in workplace.sockets() if path.is_socket())
    return redis.Redis(unix_socket_path=str(path))


def stored_batches(workplace: Workplace) -> list[Path]:
    """The batches that are whole in the store."""
    return list(workplace.state.glob("batch-fleet/batches/*/manifest.json"))


def worker_pids(workplace: Workplace) -> list[int]:
    """Process ids of the local workers, from their heartbeats."""
    with local_broker(workplace) as client:
        return [int(beat.worker_id.rsplit("-", 2)[1]) for beat in Ledger(client).workers() if beat.engine]


def test_a_plain_file_comes_back_whole_and_in_order_and_nothing_stays_behind(workplace: Workplace) -> None:
    output = workplace.folder / "out.jsonl"

    result = workplace.producer("submit", str(CASES / "base40.jsonl"), *ECHO, "-o", str(output))

    assert result.code == 0, result.stderr
    assert result.stdout == b""
    assert_complete(input_lines(CASES / "base40.jsonl"), output.read_bytes())
    assert "40 ok, 0 failed" in result.stderr
    workplace.assert_nothing_left()
    assert local_folders(workplace) == []


def interrupted(workplace: Workplace, path: Path, output: Path, number: signal.Signals) -> Process:
    """A submit that got the signal once part of the output was there and slow requests were running."""
    process = workplace.start_producer("submit", str(path), *ECHO, "-o", str(output))
    wait_until(lambda: rows_in(output) >= 16 or not process.running, 60, "the first shard is in the output")
    process.send(number)
    return process


def test_ctrl_c_ends_everything_and_the_same_command_goes_on(workplace: Workplace) -> None:
    lines = half_slow()
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"

    first = interrupted(workplace, path, output, signal.SIGINT).wait(30)

    assert first.code == 130, first.stderr
    assert "Traceback" not in first.stderr
    workplace.assert_nothing_left()
    assert 16 <= assert_prefix(lines, output.read_bytes()) < len(lines)
    (batch_id,) = local_folders(workplace)
    assert batch_id in first.stderr

    second = workplace.producer("submit", str(path), *ECHO, "-o", str(output))

    assert second.code == 0, second.stderr
    assert batch_id in second.stderr
    assert_complete(lines, output.read_bytes())
    assert local_folders(workplace) == []


def test_a_second_ctrl_c_does_not_leave_processes_behind(workplace: Workplace) -> None:
    path, output = workplace.write("in.jsonl", half_slow(5.0)), workplace.folder / "out.jsonl"

    process = interrupted(workplace, path, output, signal.SIGINT)
    process.send(signal.SIGINT)

    assert process.wait(30).code == 130
    workplace.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_supervisor_or_a_closed_terminal_ends_everything(
    workplace: Workplace, hangups: None, number: signal.Signals
) -> None:
    lines = half_slow(5.0)
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"

    result = interrupted(workplace, path, output, number).wait(30)

    assert result.code == 128 + number, result.stderr
    workplace.assert_nothing_left()
    assert_prefix(lines, output.read_bytes())


def test_a_producer_that_is_killed_takes_its_fleet_along_and_the_same_command_goes_on(workplace: Workplace) -> None:
    lines = half_slow()
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"

    interrupted(workplace, path, output, signal.SIGKILL).wait(5)

    wait_until(lambda: not workplace.alive(), 30, "processes of a killed producer end")
    for folder in workplace.temp.glob("fleet-*"):  # Nobody is left to remove it.
        shutil.rmtree(folder)
    assert_prefix(lines, output.read_bytes())

    second = workplace.producer("submit", str(path), *ECHO, "-o", str(output))

    assert second.code == 0, second.stderr
    assert_complete(lines, output.read_bytes())


def test_an_engine_that_cannot_start_is_one_sentence_and_touches_nothing(workplace: Workplace) -> None:
    path, output = workplace.write("in.jsonl", chat_lines(3)), workplace.folder / "out.jsonl"
    output.write_bytes(b"kept\n")

    result = workplace.producer("submit", str(path), *ECHO, "-o", str(output), "--", "--no-such-flag")

    assert result.code == 2, result.stderr
    assert "--no-such-flag" in assert_one_sentence(result)
    assert output.read_bytes() == b"kept\n"
    workplace.assert_nothing_left()


def test_a_worker_that_is_killed_is_replaced_and_the_batch_completes(workplace: Workplace) -> None:
    """What it ran is run again once its lease has run out."""
    lines = half_slow(4.0)
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"
    process = workplace.start_producer(
        "submit", str(path), *ECHO, "-o", str(output), FLEET_LEASE_S="3", FLEET_TEST_SHORT_LEASES="1"
    )
    wait_until(lambda: rows_in(output) >= 16 or not process.running, 60, "the first shard is in the output")

    (pid,) = worker_pids(workplace)
    assert len(workplace.alive()) == 4, "the producer, its broker, aggregator and worker"
    os.kill(pid, signal.SIGKILL)
    result = process.wait(60)

    assert result.code == 0, result.stderr
    assert "worker-1 died and was started again" in result.stderr
    assert_complete(lines, output.read_bytes())
    workplace.assert_nothing_left()


def test_a_broker_that_is_killed_ends_the_command_and_the_same_command_completes(workplace: Workplace) -> None:
    lines = half_slow(4.0)
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"
    process = workplace.start_producer("submit", str(path), *ECHO, "-o", str(output))
    wait_until(lambda: rows_in(output) >= 16 or not process.running, 60, "the first shard is in the output")

    with local_broker(workplace) as client:
        pid = int(client.info("server")["process_id"])
    os.kill(pid, signal.SIGKILL)
    first = process.wait(60)

    assert first.code == 1, first.stderr
    assert "broker" in assert_one_sentence(first)
    assert not workplace.alive()
    assert_prefix(lines, output.read_bytes())

    second = workplace.producer("submit", str(path), *ECHO, "-o", str(output))

    assert second.code == 0, second.stderr
    assert_complete(lines, output.read_bytes())


def test_a_broker_that_is_killed_leaves_no_socket(workplace: Workplace) -> None:
    path = workplace.write("in.jsonl", [chat_line("slow", "x", echo={"latency_s": 300})])
    with tempfile.TemporaryDirectory() as state:  # the test's own is too long for a socket
        workplace.state = Path(state)
        process = workplace.start_producer(
            "submit", str(path), *ECHO, "-o", str(workplace.folder / "out.jsonl"), XDG_STATE_HOME=state
        )
        wait_until(lambda: stored_batches(workplace) or not process.running, 60, "the batch is stored")
        (socket,) = workplace.sockets()
        assert socket.is_relative_to(state)
        with local_broker(workplace) as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGKILL)

        assert process.wait(60).code == 1
        workplace.assert_nothing_left()


def broken_broker(workplace: Workplace, content: bytes) -> str:
    """A PATH whose `valkey-server` is a file of this content."""
    server = workplace.folder / "broken" / "valkey-server"
    server.parent.mkdir()
    server.write_bytes(content)
    server.chmod(0o755)
    return f"{server.parent}{os.pathsep}{workplace.environment['PATH']}"


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"#!/bin/sh\necho first\necho no such option\nexit 1\n", 1, "exit code 1); it said last: no such option"),
        (b"#!/bin/sh\nexit 1\n", 1, "error: broker died (exit code 1)"),
        (b"no program", 2, "valkey-server cannot be run: Exec format error"),
        (b'#!/bin/sh\nexec SERVER "$@" --rename-command DEL NO\n', 1, "error: the broker failed (ResponseError)"),
    ],
    ids=["says why", "says nothing", "no program", "lacks a command"],
)
def test_a_broker_that_cannot_start_leaves_nothing(
    workplace: Workplace, server: str, content: bytes, code: int, said: str
) -> None:
    path = workplace.write("in.jsonl", chat_lines(3))
    broken = broken_broker(workplace, content.replace(b"SERVER", server.encode()))

    result = workplace.producer("submit", str(path), *ECHO, PATH=broken)

    assert result.code == code
    assert assert_one_sentence(result).endswith(said)
    assert local_folders(workplace) == []
    workplace.assert_nothing_left()


def test_an_open_batch_outlives_a_broker_that_cannot_start(workplace: Workplace) -> None:
    path, output = workplace.write("in.jsonl", half_slow()), workplace.folder / "out.jsonl"
    assert interrupted(workplace, path, output, signal.SIGINT).wait(30).code == 130
    before = local_folders(workplace)

    server = broken_broker(workplace, b"#!/bin/sh\nexit 1\n")
    result = workplace.producer("submit", str(path), *ECHO, "-o", str(output), PATH=server)

    assert result.code == 1
    assert assert_one_sentence(result).endswith("broker.log; the same submit goes on where it stopped")
    assert local_folders(workplace) == before
    assert len(before) == 1


def test_a_batch_that_was_sealed_but_not_assembled_is_finished_by_the_same_command(workplace: Workplace) -> None:
    """Given every part exists but the run has no end, as after a kill in between, the same command must not wait."""
    path, output = workplace.write("in.jsonl", chat_lines(20)), workplace.folder / "out.jsonl"
    command = ("submit", str(path), *ECHO, "-o", str(output))
    assert workplace.producer(*command).code == 0
    store = LocalStore(workplace.state / "batch-fleet")
    (batch_id,) = store.names(layout.BATCHES)
    (store.root / layout.end(batch_id, 1)).unlink()

    process = workplace.start_producer(*command)
    try:
        wait_until(lambda: not process.running, 60, "the command ends")
    finally:
        result = process.stop()

    assert result.code == 0, result.stderr
    assert batch_id in result.stderr
    assert_complete(input_lines(path), output.read_bytes())


def test_two_workers_share_the_work_and_the_output_is_one_in_order(workplace: Workplace) -> None:
    lines = chat_lines(2000)
    path, output = workplace.write("in.jsonl", lines), workplace.folder / "out.jsonl"
    process = workplace.start_producer(
        "submit", str(path), *ECHO, "--workers", "2", "-o", str(output),
        "--", "--latency-s", "0.2", "--max-inflight", "32",
    )  # fmt: skip
    wait_until(lambda: any(path.is_socket() for path in workplace.sockets()), 30, "the broker has a socket")
    seen: dict[bytes, set[bytes]] = {}

    def look() -> bool:
        """Note which worker is marked as running which request."""
        try:
            for key in client.scan_iter("fleet:*:marks:*"):
                for index, mark in client.hgetall(key).items():
                    seen.setdefault(mark.partition(b"/")[0], set()).add(index)
        except redis.RedisError:
            pass  # the broker is starting, or gone
        return not process.running

    with local_broker(workplace) as client:
        wait_until(look, 90, "the batch is done")

    result = process.wait(1)
    assert result.code == 0, result.stderr
    assert_complete(lines, output.read_bytes())
    assert len(seen) == 2
    assert min(len(indexes) for indexes in seen.values()) > 200


def test_local_needs_a_model_and_does_not_detach(workplace: Workplace) -> None:
    path = workplace.write("in.jsonl", chat_lines(1))

    without_model = workplace.producer("submit", str(path), "--local", "--engine", "echo")
    detached = workplace.producer("submit", str(path), *ECHO, "--detach")

    assert (without_model.code, detached.code) == (2, 2)
    assert "--model" in assert_one_sentence(without_model)
    assert "--detach" in assert_one_sentence(detached)
    assert not (workplace.folder / "in.out.jsonl").exists()


def test_a_local_fleet_runs_its_own_batch_alone(workplace: Workplace) -> None:
    """An interrupted one in the same store waits for its own command, which has its own model."""
    held = workplace.write("held.jsonl", [chat_line(f"h{n}", "x", echo={"latency_s": 30}) for n in range(4)])
    mine = ("--local", "--engine", "echo", "--model", "test-model")
    first = workplace.start_producer("submit", str(held), *mine)
    wait_until(lambda: "requests in" in first.stderr, 30, "the batch is durable")
    first.send(signal.SIGINT)
    assert first.wait(30).code == 130
    (folder,) = workplace.state.glob("batch-fleet/batches/*")

    # Longer than the watchdog's interval.
    other = workplace.write("other.jsonl", [chat_line("o", "x", model="other", echo={"latency_s": 8})])
    run = workplace.producer("submit", str(other), "--local", "--engine", "echo", "--model", "other")

    assert run.code == 0, run.stderr
    assert not (folder / "runs/1/end.json").exists()
    assert not list(folder.glob("runs/1/parts/*"))
    # Cancelled while nobody runs it, it ends as that at once.
    assert workplace.producer("cancel", folder.name, "--local").code == 0
    assert (folder / "runs/1/end.json").exists()
