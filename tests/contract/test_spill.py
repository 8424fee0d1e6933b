"""Spilled rows: they count as recorded, survive an emptied Redis, and end up in the part with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common import keys, layout
from common.batch import BatchStatus, first_run
from common.errors import HoleError, StoreUnavailableError
from common.ledger import Address, Claim, Ledger, Row, Verdict
from common.routes import Routes
from common.runs import read_end, restore, state_of, write_ending
from common.spill import shard_rows, spill_shard, spilled_rows
from common.store import LocalStore
from producer import control, intake
from tests.invariants import chat_lines, rows_of
from workers.aggregate import Aggregator
from workers.watchdog import SPILL_ROWS, Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from common.batch import Run
    from common.store import ObjectWriter
    from tests.servers import BrokerServer

#: Enough for shards that hold more than `SPILL_ROWS`.
COUNT = 1280

#: Unix seconds, in no test's lifetime.
EXPIRES_AT = 2**40


def row(index: int, text: str = "text") -> bytes:
    body = f'{{"text":"{text}","usage":{{}}}}'
    return (
        f'{{"id":"echo-{index}","custom_id":"c{index:05d}","response":{{"status_code":200,"body":{body}}},"error":null}}'
    ).encode()


class Spilling:
    """A batch of one shard whose run is in Redis."""

    def __init__(self, server: BrokerServer, folder: Path) -> None:
        self.client = server.client
        self.ledger = Ledger(server.client)
        self.store = LocalStore(folder / "store")
        source = folder / "in.jsonl"
        source.write_text("".join(f"{line}\n" for line in chat_lines(COUNT)))
        checked = intake.check("in", str(source))
        manifest = control.write_batch(self.store, checked, digest="d", max_shard_size=1000, expires_at=EXPIRES_AT)
        self.run: Run = first_run(manifest)
        assert self.run.shards[0].count == 40
        self.shard = self.run.shards[0]
        self.aggregator = Aggregator(None, self.store, self.ledger, window=100, routes=Routes())  # type: ignore[arg-type]  # sends nothing
        restore(self.store, self.ledger, self.run, window=100)

    def record(self, *indexes: int, text: str = "text") -> list[Verdict]:
        rows = [
            Row(
                Address(self.run.batch_id, 1, 0, index), row(index, text),
                failed=False, prompt_tokens=0, completion_tokens=0, shard_count=self.shard.count,
            )
            for index in indexes
        ]  # fmt: skip
        return [recorded.verdict for recorded in self.ledger.record(rows)]

    def spill(self) -> int:
        return spill_shard(self.store, self.ledger, self.run, self.shard)

    def row_bytes(self) -> int:
        """Bytes of rows of the shard that are in Redis."""
        return sum(len(value) for value in self.client.hgetall(f"fleet:{self.run.batch_id}:1:rows:0").values())

    def part(self) -> list[str]:
        """The texts of the sealed rows."""
        part = self.store.read(layout.part(self.run.batch_id, 1, 0))
        rows = rows_of(part)
        assert [each["custom_id"] for each in rows] == [f"c{index:05d}" for index in self.shard.indexes]
        return [each["response"]["body"]["text"] for each in rows]


@pytest.fixture
def batch(broker_server: BrokerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spilling:
    monkeypatch.setattr("common.spill.LEAST_ROWS", 1)
    # The module's tests share a broker, and another one's watchdog would be the one for twenty seconds more.
    broker_server.client.delete(keys.WATCHDOG)
    return Spilling(broker_server, tmp_path)


def test_spilled_rows_leave_redis_and_end_up_in_the_part(batch: Spilling) -> None:
    batch.record(1, 5, 2)

    assert batch.spill() == 3

    assert batch.row_bytes() == 0
    assert [index for index, _ in spilled_rows(batch.store, batch.run, 0)] == [1, 2, 5]
    batch.record(*(index for index in batch.shard.indexes if index not in (1, 2, 5)), text="later")
    batch.aggregator.seal_shard(batch.run.batch_id, 1, 0)
    assert [n for n, text in enumerate(batch.part()) if text == "text"] == [1, 2, 5]


def test_a_spilled_request_is_recorded(batch: Spilling) -> None:
    """It is not begun again, a second row of it is dropped, and the shard is full with it."""
    batch.record(3)
    batch.spill()

    (begun,) = batch.ledger.begin([Claim(Address(batch.run.batch_id, 1, 0, 3), "w/d")])

    assert begun.verdict is Verdict.DONE
    assert batch.record(3, text="second") == [Verdict.DONE]
    assert batch.ledger.missing(batch.run.batch_id, 1, 0, batch.shard.indexes) == set(batch.shard.indexes) - {3}


def test_spilled_rows_survive_an_emptied_redis(batch: Spilling) -> None:
    batch.record(0, 1, 2)
    batch.spill()
    batch.record(4)
    batch.client.flushall()

    restore(batch.store, batch.ledger, batch.run, window=100)

    assert batch.ledger.missing(batch.run.batch_id, 1, 0, batch.shard.indexes) == set(batch.shard.indexes) - {0, 1, 2}
    assert state_of(batch.store, batch.ledger, batch.run.manifest).counts.completed == 3
    batch.record(*batch.shard.indexes, text="later")
    batch.aggregator.seal_shard(batch.run.batch_id, 1, 0)
    assert [n for n, text in enumerate(batch.part()) if text == "text"] == [0, 1, 2]


def test_the_first_spill_of_a_request_counts(batch: Spilling) -> None:
    """A spiller slept while Redis was emptied and the request was run again: both rows lie there, one is used."""
    batch.record(7, text="first")
    batch.spill()
    batch.client.flushall()
    restore(batch.store, batch.ledger, batch.run, window=100)
    batch.client.hdel(f"fleet:{batch.run.batch_id}:1:rows:0", "7")
    batch.record(7, text="second")
    batch.spill()

    assert [line for _, line in spilled_rows(batch.store, batch.run, 0)] == [row(7, "first")]


def test_a_row_that_is_another_by_now_is_not_let_go(batch: Spilling) -> None:
    """The spill object exists, Redis was emptied, and the request ran again: the row in Redis stays."""
    batch.record(1)
    key = f"fleet:{batch.run.batch_id}:1:rows:0"

    assert batch.ledger.mark_spilled(batch.run.batch_id, 1, 0, [(1, "0" * 40), (2, "0" * 40)]) == 0
    assert batch.client.hget(key, "1") == row(1)
    assert not batch.client.hexists(key, "2")


def test_a_spill_that_is_gone_makes_no_hole(batch: Spilling) -> None:
    """Its request is run again instead."""
    batch.record(*batch.shard.indexes)
    batch.spill()
    batch.store.remove(layout.spills(batch.run.batch_id, 1))

    with pytest.raises(HoleError):
        batch.aggregator.seal_shard(batch.run.batch_id, 1, 0)

    assert 0 in batch.ledger.missing(batch.run.batch_id, 1, 0, batch.shard.indexes)
    assert not batch.store.exists(layout.part(batch.run.batch_id, 1, 0))


def test_a_cancelled_batch_keeps_spilled_rows(batch: Spilling) -> None:
    batch.record(2, 3)
    batch.spill()
    batch.record(5)
    write_ending(batch.store, batch.run.batch_id, 1, BatchStatus.CANCELLED)

    end = batch.aggregator.end_early(batch.run.batch_id, 1)

    assert end is not None
    assert (end.status, end.counts.completed, end.counts.failed) == (BatchStatus.CANCELLED, 3, COUNT - 3)
    assert not batch.store.exists(layout.spill(batch.run.batch_id, 1, 0, 1))


def finish(batch: Spilling) -> None:
    """Seal every shard and assemble, as if all rows were there."""
    for shard in batch.run.shards:
        with batch.store.writing(layout.part(batch.run.batch_id, 1, shard.number)) as part:
            for index in shard.indexes:
                part.write(row(index) + b"\n")
    assert batch.aggregator.assemble_batch(batch.run.batch_id, 1) is not None


def spills(batch: Spilling) -> list[str]:
    return list(batch.store.names(layout.spills(batch.run.batch_id, 1)))


def test_a_spill_that_comes_after_the_end_does_not_stay(batch: Spilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer began before the run was closed."""
    batch.record(1, 2)
    writing = batch.store.writing

    def late(name: str, *, replace: bool = False) -> AbstractContextManager[ObjectWriter]:
        monkeypatch.undo()
        finish(batch)
        return writing(name, replace=replace)

    monkeypatch.setattr(batch.store, "writing", late)

    assert batch.spill() == 0

    assert spills(batch) == []


def test_a_run_that_closes_while_a_spill_is_written_is_no_fault(
    batch: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.record(1, 2)
    rows = batch.ledger.rows

    def late(*at: Any) -> Iterator[bytes | None]:
        found = list(rows(*at))
        finish(batch)
        return iter(found)

    monkeypatch.setattr(batch.ledger, "rows", late)

    assert batch.spill() == 0

    assert spills(batch) == []


def test_an_aggregator_that_dies_between_end_and_clearing_up_leaves_no_spill(
    batch: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.record(1, 2)
    batch.spill()
    with monkeypatch.context() as dying, pytest.raises(InterruptedError):
        dying.setattr(batch.store, "remove", die)
        finish(batch)
    assert spills(batch) == ["00000"]

    batch.aggregator.assemble_batch(batch.run.batch_id, 1)  # its message comes again

    assert spills(batch) == []


def test_the_watchdog_clears_up_after_an_end_of_its_own_that_the_store_cut_short(
    batch: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that expired: no message comes again."""
    watchdog = Watchdog(None, batch.store, batch.ledger, batch.aggregator, lease_s=60, routes=Routes())  # type: ignore[arg-type]  # sends nothing
    batch.record(1, 2)
    batch.spill()
    monkeypatch.setattr("workers.watchdog.now", lambda: EXPIRES_AT)
    with monkeypatch.context() as away, pytest.raises(StoreUnavailableError):
        away.setattr(batch.store, "remove", refuse)
        watchdog.look()
    assert read_end(batch.store, batch.run.batch_id, 1) is not None
    assert spills(batch) == ["00000"]

    watchdog.look()

    assert spills(batch) == []
    progress = batch.ledger.progress(batch.run.batch_id, 1)
    assert progress is not None
    assert progress.closed == BatchStatus.EXPIRED.value
    assert batch.client.ttl(keys.head(batch.run.batch_id, 1)) > 0


def refuse(_name: str) -> None:
    raise StoreUnavailableError("the store refuses")


def die(_name: str) -> None:
    raise InterruptedError


def test_the_watchdog_spills_what_a_straggler_keeps_open(batch: Spilling) -> None:
    """And only what came since, the next time."""
    watchdog = Watchdog(
        None,
        batch.store,
        batch.ledger,
        batch.aggregator,
        lease_s=60,
        routes=Routes(),
        spill_after_s=0.0,  # type: ignore[arg-type]  # sends nothing
    )
    for shard in batch.run.shards:
        assert batch.ledger.claim_shard(batch.run.batch_id, 1, shard.number)
    batch.record(*batch.shard.indexes[: SPILL_ROWS - 1])
    for _ in range(2):  # the first look notes that the shard is open
        watchdog.look()
    assert batch.row_bytes() > 0

    batch.record(batch.shard.indexes[SPILL_ROWS - 1])
    watchdog.look()

    assert batch.row_bytes() == 0
    batch.record(batch.shard.indexes[SPILL_ROWS])
    watchdog.look()
    assert batch.row_bytes() > 0


def test_only_so_many_bytes_of_rows_are_read_at_once(batch: Spilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may be large: a slice of a whole shard would not fit into an aggregator."""
    monkeypatch.setattr("common.ledger.SLICE_BYTES", 500)
    batch.record(*batch.shard.indexes)
    before = int(batch.client.info("commandstats")["cmdstat_hmget"]["calls"])

    rows = list(batch.ledger.rows(batch.run.batch_id, 1, 0, batch.shard.indexes))

    assert rows == [row(index) for index in batch.shard.indexes]
    calls = int(batch.client.info("commandstats")["cmdstat_hmget"]["calls"]) - before
    assert calls >= sum(map(len, rows)) // 500  # type: ignore[arg-type]  # no row is missing


def test_few_new_rows_are_not_worth_an_object(batch: Spilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that a straggler keeps open is looked at every second while memory is short."""
    monkeypatch.setattr("common.spill.LEAST_ROWS", 16)
    batch.record(*batch.shard.indexes[:20])
    assert batch.spill() == 20

    assert batch.spill() == 0
    batch.record(*batch.shard.indexes[20:25])
    assert batch.spill() == 0
    monkeypatch.setattr("common.spill.LEAST_BYTES", 100)
    assert batch.spill() == 5

    assert sorted(batch.store.names(layout.spills(batch.run.batch_id, 1, 0))) == ["000001.jsonl", "000002.jsonl"]


def test_rows_that_are_spilled_while_they_are_sealed_are_found(batch: Spilling) -> None:
    """Their object was not there yet when the spills were listed: forgetting them would run them again."""
    batch.record(*batch.shard.indexes)
    rows = shard_rows(batch.store, batch.ledger, batch.run, batch.shard, forget=True)
    spilled = spilled_rows(batch.store, batch.run, 0)
    assert next(spilled, None) is None  # as the sealer lists them
    batch.spill()

    assert [each for each in rows if each is not None] == [row(index) for index in batch.shard.indexes]
    assert not batch.ledger.missing(batch.run.batch_id, 1, 0, batch.shard.indexes)


def test_rows_that_are_spilled_in_the_middle_of_a_seal_are_found(
    batch: Spilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.ledger.SLICE_BYTES", 1)  # row by row
    batch.record(*batch.shard.indexes)
    rows = shard_rows(batch.store, batch.ledger, batch.run, batch.shard, forget=True)
    first = [next(rows) for _ in range(7)]
    batch.spill()

    assert [*first, *rows] == [row(index) for index in batch.shard.indexes]


def test_an_early_end_forgets_nothing(batch: Spilling) -> None:
    batch.record(1)
    batch.spill()
    batch.store.remove(layout.spills(batch.run.batch_id, 1))

    assert list(shard_rows(batch.store, batch.ledger, batch.run, batch.shard, forget=False))[1] is None
    assert 1 not in batch.ledger.missing(batch.run.batch_id, 1, 0, batch.shard.indexes)
