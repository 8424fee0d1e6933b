"""Several requests in one message: each still has its own mark, strikes and row, whatever happens to the message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.chaos.chaosfleet import HEALED_S, PACK, TAKEN_OVER_S, figures
from tests.invariants import chat_line, embedding_line
from tests.servers import wait_until

if TYPE_CHECKING:
    from tests.chaos.chaosfleet import ChaosFleet
    from tests.servers import Process

COUNT = 64


def embeddings(count: int, latency_s: float) -> list[str]:
    return [embedding_line(f"e{n}", f"text {n}", echo={"latency_s": latency_s}) for n in range(count)]


@pytest.fixture
def warm(chaos: ChaosFleet) -> tuple[ChaosFleet, Process, Process]:
    """Two workers whose requests are known to be short."""
    chaos.aggregator()
    workers = chaos.two_workers(FLEET_DRAIN_S="0.3")
    chaos.warm_up(*workers)
    return chaos, *workers


def test_a_killed_workers_packs_run_on_another_one(warm: tuple[ChaosFleet, Process, Process]) -> None:
    """As single requests do: what it was running runs again, and nothing else."""
    chaos, doomed, _ = warm
    batch = chaos.submit(embeddings(COUNT, 2.0))
    assert max(chaos.packed()) == PACK
    doomed_id = chaos.wait_running(batch, doomed, 16)
    assert len(chaos.marks(batch, doomed_id)) == 16, "the window counts requests, not messages"

    doomed.kill()
    in_flight = len(chaos.marks(batch, doomed_id))
    wait_until(lambda: not chaos.marks(batch, doomed_id), TAKEN_OVER_S, "another worker runs what was left")

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("kill -9 worker, packs", in_flight=in_flight, extra=executions - COUNT)
    assert executions == COUNT + in_flight, chaos.calls.repeated(batch.batch_id)


def test_a_poison_harms_no_other_of_its_pack(warm: tuple[ChaosFleet, Process, Process]) -> None:
    chaos, *workers = warm
    lines = embeddings(40, 0.7)
    lines[17] = embedding_line("poison", "text", echo={"latency_s": 0.3, "kill": True})

    def start() -> Process:
        return chaos.start_worker("--max-inflight", "16")

    batch = chaos.submit(lines)
    assert max(chaos.packed()) == PACK
    deaths = chaos.supervise(batch, workers, start, 100)

    rows = chaos.assert_right(batch, 3, {"poison": "err"}, timeout_s=1)
    figures("poison in a pack", deaths=deaths)
    assert rows[17]["error"]["code"] == "workers_lost"
    assert 2 <= deaths <= 4


def test_a_drained_workers_packs_go_back_whole_and_only_the_rest_runs_again(
    warm: tuple[ChaosFleet, Process, Process],
) -> None:
    """Of each pack half is recorded when the worker leaves: that half is found done."""
    chaos, leaving, _ = warm
    lines = [
        embedding_line(f"e{n}", f"text {n}", echo={"latency_s": 8.0 if n % 2 else 0.01}) for n in range(COUNT // 2)
    ]
    batch = chaos.submit(lines)
    leaving_id = chaos.wait_running(batch, leaving, 2)
    chaos.wait_finished(batch, COUNT // 4)
    in_flight = len(chaos.marks(batch, leaving_id))

    result = leaving.stop()

    assert result.code == 0, result.stderr
    assert not chaos.marks(batch, leaving_id)
    chaos.assert_right(batch, timeout_s=HEALED_S)
    assert set(chaos.calls.repeated(batch.batch_id)) <= set(range(1, COUNT // 2, 2))
    assert chaos.calls.total(batch.batch_id) <= len(lines) + in_flight
    assert not chaos.calls.strikes


def test_a_failure_in_a_pack_is_one_row(warm: tuple[ChaosFleet, Process, Process]) -> None:
    chaos, *_ = warm
    lines = embeddings(16, 0.0)
    lines[5] = embedding_line("refused", "text", echo={"status": 400})
    lines[6] = embedding_line("raises", "text", echo={"raise": True})
    lines[9] = chat_line("chat", "text")

    batch = chaos.submit(lines)

    rows = chaos.assert_right(batch, 3, {"refused": "err", "raises": "err"})
    assert [row["error"] is None for row in rows] == [n not in (5, 6) for n in range(16)]


def test_a_revoked_pack_fails_its_requests_alone(warm: tuple[ChaosFleet, Process, Process]) -> None:
    chaos, *_ = warm
    batch = chaos.submit(embeddings(48, 6.0))
    waiting = [json.loads(raw) for raw in chaos.client.lrange("gpu", 0, -1)]
    (pack,) = (each["headers"] for each in waiting if each["headers"]["kwargsrepr"].endswith("/44-47"))

    command = ("-m", "celery", "-A", "workers", "control")
    revoked = chaos.start("control", *command, "revoke", pack["id"]).wait(30)
    assert revoked.code == 0, revoked.stderr

    rows = chaos.assert_right(batch, 3, {f"e{n}": "err" for n in range(44, 48)})
    assert {row["error"]["code"] for row in rows[44:]} == {"cancelled"}
