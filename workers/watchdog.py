"""The watchdog: looks after open batches, for a lost message means silence in Celery.

Owns: `Watchdog`, which finds open batches in the store and heals what stands still. One is at work at a time, by a
lock with a time limit; everything that it does is harmless when done twice.
Must not know: how a shard is sealed or a batch assembled (`workers.aggregate`), engines.
On failure: an outage ends one look; the next one comes. It holds no state that matters: a new watchdog starts afresh.

A local fleet's watchdog looks after its own batch alone, and no other one after local batches: their rows would be
another model's.

What a look does for each open batch, found from the store, so that a Redis that came back empty is noticed too:

    it is to end early, or has expired             end it
    Redis does not know it                         restore it
    a part exists that Redis does not know sealed   note it
    all shards sealed, no end                      assemble it
    an end, and Redis knows it as open             clear up after it, and close it; so are runs before the newest one
    the window is not full                         feed it
    a shard stays open with many finished rows      spill them: Redis must not hold what a straggler keeps open
    a shard is full and not sealed, twice seen     seal it (its chord did not fire)
    an index is neither recorded nor running, its queue has passed its message, and two leases and a sweep have gone by
                                                   send it again, as a plain task; then wait twice as long

And once a minute: a batch that this store put into Redis and has no more, twice seen, was removed: its keys get a TTL.

A queue has passed a message when it is empty, or when a marker that was sent to it later has been consumed. With no
worker on the queue nothing is sent: a fleet at zero is no loss, and a long queue is only long.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import redis
from kombu.exceptions import OperationalError

from common import broker, layout
from common.batch import FIRST_RUN, BatchStatus
from common.dispatch import republish, send, shard_queues
from common.errors import FleetError, NoSuchBatchError, ObjectMissingError, StoreUnavailableError
from common.ledger import WorkerBeat, new_worker_id
from common.runs import (
    newest_run,
    now,
    read_end,
    read_ending,
    read_manifest,
    reconcile,
    sealed_shards,
    write_ending,
)
from common.settings import AGGREGATE_QUEUE
from common.spill import spill_shard
from common.store import store_id

if TYPE_CHECKING:
    from celery import Celery

    from common.batch import Run, Shard
    from common.ledger import Ledger
    from common.routes import Routes
    from common.store import ObjectStore
    from workers.aggregate import Aggregator

logger = logging.getLogger("fleet.watchdog")

#: Seconds between two looks, and for how long a watchdog that says nothing stays the one.
INTERVAL_S = 5.0
LOCK_S = 20.0
#: Seconds after a lease's end by which a sweep has put the delivery back (the transport sweeps every 5 s).
SWEEP_S = 8.0
#: Leases after which a marker that was not consumed counts as lost.
MARKER_LEASES = 20
#: Seconds for which a shard may be open, and rows that it must have gained, before finished rows are spilled.
SPILL_AFTER_S = 60.0
SPILL_ROWS = 16
#: A closed batch is looked at again in one of so many looks.
CLOSED_LOOKS = 120
#: Batches that Redis knows are looked for in the store at one of so many looks.
REMOVED_LOOKS = 12
#: Seconds for which a heartbeat counts.
BEAT_TTL_S = 20.0
#: Seconds for which a refusal of the store counts. What was refused is tried again within half of it.
TROUBLE_S = 60.0


@dataclass
class _Gap:
    """Requests of a shard, on one queue, that are neither recorded nor running."""

    since: float
    wait_s: float
    marker: str = ""
    marked_at: float = 0.0


@dataclass
class _Open:
    """A shard that is not full. `since`: when it was first seen, or last spilled with so many rows `recorded`."""

    since: float
    recorded: int = 0


@dataclass
class _Watched:
    """What the last looks saw of one batch."""

    #: By shard and queue.
    gaps: dict[tuple[int, str], _Gap] = field(default_factory=dict)
    #: The queue of each request of a shard, where requests go to several.
    queues: dict[int, dict[int, str]] = field(default_factory=dict)
    open: dict[int, _Open] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)


class _QueueLook:
    """One look at a queue, shared by all gaps: each question is asked once, and one marker serves them all."""

    def __init__(self, app: Celery, ledger: Ledger, queue: str) -> None:
        self._app = app
        self._ledger = ledger
        self._queue = queue

    @cached_property
    def has_workers(self) -> bool:
        """Whether somebody consumes it."""
        return any(worker.queue == self._queue and worker.state == "ready" for worker in self._ledger.workers())

    @cached_property
    def is_empty(self) -> bool:
        """Whether nothing waits in it."""
        return self._ledger.queue_length(self._queue) == 0

    @cached_property
    def marker(self) -> str:
        """The id of a marker message, sent when it is first asked for."""
        marker = uuid.uuid4().hex
        self._app.send_task(
            broker.MARKER, kwargs={"marker": marker}, queue=self._queue, ignore_result=True, kwargsrepr="-"
        )
        return marker


class Watchdog:
    """Looks after the open batches of one store. `start` and `stop` may be called in any order, also twice."""

    def __init__(
        self,
        app: Celery,
        store: ObjectStore,
        ledger: Ledger,
        aggregator: Aggregator,
        *,
        lease_s: float,
        routes: Routes,
        only_batch: str = "",
        spill_after_s: float = SPILL_AFTER_S,
    ) -> None:
        self._app = app
        self._store = store
        self._ledger = ledger
        self._aggregator = aggregator
        self._lease_s = lease_s
        self._spill_after_s = spill_after_s
        self._routes = routes
        self._only_batch = only_batch
        #: Local batches of the store: each has a fleet of its own, or waits for it.
        self._others: set[str] = set()
        self._who = new_worker_id()
        #: An aggregator has a heartbeat too, so that a waiting producer can say when there is none.
        self._beat = WorkerBeat(self._who, "ready", "", (), AGGREGATE_QUEUE, 0, store.uri)
        self._trouble, self._trouble_at = "", 0.0
        self._closed: set[str] = set()
        #: Batches that Redis knows and the store does not, at the last look for them.
        self._absent: set[str] = set()
        self._looks = 0
        #: By batch and run: what was seen of one run says nothing about the next one.
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether it looks, or has looked."""
        return self._thread is not None

    @property
    def alive(self) -> bool:
        """False when its thread died of a fault; whether a look succeeds is another matter."""
        return self._thread is None or self._thread.is_alive() or self._stopping.is_set()

    def start(self) -> None:
        """Look every few seconds, in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fleet-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop looking; a look that is under way is waited for."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            try:
                if not self._beat.store_id:
                    self._beat = replace(self._beat, store_id=store_id(self._store))
                recent = time.monotonic() - self._trouble_at < TROUBLE_S
                self._ledger.beat(replace(self._beat, trouble=self._trouble if recent else ""), BEAT_TTL_S)
                self.look()
            except (FleetError, redis.RedisError, OperationalError) as exc:
                logger.warning("this look failed: %s: %s", type(exc).__name__, exc)
            except Exception:  # the outermost loop of the thread: without it nothing would be healed any more
                logger.exception("this look failed by a fault of the fleet")
            if self._stopping.wait(min(INTERVAL_S, self._lease_s)):
                break
        try:
            self._ledger.forget_worker(self._who)
        except redis.RedisError as exc:
            logger.warning("heartbeat not removed: %s", type(exc).__name__)

    def note_trouble(self, reason: str) -> None:
        """Let the heartbeat say for a while what the store refused the aggregator; "" when it did not."""
        self._trouble, self._trouble_at = reason, time.monotonic()

    def look(self) -> None:
        """Look after every open batch once. Raises what the store, Redis and the broker raise."""
        if not self._ledger.be_watchdog(self._who, LOCK_S):
            self._watched.clear()  # somebody else's eyes; ours would be out of date
            return
        self._looks += 1
        self._closed -= self._ledger.reopened()
        names = [self._only_batch] if self._only_batch else self._store.names(layout.BATCHES)
        bare: set[str] = set()
        for batch_id in names:
            if self._stopping.is_set():
                return
            if batch_id in self._others:
                continue
            if batch_id in self._closed and not self._due(batch_id):
                continue
            try:
                self._look_at(batch_id)
            except NoSuchBatchError:
                bare.add(batch_id)  # it is being submitted, or was removed
            except (StoreUnavailableError, redis.RedisError, OperationalError):
                raise
            except Exception as exc:
                logger.error("%s cannot be looked after: %s", batch_id, type(exc).__name__)
                logger.debug("%s", batch_id, exc_info=True)

        if self._looks % REMOVED_LOOKS == 0 and not self._only_batch:
            self._let_removed_expire(bare)

    def _let_removed_expire(self, bare: set[str]) -> None:
        """Let the keys go of batches that somebody removed from the store by hand while they were open.

        Nobody would close them, and they would count as work to do for ever. A store that is away raises. Only the
        store that a batch was restored from is a witness, by its mark: another one on the same Redis may be what
        `FLEET_STORE` was changed to, or a folder with nothing mounted on it. Without any batch it is none either. What
        is absent at two looks in a row was removed; should it come back within the TTL, `keep_open` takes that off. So
        was what is there without its manifest (`bare`): while workers ran it, parts were written once more.
        """
        try:
            own = self._store.read(layout.STORE_ID).decode()
        except ObjectMissingError:
            self._absent = set()
            return
        known = self._ledger.batches_of(own)  # first: a manifest is in the store before its batch is in Redis
        there = set(self._store.names(layout.BATCHES)) - bare
        absent = known - there if there else set()
        for batch_id in absent & self._absent:
            if not self._store.exists(layout.manifest(batch_id)) and (count := self._ledger.let_expire(batch_id)):
                logger.warning("%s was removed from %s: its %d keys in Redis expire in a day",
                               batch_id, self._store.uri, count)  # fmt: skip
        self._absent = absent

    def _due(self, batch_id: str) -> bool:
        """Whether a closed batch is to be looked at again: each in some look of every `CLOSED_LOOKS`.

        A later run is announced in Redis (`reopened`); one whose announcement was lost is found by this.
        """
        return (zlib.crc32(batch_id.encode()) + self._looks) % CLOSED_LOOKS == 0

    def _look_at(self, batch_id: str) -> None:
        manifest = read_manifest(self._store, batch_id)
        if manifest.local and batch_id != self._only_batch:
            self._others.add(batch_id)
            return
        run = newest_run(self._store, manifest)
        if read_end(self._store, batch_id, run.number) is None:
            self._look_after(run)
        else:
            self._clear_up(batch_id, run.number)
            self._closed.add(batch_id)
            self._watched.pop((batch_id, run.number), None)
        for number in range(FIRST_RUN, run.number):
            self._clear_up(batch_id, number)

    def _clear_up(self, batch_id: str, number: int) -> None:
        """Close in Redis a run that has its end; one that stays open there would count as work to do for ever."""
        progress = self._ledger.progress(batch_id, number)
        if progress is not None and not progress.closed:
            # Whoever wrote the end, this watchdog perhaps, came no further; a message may never come again.
            self._aggregator.assemble_batch(batch_id, number)

    def _look_after(self, run: Run) -> None:
        batch_id, number = run.batch_id, run.number
        wish = read_ending(self._store, batch_id, number)
        if wish is None and run.expires_at is not None and now() >= run.expires_at:
            wish = write_ending(self._store, batch_id, number, BatchStatus.EXPIRED)
        if wish is not None:
            self._aggregator.end_early(batch_id, number)
            return
        reconcile(self._store, self._ledger, run)
        self._aggregator.feed(batch_id, number)
        progress = self._ledger.progress(batch_id, number)
        if progress is None or progress.closed:
            return
        sealed = sealed_shards(self._store, batch_id, number)
        published = [shard for shard in run.shards[: progress.frontier] if shard.number not in sealed]
        self._ledger.keep_open(batch_id, number, (shard.number for shard in published))
        missing = [(shard, self._ledger.missing(batch_id, number, shard.number, shard.indexes)) for shard in published]
        watched = self._watched.setdefault((batch_id, number), _Watched())
        self._watched.pop((batch_id, number - 1), None)
        self._seal_full(run, {shard.number for shard, indexes in missing if not indexes}, watched)
        unrecorded = [(shard, indexes) for shard, indexes in missing if indexes]
        self._fill_gaps(run, unrecorded, watched)
        self._spill(run, unrecorded, watched)

    def _spill(self, run: Run, unrecorded: list[tuple[Shard, set[int]]], watched: _Watched) -> None:
        """Spill what finished of shards that have been open for a while."""
        at, seen = time.monotonic(), {}
        for shard, indexes in unrecorded:
            opened = seen[shard.number] = watched.open.get(shard.number) or _Open(at)
            recorded = shard.count - len(indexes)
            if at - opened.since >= self._spill_after_s and recorded - opened.recorded >= SPILL_ROWS:
                rows = spill_shard(self._store, self._ledger, run, shard)
                logger.info("shard %d of %s stays open: moved %d rows into its batch directory",
                            shard.number, run.batch_id, rows)  # fmt: skip
                seen[shard.number] = _Open(at, recorded)
        watched.open = seen

    def _seal_full(self, run: Run, full: set[int], watched: _Watched) -> None:
        for shard in full & watched.full:
            logger.warning("shard %d of %s is full and not sealed: sealing it", shard, run.batch_id)
            send(self._app, broker.SEAL_SHARD, batch_id=run.batch_id, run=run.number, shard=shard)
        watched.full = full

    def _fill_gaps(self, run: Run, unrecorded: list[tuple[Shard, set[int]]], watched: _Watched) -> None:
        gaps = {}
        looks = {queue: _QueueLook(self._app, self._ledger, queue) for queue in self._routes.queues}
        for shard, indexes in unrecorded:
            missing = indexes - self._ledger.running(run.batch_id, run.number, shard.number)
            for queue, lost in self._by_queue(run, shard, missing, watched).items():
                key = shard.number, queue
                gap = gaps[key] = watched.gaps.get(key) or _Gap(time.monotonic(), 2 * self._lease_s + SWEEP_S)
                if not looks[queue].has_workers or not self._queue_passed(gap, looks[queue]):
                    gap.since = time.monotonic()
                elif time.monotonic() - gap.since >= gap.wait_s:
                    logger.warning(
                        "%d requests of shard %d of %s got lost: sending them again",
                        len(lost), shard.number, run.batch_id,
                    )  # fmt: skip
                    republish(self._app, self._store, run, shard, lost, routes=self._routes)
                    gaps[key] = _Gap(time.monotonic(), 2 * gap.wait_s)
        watched.gaps = gaps
        still = {number for number, _ in gaps}
        watched.queues = {number: queues for number, queues in watched.queues.items() if number in still}

    def _by_queue(self, run: Run, shard: Shard, indexes: set[int], watched: _Watched) -> dict[str, set[int]]:
        """Requests of a shard by their queue. Which goes where is read from their lines once, and kept."""
        if self._routes.single or not indexes:
            return {self._routes.default: indexes} if indexes else {}
        queues = watched.queues.get(shard.number)
        if queues is None:
            queues = watched.queues[shard.number] = shard_queues(self._store, run, shard, self._routes)
        found: dict[str, set[int]] = {}
        for index in indexes:
            found.setdefault(queues[index], set()).add(index)
        return found

    def _queue_passed(self, gap: _Gap, queue: _QueueLook) -> bool:
        """Whether the queue has passed what was sent to it before the gap was seen."""
        if (gap.marker and self._ledger.marker_passed(gap.marker)) or queue.is_empty:
            return True
        # A marker can get lost too, in a queue that is never seen empty: after a while another one is sent.
        if not gap.marker or time.monotonic() - gap.marked_at > MARKER_LEASES * self._lease_s:
            gap.marker, gap.marked_at = queue.marker, time.monotonic()
        return False
