"""What the watchdog heals, on a real server and a real store; and that nobody else does.

Every test runs with the watchdog on and off: off, the same batch is looked at by nobody, and stands still.
`tests/chaos` has the same through whole fleets.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from common import broker, keys, layout
from common.batch import first_run
from common.errors import StoreUnavailableError
from common.ledger import Address, Ledger, Row, WorkerBeat
from common.routes import Routes
from common.runs import restore, start_run
from common.store import LocalStore, store_id
from producer import control, intake
from tests.invariants import chat_line, chat_lines
from tests.servers import BrokerServer, close_app
from workers import watchdog
from workers.aggregate import Aggregator
from workers.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from celery import Celery

    from common.batch import Run

DONE = b'{"id":"x","custom_id":"c","response":{"status_code":200,"body":{}},"error":null}'
FAILED = b'{"id":"x","custom_id":"c","response":null,"error":{"code":"model_not_found","message":"m"}}'

ON_AND_OFF = pytest.mark.parametrize("on", [True, False], ids=["on", "off"])

#: More looks than any healing takes.
LOOKS = 4


class Bench:
    """A batch of one shard of three requests, published by nobody yet, and a watchdog that looks when it is told to."""

    def __init__(
        self, server: BrokerServer, folder: Path, lines: list[str] | None = None, routes: Routes | None = None
    ) -> None:
        self.server = server
        self.client = server.client
        self.app: Celery = broker.make_app(server.url)
        self.store = LocalStore(folder / "store")
        self.ledger = Ledger(self.client)
        routes = routes or Routes()
        self.aggregator = Aggregator(self.app, self.store, self.ledger, window=1000, routes=routes)
        self.watchdog = Watchdog(self.app, self.store, self.ledger, self.aggregator, lease_s=0.0, routes=routes)
        source = folder / "in.jsonl"
        source.write_text("".join(f"{line}\n" for line in lines or chat_lines(3)))
        checked = intake.check("in.jsonl", str(source))
        self.run: Run = first_run(control.write_batch(self.store, checked, digest="d", max_shard_size=16))
        self.batch_id = self.run.batch_id

    def publish(self) -> None:
        """As a producer does it; the messages are lost at once."""
        restore(self.store, self.ledger, self.run, window=16)
        assert self.ledger.claim_shard(self.batch_id, 1, 0)

    def another(self) -> None:
        """One more open batch."""
        source = self.store.root.parent / "other.jsonl"
        source.write_text("".join(f"{line}\n" for line in chat_lines(2)))
        checked = intake.check("other.jsonl", str(source))
        control.write_batch(self.store, checked, digest="o", max_shard_size=16)

    def ttls(self, batch_id: str) -> list[int]:
        """The TTLs of all keys of a batch; -1 for none."""
        found: Any = [self.client.ttl(key) for key in self.client.keys(keys.of_batch(batch_id))]
        return list(found)

    def finish(self, *indexes: int) -> None:
        self.ledger.record([Row(Address(self.batch_id, 1, 0, index), b"{}", False, 0, 0, 3) for index in indexes])

    def look(self, on: bool) -> None:
        for _ in range(LOOKS if on else 0):
            self.watchdog.look()

    def close(self) -> None:
        close_app(self.app)

    def sent(self, queue: str) -> list[str]:
        messages: Any = self.client.lrange(queue, 0, -1)
        return [json.loads(message)["headers"]["task"] for message in messages]


@pytest.fixture
def bench(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(watchdog, "SWEEP_S", 0.0)
    with BrokerServer(tmp_path / "b", {"PATH": os.environ.get("PATH", os.defpath)}) as started:
        made = Bench(started, tmp_path)
        yield made
        made.close()


@ON_AND_OFF
def test_an_emptied_broker_learns_of_its_batches_again(bench: Bench, on: bool) -> None:
    bench.publish()
    bench.client.flushall()

    bench.look(on)

    assert (bench.ledger.progress(bench.batch_id, 1) is not None) is on
    assert bench.sent("gpu").count(broker.RUN_REQUEST) == (3 if on else 0)


@ON_AND_OFF
def test_lost_messages_are_sent_again(bench: Bench, on: bool) -> None:
    """Those of requests that are neither recorded nor running, once a worker has emptied their queue."""
    bench.publish()
    bench.finish(1)
    bench.ledger.beat(WorkerBeat("w", "ready", "echo", ("m",), "gpu", 1), 60.0)

    bench.look(on)

    assert bench.sent("gpu").count(broker.RUN_REQUEST) == (2 if on else 0)


def test_nothing_is_sent_again_while_nobody_works(bench: Bench) -> None:
    bench.publish()

    bench.look(on=True)

    assert bench.sent("gpu") == []


@ON_AND_OFF
def test_a_full_shard_whose_chord_fired_nothing_is_sealed(bench: Bench, on: bool) -> None:
    bench.publish()
    bench.finish(0, 1, 2)

    bench.look(on)

    assert (broker.SEAL_SHARD in bench.sent("aggregate")) is on


@ON_AND_OFF
def test_a_part_that_nobody_noted_is_noted_and_the_batch_assembled(bench: Bench, on: bool) -> None:
    bench.publish()
    with bench.store.writing(layout.part(bench.batch_id, 1, 0)) as part:
        part.write(b"{}\n" * 3)

    bench.look(on)

    assert bench.ledger.is_sealed(bench.batch_id, 1, 0) is on
    assert (broker.ASSEMBLE_BATCH in bench.sent("aggregate")) is on


def test_what_was_seen_of_one_run_says_nothing_about_the_next(server: str, tmp_path: Path) -> None:
    """A run that starts within a look of the end of the one before; its shard 0 holds other requests."""
    routes = Routes.parse("a=gpu-a,b=gpu-b")
    with BrokerServer(tmp_path / "b", {"PATH": os.environ.get("PATH", os.defpath)}) as started:
        bench = Bench(started, tmp_path, [chat_line(f"c{n}", "x", model="ab"[n % 2]) for n in range(40)], routes)
        bench.watchdog.look()
        for shard in bench.run.shards:
            bench.ledger.record(
                [
                    Row(
                        Address(bench.batch_id, 1, shard.number, index),
                        FAILED if index > 30 else b"{}",
                        False,
                        0,
                        0,
                        16,
                    )
                    for index in shard.indexes
                ]
            )
            bench.aggregator.seal_shard(bench.batch_id, 1, shard.number)
        assert bench.aggregator.assemble_batch(bench.batch_id, 1) is not None
        run = start_run(bench.store, bench.run, range(31, 40))
        bench.ledger.note_reopened(bench.batch_id, 2)
        assert run.shards[0].number == 0

        bench.watchdog.look()

        assert bench.ledger.progress(bench.batch_id, 2) is not None
        assert (bench.batch_id, 1) not in bench.watchdog._watched
        queues = bench.watchdog._watched[bench.batch_id, 2].queues.values()
        assert {index for each in queues for index in each} == set(range(31, 40))
        bench.close()


@ON_AND_OFF
def test_a_run_that_its_ending_left_open_in_redis_is_closed_though_another_has_begun(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    def away(_: str) -> None:
        raise StoreUnavailableError("the store refuses")

    bench.publish()
    bench.ledger.record([Row(Address(bench.batch_id, 1, 0, index), FAILED, True, 0, 0, 3) for index in range(3)])
    bench.aggregator.seal_shard(bench.batch_id, 1, 0)
    with monkeypatch.context() as ending, pytest.raises(StoreUnavailableError):
        ending.setattr(bench.store, "remove", away)
        bench.aggregator.assemble_batch(bench.batch_id, 1)
    start_run(bench.store, bench.run, range(3))
    bench.ledger.note_reopened(bench.batch_id, 2)

    bench.look(on)

    first, second = (bench.ledger.progress(bench.batch_id, number) for number in (1, 2))
    assert first is not None
    assert bool(first.closed) is on
    assert (second is not None and not second.closed) is on


def test_a_batch_that_cannot_be_looked_after_does_not_blind_the_watchdog(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = []

    def look_at(batch_id: str) -> None:
        looked.append(batch_id)
        raise KeyError(48)

    monkeypatch.setattr(bench.watchdog, "_look_at", look_at)

    bench.watchdog.look()

    assert looked == [bench.batch_id]
    assert "cannot be looked after: KeyError" in caplog.text


# -- batches that were removed by hand ---------------------------------------------------------------------------------


@pytest.fixture
def removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An open batch of two, of which somebody removed the directory; rows of it are in Redis."""
    monkeypatch.setattr(watchdog, "REMOVED_LOOKS", 1)
    store_id(bench.store)
    bench.publish()
    bench.finish(1)
    bench.another()
    bench.look(on=True)
    assert set(bench.ttls(bench.batch_id)) == {-1}
    (bench.store.root / "batches" / bench.batch_id).rename(bench.store.root / "aside")
    return bench


@ON_AND_OFF
def test_the_keys_of_a_batch_that_was_removed_by_hand_expire(
    removed: Bench, on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Off: they stay, and an autoscaler keeps workers for them."""
    (other,) = removed.store.names(layout.BATCHES)

    removed.look(on)

    found = removed.ttls(removed.batch_id)
    assert len(found) >= 2
    assert all(0 < ttl_s <= keys.CLOSED_TTL_S for ttl_s in found) is on
    assert set(removed.ttls(other)) == {-1}
    assert caplog.text.count(f"{removed.batch_id} was removed") == (1 if on else 0)


def test_a_part_that_is_written_after_the_removal_does_not_bring_a_batch_back(removed: Bench) -> None:
    """Workers ran it, and an aggregator that had it in memory sealed a shard."""
    with removed.store.writing(layout.part(removed.batch_id, 1, 0)) as part:
        part.write(b"{}\n" * 3)

    removed.look(on=True)

    found = removed.ttls(removed.batch_id)
    assert len(found) >= 2
    assert all(ttl_s > 0 for ttl_s in found)


def test_what_is_absent_once_may_be_there_the_next_time(removed: Bench) -> None:
    removed.watchdog.look()

    assert set(removed.ttls(removed.batch_id)) == {-1}


@pytest.mark.parametrize("outage", ["no mark", "another mark", "no batches", "an error"])
def test_a_store_that_is_not_all_there_is_no_witness(
    removed: Bench, outage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = removed.store.root
    if outage == "no mark":
        (root / layout.STORE_ID).unlink()
    elif outage == "another mark":
        (root / layout.STORE_ID).write_text("another")
    elif outage == "no batches":
        (root / layout.BATCHES).rename(root / "unmounted")
    else:
        monkeypatch.setattr("os.listdir", fail)

    for _ in range(LOOKS):
        with suppress(StoreUnavailableError):
            removed.watchdog.look()

    assert set(removed.ttls(removed.batch_id)) == {-1}


def test_another_store_on_the_same_redis_is_no_witness(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is all there, and has a batch: `FLEET_STORE` was changed, or differs, or nothing was mounted at a start."""
    monkeypatch.setattr(watchdog, "REMOVED_LOOKS", 1)
    bench.publish()
    (tmp_path / "other").mkdir()
    other = Bench(bench.server, tmp_path / "other")
    store_id(other.store)
    assert other.batch_id != bench.batch_id

    other.look(on=True)

    assert other.ledger.progress(other.batch_id, 1) is not None
    assert set(bench.ttls(bench.batch_id)) == {-1}
    other.close()


def test_a_batch_whose_head_names_no_store_is_not_judged(removed: Bench) -> None:
    """An older version restored it."""
    removed.client.hdel(keys.head(removed.batch_id, 1), "store")

    removed.look(on=True)

    assert set(removed.ttls(removed.batch_id)) == {-1}


def fail(_path: object) -> list[str]:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_a_batch_that_comes_back_is_kept(removed: Bench) -> None:
    removed.look(on=True)
    (removed.store.root / "aside").rename(removed.store.root / "batches" / removed.batch_id)

    removed.look(on=True)

    assert set(removed.ttls(removed.batch_id)) == {-1}
    assert removed.ledger.missing(removed.batch_id, 1, 0, range(3)) == {0, 2}
