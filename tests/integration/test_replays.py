"""Replays of reported faults that need a worker, a broker or a signal of their own; see `tests/cases/README.md`."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from common import dispatch, keys
from tests.conftest import CASES
from tests.invariants import assert_complete, chat_line, input_lines
from tests.servers import MODEL, FleetServers, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.invariants import Wanted
    from tests.servers import Process

BASE40 = CASES / "base40.jsonl"


def slow_base40(latency_s: float) -> list[str]:
    """The forty plain requests, each of which takes a while."""
    lines = []
    for line in input_lines(BASE40):
        request = json.loads(line)
        request["body"]["echo"] = {"latency_s": latency_s}
        lines.append(json.dumps(request))
    return lines


def detach(fleet: FleetServers, lines: list[str]) -> str:
    run = fleet.producer("submit", str(fleet.write("in.jsonl", lines)), "--detach")
    assert run.code == 0, run.stderr
    return run.stdout.decode().strip()


def fetched(fleet: FleetServers, batch_id: str, code: int = 0) -> bytes:
    wait_until(lambda: fleet.is_closed(batch_id), 60, "the batch is closed")
    output: Path = fleet.folder / "out.jsonl"
    assert fleet.producer("fetch", batch_id, "-o", str(output)).code == code
    return output.read_bytes()


def marked(fleet: FleetServers, batch_id: str) -> set[int]:
    """Requests that run, by index."""
    found: set[int] = set()
    for key in fleet.client.scan_iter(f"fleet:{batch_id}:1:marks:*"):
        found.update(map(int, fleet.client.hkeys(key)))
    return found


#: A worker whose engine raises, on requests by their number, what no engine should.
RAISES = """
import asyncio, sys, threading
from workers.engine.echo import EchoEngine

class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__()
        self.lock = threading.Lock()

class Fatal(BaseException):
    pass

WHAT = {
    "r007": lambda: RuntimeError("x"),
    "r008": lambda: Unpicklable(1, 2),
    "r009": lambda: Fatal(),
    "r010": lambda: SystemExit(3),
    "r011": lambda: KeyboardInterrupt(),
    "r012": lambda: asyncio.CancelledError(),
    "r013": lambda: TimeoutError(),
    "r014": lambda: GeneratorExit(),
}
run = EchoEngine.run

async def raising(engine, request):
    for name, make in WHAT.items():
        if f'"custom_id":"{name}"' in request.line.replace(": ", ":"):
            raise make()
    return await run(engine, request)

EchoEngine.run = raising
from workers.cli import main
main(sys.argv[1:])
"""


def test_whatever_an_engine_raises_is_one_failed_row(fleet: FleetServers) -> None:
    """C10: an exception, one that cannot be pickled, a BaseException, and a cancellation that nobody asked for."""
    fleet.aggregator()
    worker = fleet.start("worker", "-c", RAISES, "serve", MODEL, "--engine", "echo")
    batch_id = detach(fleet, input_lines(BASE40))

    wanted: dict[str, Wanted] = {f"r{number:03d}": "err" for number in range(7, 15)}
    rows = assert_complete(input_lines(BASE40), fetched(fleet, batch_id, 3), wanted)

    assert {row["error"]["code"] for row in rows[7:15]} == {"internal_error"}
    assert worker.running
    assert fleet.taken() == 0


def control(fleet: FleetServers, *words: str) -> Process:
    """`celery control`, or another of Celery's own commands."""
    return fleet.start("control", "-m", "celery", "-A", "workers", *words)


def test_a_worker_takes_terminate_and_the_signals_that_end_it(fleet: FleetServers) -> None:
    """C12: terminating a running request harms nothing else, and SIGQUIT or two SIGTERMs hand everything back."""
    fleet.aggregator()
    lines = slow_base40(12.0)
    batch_id = detach(fleet, lines)
    first = fleet.worker("--max-inflight", "8")
    wait_until(lambda: len(marked(fleet, batch_id)) == 8, 30, "eight requests run")
    victim = dispatch._derived_id(batch_id, 1, 0, 0)

    assert control(fleet, "control", "terminate", "SIGTERM", victim).wait(30).code == 0
    wait_until(lambda: 0 not in marked(fleet, batch_id), 10, "the request was stopped")
    pong = control(fleet, "inspect", "ping").wait(30)
    wait_until(lambda: len(marked(fleet, batch_id)) == 8, 30, "its place is taken by another one")
    first.send(signal.SIGQUIT)
    assert_drained(fleet, batch_id, first)
    second = fleet.worker("--max-inflight", "8", FLEET_DRAIN_S="0.5")
    wait_until(lambda: len(marked(fleet, batch_id)) == 8, 30, "eight requests run")
    second.send(signal.SIGTERM)
    second.send(signal.SIGTERM)
    assert_drained(fleet, batch_id, second)

    assert pong.code == 0, pong.stderr
    assert b"pong" in pong.stdout
    fleet.worker("--max-inflight", "40")
    rows = assert_complete(lines, fetched(fleet, batch_id, 3), {"r000": "err"})
    assert rows[0]["error"]["code"] == "cancelled"


def assert_drained(fleet: FleetServers, batch_id: str, worker: Process) -> None:
    """The worker ends by itself, with nothing in its hands and nobody struck."""
    result = worker.wait(20)
    assert result.code == 0, result.stderr
    # The aggregator may have a message of its own in hand.
    wait_until(lambda: fleet.taken() == 0, 10, "nothing is in a hand")
    # One whose row was recorded in the last moment may come back, to be answered as done.
    assert fleet.waiting() + fleet.finished(batch_id) >= 40
    assert marked(fleet, batch_id) == set()
    assert not any(fleet.client.hgetall(keys.strikes(batch_id, 1, shard)) for shard in range(3))


def test_a_broker_that_fills_up_while_a_batch_is_published_loses_nothing(fleet: FleetServers) -> None:
    """C19, small: `noeviction`, and memory for a part of the messages. When there is more, all goes on by itself."""
    fleet.environment |= {"FLEET_LEASE_S": "3", "FLEET_TEST_SHORT_LEASES": "1"}
    fleet.client.config_set("maxmemory-policy", "noeviction")
    fleet.aggregator()
    used = int(fleet.client.info("memory")["used_memory"])
    fleet.client.config_set("maxmemory", used + 4_000_000)
    lines = [chat_line(f"c{number:05d}", f"{number} " + 4000 * "x") for number in range(3000)]
    source = fleet.write("in.jsonl", lines)

    submitted = fleet.producer("submit", str(source), "--detach")

    (batch_id,) = fleet.batch_ids()
    assert submitted.code == 0 or "is full (maxmemory)" in submitted.stderr
    assert "Traceback" not in submitted.stderr
    assert 0 < fleet.waiting() < 3000
    fleet.client.config_set("maxmemory", 1)
    worker = fleet.start_worker()
    wait_until(lambda: "the broker has no room" in worker.stderr, 30, "a worker finds the broker full")
    fleet.client.config_set("maxmemory", 0)

    assert_complete(lines, fetched(fleet, batch_id))
    assert worker.running
    assert "Traceback" not in worker.stderr
