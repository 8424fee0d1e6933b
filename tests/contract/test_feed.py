"""How a run's shards are published: together where they are small, as far as the window allows, by one feeder each."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import redis
from kombu.exceptions import OperationalError
from redis.exceptions import NoPermissionError

from common import broker, layout
from common.batch import BatchStatus, RequestCounts, RunEnd, Usage, first_run
from common.dispatch import Feeder
from common.errors import BrokerUnavailableError, StoreUnavailableError
from common.ledger import Address, Ledger, Row
from common.routes import Routes
from common.runs import restore
from common.settings import ProducerSettings
from common.store import LocalStore
from common.transport import Channel
from producer import control, intake
from tests.invariants import chat_lines
from tests.servers import BrokerServer, close_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT = 256
SHARD = 16


class Feeding:
    """A batch of 16 shards of 16 requests in Redis, of which nothing is published."""

    def __init__(self, server: BrokerServer, folder: Path) -> None:
        self.client = server.client
        self.ledger = Ledger(server.client)
        self.store = LocalStore(folder / "store")
        self.app = broker.make_app(server.url)
        source = folder / "in.jsonl"
        source.write_text("".join(f"{line}\n" for line in chat_lines(COUNT)))
        checked = intake.check("in", str(source))
        self.run = first_run(control.write_batch(self.store, checked, digest="d", max_shard_size=SHARD))
        assert [shard.count for shard in self.run.shards] == [SHARD] * (COUNT // SHARD)
        restore(self.store, self.ledger, self.run, window=COUNT)

    def feed(self, enough: int | None = None, *, window: int = COUNT) -> int:
        feeder = Feeder(self.app, self.ledger, self.store, self.run, window=window, routes=Routes())
        return feeder.feed(enough)

    def finish(self, shard: int) -> None:
        self.ledger.record(
            [Row(Address(self.run.batch_id, 1, shard, index), b"{}", False, 0, 0, SHARD)
             for index in self.run.shards[shard].indexes]
        )  # fmt: skip

    def queued(self) -> int:
        return int(self.client.llen("gpu"))

    def close(self) -> None:
        close_app(self.app)


@pytest.fixture
def feeding(server: str, tmp_path: Path) -> Iterator[Feeding]:
    with BrokerServer(tmp_path / "b", {"PATH": os.environ.get("PATH", os.defpath)}) as started:
        made = Feeding(started, tmp_path)
        yield made
        made.close()


def test_small_shards_leave_together_and_the_first_ones_at_once(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes: list[int] = []
    looks: list[str] = []
    push, progress = Channel.push, Ledger.progress

    def pushed(channel: Channel, queue: str, messages: Any) -> None:
        pushes.append(len(messages))
        push(channel, queue, messages)

    def looked(ledger: Ledger, batch_id: str, run: int) -> Any:
        looks.append(batch_id)
        return progress(ledger, batch_id, run)

    monkeypatch.setattr(Channel, "push", pushed)
    monkeypatch.setattr(Ledger, "progress", looked)

    assert feeding.feed() == COUNT // SHARD

    assert pushes == [64, 128, 64]
    assert len(looks) == 1 + 2, "once at first, and once for each command but the last"
    assert feeding.queued() == COUNT


def test_a_feed_ends_with_the_shard_that_makes_it_enough(feeding: Feeding) -> None:
    assert [feeding.feed(40), feeding.feed(1), feeding.feed(10_000), feeding.feed(1)] == [3, 1, 12, 0]
    assert feeding.queued() == COUNT


def test_what_is_made_leaves_though_the_next_shard_cannot_be_read(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its chord would wait for messages that nobody sends before the watchdog does."""
    opened = feeding.store.open

    def away(name: str) -> Any:
        if name == layout.shard_input(feeding.run.batch_id, 2):
            raise StoreUnavailableError("the store is away")
        return opened(name)

    monkeypatch.setattr(feeding.store, "open", away)
    with pytest.raises(StoreUnavailableError):
        feeding.feed()

    assert feeding.queued() == 2 * SHARD


def test_a_window_is_full_by_what_is_unfinished_now(feeding: Feeding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what was when the feed began: the workers run while it goes on."""
    claim = Ledger.claim_shard

    def claimed(ledger: Ledger, batch_id: str, run: int, shard: int) -> bool:
        if shard == 1:
            feeding.finish(0)
        return claim(ledger, batch_id, run, shard)

    monkeypatch.setattr(Ledger, "claim_shard", claimed)

    assert feeding.feed(window=2 * SHARD) == 3
    assert feeding.feed(window=2 * SHARD) == 0


def test_two_feeders_publish_each_shard_once(feeding: Feeding, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Ledger.claim_shard
    others: list[int] = []

    def claimed(ledger: Ledger, batch_id: str, run: int, shard: int) -> bool:
        if shard in (3, 4, 9) and not others.count(shard):
            others.append(shard)
            assert claim(ledger, batch_id, run, shard), "by another feeder"
        return claim(ledger, batch_id, run, shard)

    monkeypatch.setattr(Ledger, "claim_shard", claimed)

    assert feeding.feed() == COUNT // SHARD - 3
    assert feeding.queued() == COUNT - 3 * SHARD


def test_nothing_is_published_of_a_closed_run(feeding: Feeding) -> None:
    feeding.ledger.close(feeding.run.batch_id, 1, "cancelled")

    assert feeding.feed() == 0
    assert feeding.queued() == 0
    assert feeding.client.llen("aggregate") == 0


def test_nothing_is_published_while_redis_is_nearly_full(feeding: Feeding, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.1, 0.9])
    monkeypatch.setattr(Ledger, "memory_share", lambda _: next(shares))

    assert feeding.feed() == 4, "looked at again after the first command"
    assert feeding.queued() == 4 * SHARD


def test_a_run_that_is_sealed_and_not_assembled_is_assembled(feeding: Feeding) -> None:
    for shard in feeding.run.shards:
        assert feeding.ledger.claim_shard(feeding.run.batch_id, 1, shard.number)
        feeding.ledger.note_sealed(feeding.run.batch_id, 1, shard.number, shard.count)

    assert feeding.feed() == 0
    assert feeding.client.llen("aggregate") == 1


def test_so_is_one_whose_parts_redis_has_just_learnt_of(feeding: Feeding) -> None:
    """It was emptied meanwhile: no shard is claimed, and none is published again."""
    for shard in feeding.run.shards:
        feeding.ledger.note_sealed(feeding.run.batch_id, 1, shard.number, shard.count)

    assert feeding.feed() == 0
    assert feeding.queued() == 0
    assert feeding.client.llen("aggregate") == 1


class Notes:
    """A reporter that keeps what a producer notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def pushes_fail(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int = 1) -> None:
    """Let the first pushes fail as the transport says it."""
    left, push = [error] * times, Channel.push

    def failing(self: Channel, queue: str, messages: list[bytes]) -> None:
        if left:
            error = left.pop()
            raise OperationalError(str(error)) from error
        push(self, queue, messages)

    monkeypatch.setattr(Channel, "push", failing)


def starting(feeding: Feeding) -> control.Fleet:
    return control.Fleet(ProducerSettings(window=COUNT), feeding.store, feeding.app, feeding.ledger)


@pytest.mark.parametrize("error", [redis.ConnectionError("cut"), redis.TimeoutError("late"), OSError("reset")])
def test_who_waits_for_a_batch_sits_out_an_outage_while_it_is_published(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And publishes on: what was on its way when it came is the watchdog's."""
    monkeypatch.setattr("producer.control.time.sleep", lambda _: None)
    pushes_fail(monkeypatch, error, 2)
    reporter: Any = Notes()

    control.start(starting(feeding), feeding.run, reporter)

    assert reporter.notes == [f"waiting for the broker ({type(error).__name__})"] * 2
    assert feeding.queued() == COUNT - 2 * 64


def test_who_waits_for_a_batch_sits_out_an_outage_of_the_store(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.control.time.sleep", lambda _: None)
    reporter: Any = Notes()
    away = [StoreUnavailableError("away")]

    def restored(*args: Any, **options: Any) -> None:
        if away:
            raise away.pop()
        restore(*args, **options)

    monkeypatch.setattr("producer.control.restore", restored)

    control.start(starting(feeding), feeding.run, reporter)

    assert reporter.notes == ["waiting for the store (StoreUnavailableError)"]
    assert feeding.queued() == COUNT


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "is full"),
        (NoPermissionError("no permissions"), "NoPermissionError"),
        (redis.AuthenticationError("WRONGPASS"), "AuthenticationError"),
    ],
)
def test_a_broker_that_refuses_is_no_outage(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    pushes_fail(monkeypatch, error)
    reporter: Any = Notes()

    with pytest.raises(BrokerUnavailableError, match=said):
        control.start(starting(feeding), feeding.run, reporter)

    assert reporter.notes == []


def test_who_does_not_wait_hears_of_an_outage_at_once(feeding: Feeding, monkeypatch: pytest.MonkeyPatch) -> None:
    pushes_fail(monkeypatch, redis.ConnectionError("cut"))

    with pytest.raises(BrokerUnavailableError, match=r"failed \(ConnectionError\).*the batch is stored"):
        control.start(starting(feeding), feeding.run)


@pytest.mark.parametrize("ended", [False, True])
def test_a_later_run_that_has_ended_meanwhile_is_not_announced(
    feeding: Feeding, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Whoever closed it took the announcement back before this one was made: nobody would again."""
    later = replace(feeding.run, number=2)
    end = RunEnd(status=BatchStatus.COMPLETED, at=1, counts=RequestCounts(), usage=Usage())
    monkeypatch.setattr("producer.control.read_end", lambda *_: end if ended else None)

    control.start(starting(feeding), later)

    assert feeding.ledger.reopened() == (set() if ended else {later.batch_id})
