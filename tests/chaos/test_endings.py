"""Batches and requests that somebody ends: finished rows are kept, the others fail with the reason, in order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from common import dispatch
from tests.chaos.chaosfleet import ChaosFleet, figures
from tests.invariants import chat_line, chat_lines
from tests.servers import MODEL, wait_until

if TYPE_CHECKING:
    from tests.chaos.chaosfleet import Batch
    from tests.invariants import Wanted

COUNT = 64


def half_and_half() -> tuple[list[str], dict[str, Wanted]]:
    """Every other request is answered at once, the rest would take minutes."""
    wanted: dict[str, Wanted] = {f"r{n}": "err" if n % 2 else "ok" for n in range(COUNT)}
    return [chat_line(f"r{n}", f"text {n}", echo={"latency_s": 300.0 * (n % 2)}) for n in range(COUNT)], wanted


def codes(rows: list[dict[str, Any]]) -> set[str]:
    return {row["error"]["code"] for row in rows if row["error"] is not None}


def task_id(batch: Batch, index: int) -> str:
    """The Celery id of a request of a batch whose shards hold 16."""
    return dispatch._derived_id(batch.batch_id, 1, index // 16, index)


def test_a_cancelled_batch_keeps_its_finished_rows(chaos: ChaosFleet) -> None:
    """C23: cancelled when half of it is finished."""
    chaos.aggregator()
    chaos.two_workers(COUNT)
    lines, wanted = half_and_half()
    batch = chaos.submit(lines)
    chaos.wait_finished(batch, COUNT // 2)

    started = time.monotonic()
    assert chaos.producer("cancel", batch.batch_id).code == 0
    chaos.wait_closed(batch, 15)
    closed_s = time.monotonic() - started
    wait_until(lambda: chaos.taken() == 0, 10, "running requests are stopped")

    rows = chaos.assert_right(batch, 4, wanted)
    figures("cancel", closed_s=round(closed_s, 1), stopped_s=round(time.monotonic() - started, 1))
    assert codes(rows) == {"cancelled"}
    assert chaos.calls.total(batch.batch_id) == COUNT


#: A worker that does not look whether the runs in its hands end.
WITHOUT_LOOK_AT_ENDINGS = """
import sys
from workers.engine.host import EngineHost
async def blind(host): pass
EngineHost._stop_ending_runs = blind
from workers.cli import main
main(sys.argv[1:])
"""


@pytest.mark.chaos_long
def test_without_a_look_at_endings_a_cancelled_batch_goes_on_running(chaos: ChaosFleet) -> None:
    """The safeguard off: the batch ends, and the engine works on for nobody."""
    chaos.aggregator()
    worker = chaos.start("worker", "-c", WITHOUT_LOOK_AT_ENDINGS, "serve", MODEL, "--engine", "echo")
    wait_until(lambda: chaos.is_ready(worker), 60, "the worker is ready")
    lines, wanted = half_and_half()
    batch = chaos.submit(lines)
    chaos.wait_finished(batch, COUNT // 2)

    assert chaos.producer("cancel", batch.batch_id).code == 0
    assert batch.producer.wait(60).code == 4

    with pytest.raises(AssertionError, match="are stopped"):
        wait_until(lambda: chaos.taken() == 0, 8, "running requests are stopped")
    assert worker.stop().code == 0
    chaos.worker()
    chaos.assert_right(batch, 4, wanted)


def test_a_cancelled_batch_that_nobody_works_on_ends(chaos: ChaosFleet) -> None:
    """Its messages are answered without an engine call by the worker that comes later."""
    chaos.aggregator()
    lines = chat_lines(32)
    batch = chaos.submit(lines)
    assert chaos.producer("cancel", batch.batch_id).code == 0
    chaos.wait_closed(batch, 15)

    chaos.worker()

    rows = chaos.assert_right(batch, 4, {f"c{n:05d}": "err" for n in range(32)})
    assert codes(rows) == {"cancelled"}
    assert chaos.calls.total(batch.batch_id) == 0


def test_a_cancelled_batch_stays_cancelled_when_the_broker_is_emptied(chaos: ChaosFleet) -> None:
    chaos.two_workers(COUNT)
    lines, wanted = half_and_half()
    batch = chaos.submit(lines)
    chaos.wait_finished(batch, COUNT // 2)
    assert chaos.producer("cancel", batch.batch_id).code == 0
    chaos.client.flushall()

    chaos.aggregator()

    # The rows were in Redis alone: what was finished is gone, and fails as cancelled.
    rows = chaos.assert_right(batch, 4, dict.fromkeys(wanted, "any"))
    assert codes(rows) == {"cancelled"}


def test_a_batch_expires(chaos: ChaosFleet) -> None:
    chaos.aggregator()
    chaos.two_workers(COUNT)
    lines, wanted = half_and_half()
    batch = chaos.submit(lines, "--expires", "10s")

    rows = chaos.assert_right(batch, 4, wanted)
    assert codes(rows) == {"expired"}


def test_a_request_that_takes_too_long_fails(chaos: ChaosFleet) -> None:
    chaos.aggregator()
    chaos.worker(FLEET_REQUEST_TIMEOUT_S="5")
    lines = [*chat_lines(16, echo={"latency_s": 0.5}), chat_line("hangs", "text", echo={"hang": True})]
    batch = chaos.submit(lines)

    rows = chaos.assert_right(batch, 3, {"hangs": "err"})
    assert codes(rows) == {"timeout"}


def test_revoked_requests_fail_and_the_batch_completes(chaos: ChaosFleet) -> None:
    """One that runs and one that waits, as Flower and `celery control` revoke them."""
    chaos.aggregator()
    worker = chaos.worker("--max-inflight", "16")
    lines = [
        *(chat_line(f"r{n}", f"text {n}", echo={"latency_s": 10.0}) for n in range(15)),
        chat_line("running", "text", echo={"latency_s": 300.0}),
        *chat_lines(15),
        chat_line("waiting", "text", echo={"latency_s": 300.0}),
    ]
    batch = chaos.submit(lines)
    chaos.wait_running(batch, worker, 16)

    command = ("-m", "celery", "-A", "workers", "control")
    revoked = chaos.start("control", *command, "revoke", task_id(batch, 31)).wait(30)
    assert revoked.code == 0, revoked.stderr
    terminated = chaos.start("control", *command, "terminate", "SIGTERM", task_id(batch, 15)).wait(30)
    assert terminated.code == 0, terminated.stderr

    rows = chaos.assert_right(batch, 3, {"running": "err", "waiting": "err"})
    assert codes(rows) == {"cancelled"}
    assert worker.running
