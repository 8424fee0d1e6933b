"""What is left in a fleet of a batch that was purged: its messages are dropped, and nothing brings it back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from common import broker, keys
from common.batch import BatchStatus, RequestCounts, RunEnd, Usage, first_run
from common.errors import NoSuchBatchError, StoreUnavailableError
from common.ledger import PURGED, Address, Claim, Ledger, Verdict
from common.routes import Routes
from common.runs import restore, write_end
from common.store import LocalStore, store_id
from producer import control, intake
from tests.invariants import chat_lines
from workers.aggregate import Aggregator
from workers.tasks import BURY_AFTER_S, _is_gone, _waited_s

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import BrokerServer

#: Retries after which a batch counts as purged.
ENOUGH = next(retries for retries in range(20) if _waited_s(retries) >= BURY_AFTER_S)


class Bench:
    """An open batch that Redis does not know, and an aggregator that has it in memory."""

    def __init__(self, server: BrokerServer, folder: Path) -> None:
        self.client = server.client
        self.ledger = Ledger(server.client)
        self.store = LocalStore(folder / "store")
        store_id(self.store)
        source = folder / "in.jsonl"
        source.write_text("".join(f"{line}\n" for line in chat_lines(3)))
        manifest = control.write_batch(self.store, intake.check("in", str(source)), digest="d", max_shard_size=16)
        self.run = first_run(manifest)
        self.head = keys.head(manifest.batch_id, 1)
        app = broker.make_app(server.url)
        self.aggregator = Aggregator(app, self.store, self.ledger, window=1000, routes=Routes())
        self.aggregator.feed(manifest.batch_id, 1)
        self.forget()

    def forget(self) -> None:
        """What a day does to the keys of a closed batch."""
        self.client.delete(*self.client.keys(f"fleet:{self.run.batch_id}:*"), "gpu")

    def purge(self) -> None:
        end = RunEnd(status=BatchStatus.CANCELLED, at=1, counts=RequestCounts(), usage=Usage())
        write_end(self.store, self.run.batch_id, 1, end)
        assert list(control.purge(self.store, 0)) == [self.run.batch_id]

    def is_gone(self, retries: int, store: Any = None) -> bool:
        app: Any = SimpleNamespace(fleet=SimpleNamespace(ledger=self.ledger, store=store or self.store))
        task = SimpleNamespace(request=SimpleNamespace(retries=retries))
        return _is_gone(app, task, batch_id=self.run.batch_id, run=1, shard=0)

    def begins(self) -> Verdict:
        """What a worker is answered who has a message of the batch."""
        at = Address(self.run.batch_id, 1, 0, 0)
        return self.ledger.begin([Claim(at, "worker/delivery")])[0].verdict


@pytest.fixture
def bench(broker_server: BrokerServer, tmp_path: Path) -> Bench:
    return Bench(broker_server, tmp_path)


def test_messages_of_a_purged_batch_are_dropped_after_a_while(bench: Bench) -> None:
    bench.purge()

    assert not bench.is_gone(ENOUGH - 1)
    assert bench.begins() is Verdict.UNKNOWN
    assert bench.is_gone(ENOUGH)

    assert bench.begins() is Verdict.DONE
    assert 0 < bench.client.ttl(bench.head) <= keys.CLOSED_TTL_S
    assert bench.is_gone(0)  # the next task need not wait


def test_a_purged_batch_is_not_brought_back_from_memory(bench: Bench) -> None:
    bench.purge()

    with pytest.raises(NoSuchBatchError):
        bench.aggregator.feed(bench.run.batch_id, 1)

    assert not bench.client.exists(bench.head)


def test_a_store_that_is_away_or_not_mounted_buries_nothing(bench: Bench, tmp_path: Path) -> None:
    class Away(LocalStore):
        def exists(self, name: str) -> bool:
            raise StoreUnavailableError(name)

    (tmp_path / "mount").mkdir()

    assert not bench.is_gone(ENOUGH, LocalStore(tmp_path / "mount"))
    assert not bench.is_gone(ENOUGH, Away(tmp_path / "store"))
    assert bench.begins() is Verdict.UNKNOWN


def test_a_run_that_redis_knows_is_not_buried(bench: Bench) -> None:
    restore(bench.store, bench.ledger, bench.run, window=1000)

    assert not bench.is_gone(ENOUGH)

    assert bench.begins() is Verdict.OURS


def test_what_was_buried_in_error_comes_back(bench: Bench, tmp_path: Path) -> None:
    """By an aggregator of another store, which never has the batch."""
    other = LocalStore(tmp_path / "other")
    store_id(other)
    assert bench.is_gone(ENOUGH, other)
    head = bench.ledger.progress(bench.run.batch_id, 1)
    assert head is not None
    assert head.closed == PURGED

    assert bench.aggregator.feed(bench.run.batch_id, 1) == 1

    assert bench.begins() is Verdict.OURS
    assert bench.client.ttl(bench.head) == -1
