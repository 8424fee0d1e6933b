"""Safeguards of the ledger switched off, one at a time, on a real server: each has a harm that it alone prevents.

A safeguard is a clause of a Lua script; off, the script lacks it. Those of the transport are switched off in
`test_transport.py`, where stock kombu has none of them, those of the watchdog in `test_watchdog.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common import keys, layout, scripts
from common.ledger import Address, Claim, Ledger, Row, Verdict, WorkerBeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers import BrokerServer

ON_AND_OFF = pytest.mark.parametrize("on", [True, False], ids=["on", "off"])

FIRST_WINS = ("RECORD", "redis.call('HSETNX', rows, index, row) == 0", "redis.call('HSET', rows, index, row) < 0")
PARKS = ("BEGIN", "redis.call('EXISTS', worker_prefix .. string.match(owner, '^(.*)/')) == 1", "false")
STOPS_ENDING = ("BEGIN", "(run[2] and run[2] ~= '')", "false")
DROPS_LATE = ("RECORD", "redis.call('SISMEMBER', sealed, shard) == 1", "false")
OWN_MARK = ("RELEASE", "redis.call('HGET', marks, index) == mark", "true")


@pytest.fixture
def batch() -> str:
    return layout.new_batch_id()


@pytest.fixture
def ledger_with(
    broker_server: BrokerServer, batch: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[tuple[str, str, str], bool], Ledger]:
    """A ledger that knows the batch, with a safeguard on or off."""

    def make(safeguard: tuple[str, str, str], on: bool) -> Ledger:
        name, clause, without = safeguard
        script = getattr(scripts, name)
        assert clause in script, "the safeguard is written otherwise by now"
        if not on:
            monkeypatch.setattr(scripts, name, script.replace(clause, without))
        made = Ledger(broker_server.client)
        made.restore(batch, 1, total=4, shards=1, step=1000)
        return made

    return make


def at(batch: str) -> Address:
    return Address(batch, 1, 0, 0)


def row(batch: str, text: bytes) -> Row:
    return Row(at(batch), text, failed=False, prompt_tokens=0, completion_tokens=0, shard_count=4)


@ON_AND_OFF
def test_of_two_rows_the_first_one_wins(ledger_with: Callable[..., Ledger], batch: str, on: bool) -> None:
    """Off: the answer changes under the readers' eyes, and is counted twice."""
    ledger = ledger_with(FIRST_WINS, on)

    ledger.record([row(batch, b"first")])
    ledger.record([row(batch, b"second")])

    progress = ledger.progress(batch, 1)
    assert progress is not None
    found = (next(ledger.rows(batch, 1, 0, range(1))), progress.finished)
    assert found == ((b"first", 1) if on else (b"second", 2))


@ON_AND_OFF
def test_a_request_that_runs_is_parked(ledger_with: Callable[..., Ledger], batch: str, on: bool) -> None:
    """Off: a message that came twice runs twice at the same time, and a living worker is struck."""
    ledger = ledger_with(PARKS, on)
    ledger.beat(WorkerBeat("one", "ready", "echo", ("m",), "gpu", 1), 60.0)
    ledger.begin([Claim(at(batch), "one/a")])

    (second,) = ledger.begin([Claim(at(batch), "two/b")])

    ledger.forget_worker("one")
    assert (second.verdict, second.strikes) == ((Verdict.PARKED, 0) if on else (Verdict.OURS, 1))


@ON_AND_OFF
def test_nothing_is_begun_of_a_cancelled_run(ledger_with: Callable[..., Ledger], batch: str, on: bool) -> None:
    """Off: every message of a cancelled batch still costs an engine call."""
    ledger = ledger_with(STOPS_ENDING, on)
    ledger.set_ending(batch, 1, "cancelled")

    (begun,) = ledger.begin([Claim(at(batch), "one/a")])

    assert begun.verdict is (Verdict.DONE if on else Verdict.OURS)


@ON_AND_OFF
def test_a_row_that_comes_after_its_shard_was_sealed_is_dropped(
    ledger_with: Callable[..., Ledger], broker_server: BrokerServer, batch: str, on: bool
) -> None:
    """Off: rows that nobody reads any more come back to life, and are counted."""
    ledger = ledger_with(DROPS_LATE, on)
    ledger.note_sealed(batch, 1, 0, 4)

    ledger.record([row(batch, b"late")])

    assert broker_server.client.hlen(keys.rows(batch, 1, 0)) == (0 if on else 1)


@ON_AND_OFF
def test_a_drained_request_is_no_strike(broker_server: BrokerServer, batch: str, on: bool) -> None:
    """Off: a worker that hands back without taking its marks along strikes all that it ran."""
    ledger = Ledger(broker_server.client)
    ledger.restore(batch, 1, total=4, shards=1, step=1000)
    ledger.begin([Claim(at(batch), "gone/a")])
    if on:
        ledger.release(at(batch), "gone/a")

    (begun,) = ledger.begin([Claim(at(batch), "next/b")])

    assert (begun.verdict, begun.strikes) == (Verdict.OURS, 0 if on else 1)


@ON_AND_OFF
def test_a_worker_that_wakes_up_and_drains_takes_only_its_own_mark(
    ledger_with: Callable[..., Ledger], broker_server: BrokerServer, batch: str, on: bool
) -> None:
    """Off: it unmarks what another one runs by now, which then is begun a third time beside it."""
    ledger = ledger_with(OWN_MARK, on)
    ledger.begin([Claim(at(batch), "sleeper/a")])
    ledger.begin([Claim(at(batch), "other/b", 1)])

    ledger.release(at(batch), "sleeper/a")

    assert broker_server.client.hget(keys.marks(batch, 1, 0), "0") == (b"other/b" if on else None)
