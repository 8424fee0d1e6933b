"""What the producer can do, as plain functions: submit, wait, list, fetch. The command line is a shell over these.

Owns: the order of things at submit, and a waiting producer. Must not know: argparse, terminals, local mode.
On failure: refusals raise before anything is queued. Once the manifest is written the batch is durable, and every
later failure leaves it to be attached to again. While Redis or the store is away a waiting producer waits.

    check input, destination, broker ─▶ batch directory ─▶ manifest (durable) ─▶ pointer ─▶ restore ─▶ feed ─▶ wait

Pointer objects map a digest to the open batch of that digest, so that the same submit again attaches to it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import redis
from kombu.exceptions import OperationalError

from common import broker, layout, tracing
from common.batch import CLOSED, FIRST_RUN, BatchStatus, Manifest, RequestCounts, Run, RunEnd, Usage
from common.dispatch import PUBLISH_BATCH, SOFT_LIMIT, Feeder, republish, send
from common.errors import (
    BrokerUnavailableError,
    NoSuchBatchError,
    ObjectMissingError,
    StoreUnavailableError,
    UsageError,
)
from common.ledger import Ledger
from common.routes import Routes
from common.runs import (
    BatchState,
    failed_indexes,
    newest_run,
    now,
    read_end,
    read_ending,
    read_manifest,
    reconcile,
    refuse_removed,
    remove_batch,
    restore,
    sealed_shards,
    start_purge,
    start_run,
    state_of_run,
    write_end,
    write_ending,
)
from common.settings import AGGREGATE_QUEUE
from common.store import store_id
from producer import intake
from producer.interrupts import raise_lost, signals_deferred

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from celery import Celery

    from common.ledger import WorkerBeat
    from common.settings import FleetSettings
    from common.store import ObjectStore
    from producer.output import Destination

logger = logging.getLogger("fleet.producer")

#: Seconds between two looks at a batch; where a look costs requests to S3, the second number.
POLL_S = 0.25
REMOTE_POLL_S = 1.0
#: Seconds between two looks whether a batch that is waited for is still there.
PRESENCE_S = 5.0
#: Seconds without a worker before a waiting producer says so.
NO_WORKER_S = 3.0


class Reporter(Protocol):
    """Whom a waiting producer tells how it goes; `producer.progress.Progress` is one."""

    def say(self, text: str) -> None:
        """A lasting line."""

    def note(self, text: str) -> None:
        """What is being waited for, or an empty text."""

    def update(self, *, done: int, total: int, failed: int, tokens: int) -> None:
        """New counts."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet as a producer sees it."""

    settings: FleetSettings
    store: ObjectStore
    app: Celery
    ledger: Ledger

    @classmethod
    def connect(cls, settings: FleetSettings, store: ObjectStore) -> Fleet:
        """Connect to the broker. Raises `BrokerUnavailableError` when it does not answer."""
        client = broker.redis_client(settings.broker_url)
        broker.reachable(client, settings.broker_url)
        return cls(settings, store, broker.make_app(settings.broker_url, lease_s=settings.lease_s), Ledger(client))

    def refuse_other_store(self) -> None:
        """Refuse to submit where an aggregator works on another store: it would never find the batch.

        Raises `UsageError`. While no aggregator is up there is nothing to compare; `wait` looks again.
        """
        stranger = other_store(self.ledger.workers(), store_id(self.store))
        if stranger is not None:
            raise UsageError(
                f"this producer's store is {self.store.uri}, but the aggregator {stranger.worker_id} works on "
                f"{stranger.store}: set FLEET_STORE alike for both"
            )

    def feeder(self, run: Run) -> Feeder:
        """A feeder of the run."""
        settings = self.settings
        return Feeder(
            self.app,
            self.ledger,
            self.store,
            run,
            window=settings.window,
            routes=self.routes,
            pack_size=settings.pack_size,
        )

    @property
    def routes(self) -> Routes:
        """Where requests go."""
        return Routes.parse(self.settings.routes)


def other_store(beats: Sequence[WorkerBeat], own_id: str) -> WorkerBeat | None:
    """An aggregator that works on another store than the one with this id, or None."""
    return next((beat for beat in beats if beat.store_id and beat.store_id != own_id), None)


def find_open(store: ObjectStore, digest: str) -> Manifest | None:
    """The open batch of this digest, or None. A closed batch is never reused: sampling twice means running twice."""
    return _pointed_at(store, digest)[1]


def _pointed_at(store: ObjectStore, digest: str) -> tuple[int, Manifest | None]:
    """The number of the digest's pointer that is in force (0: none), and the batch that it leads to, if it is open."""
    number = max(map(int, store.names(layout.pointers(digest))), default=0)
    try:
        batch_id = store.read(layout.pointer(digest, number)).decode()
        manifest = read_manifest(store, batch_id)
    except (ObjectMissingError, NoSuchBatchError):
        return number, None
    # A later run makes a batch open again, but it is not the file's run: a submit samples anew.
    return number, manifest if read_end(store, batch_id, FIRST_RUN) is None else None


def _point(store: ObjectStore, manifest: Manifest, *, new: bool) -> Manifest:
    """Point the digest at the batch; returns the batch that it leads to then, which another producer may have made.

    A pointer is created, never replaced, so of two submits of one file at once one wins and the other attaches.
    """
    while True:
        number, found = _pointed_at(store, manifest.digest)
        if found is not None and not new:
            return found
        with store.writing(layout.pointer(manifest.digest, number + 1)) as out:
            out.write(manifest.batch_id.encode())
        if out.created:
            return manifest


def write_batch(
    store: ObjectStore,
    checked: intake.Checked,
    *,
    digest: str,
    max_shard_size: int,
    batch_id: str | None = None,
    expires_at: int | None = None,
    fail_after: int | None = None,
    local: bool = False,
    new: bool = False,
    on_lines: Callable[[int], None] | None = None,
) -> Manifest:
    """Make the batch durable, then point the digest at it. An empty file's batch is complete at once.

    Where another producer made an open batch of the same digest meanwhile, that one is returned, unless `new`.
    """
    batch_id = batch_id or layout.new_batch_id()
    traceparent = tracing.current()
    try:
        with tracing.child("write", batch_id=batch_id):
            manifest = intake.write_batch(
                store,
                checked,
                batch_id=batch_id,
                digest=digest,
                max_shard_size=max_shard_size,
                expires_at=expires_at,
                fail_after=fail_after,
                local=local,
                traceparent=traceparent,
                on_lines=on_lines,
            )
    except BaseException:
        # An interrupt, a file that changed, a full disk: without a manifest nobody would ever find the prompts.
        with signals_deferred(), contextlib.suppress(StoreUnavailableError):
            if not store.exists(layout.manifest(batch_id)):
                store.remove(layout.batch(batch_id))
        raise
    if manifest.total == 0:
        for name in (layout.output(manifest.batch_id, FIRST_RUN), layout.errors(manifest.batch_id, FIRST_RUN)):
            with store.writing(name, replace=True):
                pass
        write_end(
            store,
            manifest.batch_id,
            FIRST_RUN,
            RunEnd(status=BatchStatus.COMPLETED, at=now(), counts=RequestCounts(), usage=Usage()),
        )
        return manifest
    held = _point(store, manifest, new=new)
    if held.batch_id != manifest.batch_id:
        remove_batch(store, manifest.batch_id)
    return held


def start(fleet: Fleet, run: Run, reporter: Reporter | None = None) -> None:
    """Put the run into Redis, if it is not there, and publish what the window allows.

    Raises `BrokerUnavailableError` when the broker fails on the way; the batch is durable all the same. Who waits for
    the batch anyway gives a reporter: then an outage, of the store too, is waited for as in `wait`. Signals wait until
    some hundred requests are published, and their shards whole: the watchdog would publish the rest a minute later.
    """
    with _stored_all_the_same(run):
        while True:
            try:
                _begin(fleet, run)
            except (redis.RedisError, OperationalError, StoreUnavailableError) as exc:
                if reporter is None or not _is_outage(exc):
                    raise
                _sit_out(reporter, exc)
            else:
                return


def _begin(fleet: Fleet, run: Run) -> None:
    """What `start` does. Begun again it goes on; what was claimed and not pushed is left to the watchdog."""
    if run.number != FIRST_RUN:
        fleet.ledger.note_reopened(run.batch_id, run.number)
        # It may have ended since it was found open: who closes it takes this back once, after the end is written.
        if read_end(fleet.store, run.batch_id, run.number) is not None:
            fleet.ledger.forget_reopened(run.batch_id, run.number)
    restore(fleet.store, fleet.ledger, run, window=fleet.settings.window)
    reconcile(fleet.store, fleet.ledger, run)
    if (wish := read_ending(fleet.store, run.batch_id, run.number)) is not None:
        # Somebody cancelled it while nobody ran it: it must not win a race against the watchdog now.
        fleet.ledger.set_ending(run.batch_id, run.number, wish.status.value)
        send(fleet.app, broker.END_EARLY, batch_id=run.batch_id, run=run.number)
    feeder = fleet.feeder(run)
    more = True
    while more:
        with signals_deferred():
            more = feeder.feed(PUBLISH_BATCH) > 0


def _cause(error: Exception) -> BaseException:
    """What redis-py raised, where kombu raises it again under a name of its own."""
    return error.__cause__ if isinstance(error, OperationalError) and error.__cause__ is not None else error


def _is_outage(error: Exception) -> bool:
    """Whether it passes by itself. A Redis that is full, or refuses, waits for somebody to change its set-up."""
    cause = _cause(error)
    if isinstance(cause, redis.AuthenticationError):
        return False
    return isinstance(cause, StoreUnavailableError | redis.ConnectionError | redis.TimeoutError | OSError)


def _sit_out(reporter: Reporter, error: Exception) -> None:
    """Say what is away, and leave it a second."""
    logger.debug("waiting", exc_info=error)
    raise_lost()
    what = "store" if isinstance(error, StoreUnavailableError) else "broker"
    reporter.note(f"waiting for the {what} ({type(_cause(error)).__name__})")
    time.sleep(1.0)


@contextlib.contextmanager
def _stored_all_the_same(run: Run) -> Iterator[None]:
    """Say of a broker that fails while a run is published that the batch is durable, and how it goes on."""
    try:
        yield
    except (redis.RedisError, OperationalError) as exc:
        reason = "is full (maxmemory)" if "maxmemory" in str(_cause(exc)) else f"failed ({type(_cause(exc)).__name__})"
        raise BrokerUnavailableError(
            f"the broker {reason} while {run.batch_id} was published; "
            "the batch is stored, goes on when the broker can take it, and the same command attaches to it"
        ) from exc


def wait(
    fleet: Fleet,
    run: Run,
    destination: Destination | None,
    reporter: Reporter,
    *,
    on_poll: Callable[[], None] | None = None,
) -> BatchState:
    """Wait until the run is closed. In the first one the destination grows in input order meanwhile; see `_Follower`.

    `on_poll` is called on every look; what it raises ends the wait. Raises `NoSuchBatchError` when the batch is removed
    meanwhile.
    """
    follower = _Follower(fleet.store, run, destination)
    hint, presence = _WorkerHint(fleet, run), Presence(fleet.store, run.batch_id)
    poll_s = REMOTE_POLL_S if fleet.store.local_path("") is None else POLL_S
    while True:
        raise_lost()
        if on_poll is not None:
            on_poll()
        try:
            state = state_of_run(fleet.store, fleet.ledger, run)
            if state.status not in CLOSED:
                presence.look()
            follower.follow(closed=state.status in CLOSED)
            note = hint.look(runs=state.status is not BatchStatus.FINALIZING)
        except (redis.RedisError, StoreUnavailableError) as exc:
            # An outage is not an end: the batch goes on without us, and we look again.
            hint.start_anew()
            _sit_out(reporter, exc)
            continue
        except ObjectMissingError:
            refuse_removed(fleet.store, run.batch_id)
            raise
        counts = state.counts
        reporter.note(note)
        reporter.update(
            done=counts.completed + counts.failed,
            total=counts.total,
            failed=counts.failed,
            tokens=state.usage.completion_tokens,
        )
        if state.status in CLOSED:
            return state
        time.sleep(poll_s)


def cancel(store: ObjectStore, fleet: Fleet | None, manifest: Manifest) -> BatchStatus:
    """Wish that the batch ends now: finished rows stay, the others become failed ones. Returns what it will end as.

    The wish is an object in the store, so it is not lost; with a fleet at hand it is carried out within seconds.
    """
    run = newest_run(store, manifest)
    end = read_end(store, run.batch_id, run.number)
    if end is not None:
        return end.status
    if fleet is not None:
        with contextlib.suppress(redis.RedisError):
            fleet.refuse_other_store()
    wish = write_ending(store, run.batch_id, run.number, BatchStatus.CANCELLED)
    if fleet is not None:
        try:
            fleet.ledger.set_ending(run.batch_id, run.number, wish.status.value)
            send(fleet.app, broker.END_EARLY, batch_id=run.batch_id, run=run.number)
        except (redis.RedisError, OperationalError) as exc:
            # The wish is stored: the watchdog carries it out once the broker is back.
            logger.warning("%s ends once the broker is back (%s)", run.batch_id, type(exc).__name__)
    return wish.status


def fail_after(number: int, total: int, *, is_share: bool) -> int:
    """After how many failed rows of `total` a batch ends: so many, or with `is_share` so many per cent."""
    return max(1, -(-total * number // 100)) if is_share else number


def run_again(store: ObjectStore, closed: Run, codes: Collection[str] | None = None) -> Run | None:
    """Start a run of the failed rows of a closed one, with `codes` only of those; None when there are none."""
    indexes = list(failed_indexes(store, closed, codes))
    return start_run(store, closed, indexes) if indexes else None


class Presence:
    """Sees for whoever waits that the batch is still there: what was removed would be waited for without end."""

    def __init__(self, store: ObjectStore, batch_id: str) -> None:
        self._store = store
        self._batch_id = batch_id
        self._next_look = 0.0

    def look(self) -> None:
        """Raise `NoSuchBatchError` when the batch is gone, by a look every few seconds. An outage is no absence."""
        if time.monotonic() >= self._next_look:
            refuse_removed(self._store, self._batch_id)
            self._next_look = time.monotonic() + PRESENCE_S


class _Follower:
    """Copies rows to the destination: sealed parts, in order, as they appear; of a later run the output, at its end."""

    def __init__(self, store: ObjectStore, run: Run, destination: Destination | None) -> None:
        self._store = store
        self._run = run
        self._destination = destination if destination is not None and destination.grows else None
        self._next = 0

    def follow(self, *, closed: bool) -> None:
        """Copy what is there. When the run is closed, all of it is."""
        if self._destination is None:
            return
        if self._run.number != FIRST_RUN:
            if closed:
                with self._store.open(layout.output(self._run.batch_id, self._run.number)) as rows:
                    self._destination.append(rows)
            return
        while self._next < len(self._run.shards):
            try:
                part = self._store.open(layout.part(self._run.batch_id, FIRST_RUN, self._next))
            except ObjectMissingError:
                if closed:
                    raise
                return
            with part:
                self._destination.append(part)
            self._next += 1


class _WorkerHint:
    """Says what is missing when nobody works."""

    def __init__(self, fleet: Fleet, run: Run) -> None:
        self._ledger = fleet.ledger
        self._run = run
        self._routes = fleet.routes
        self._store = fleet.store
        self._store_id = ""
        self._since = time.monotonic()
        self._next_look = 0.0
        self._note = ""

    def start_anew(self) -> None:
        """Forget what was missed: after an outage heartbeats come back a moment later than the broker."""
        self._since, self._note = time.monotonic(), ""

    def look(self, *, runs: bool) -> str:
        """What is missing, after a while of it. Without requests to run no worker is missed."""
        at = time.monotonic()
        if at < self._next_look:
            return self._note
        self._next_look = at + 1.0
        beats = self._ledger.workers()
        waited_s = at - self._since
        self._store_id = self._store_id or store_id(self._store)
        stranger = other_store(beats, self._store_id)
        if stranger is not None:
            self._note = f"the aggregator {stranger.worker_id} works on {stranger.store}, not on {self._store.uri}"
            return self._note
        if (share := self._ledger.memory_share()) > SOFT_LIMIT:
            self._note = f"waiting for room: the broker uses {share:.0%} of its memory ({waited_s:.0f} s)"
        elif runs and (missing := self._missing_workers(beats)):
            self._note = f"{missing} ({waited_s:.0f} s)"
        elif not any(beat.queue == AGGREGATE_QUEUE for beat in beats):
            self._note = f"waiting for an aggregator: start `worker aggregate` ({waited_s:.0f} s)"
        elif trouble := next((beat.trouble for beat in beats if beat.trouble), ""):
            self._note = f"waiting for the aggregator: {trouble} ({waited_s:.0f} s)"
        else:
            self._since, self._note = at, ""
        if waited_s <= NO_WORKER_S:
            self._note = ""
        return self._note

    def _missing_workers(self, beats: Sequence[WorkerBeat]) -> str:
        """What is waited for, where a queue with requests of the run has no ready worker."""
        loading = ""
        for queue in self._queues_in_use():
            workers = [beat for beat in beats if beat.queue == queue]
            if not workers:
                models = ", ".join(self._routes.models_of(queue))
                return f"waiting for a worker: none serves the queue {queue!r}{models and f' (of {models})'}"
            if not any(worker.state == "ready" for worker in workers):
                loading = "waiting for the engine to load"
        return loading

    def _queues_in_use(self) -> Sequence[str]:
        """The queues with unfinished requests of the run, as far as they are published."""
        if self._routes.single:
            return self._routes.queues
        progress = self._ledger.progress(self._run.batch_id, self._run.number)
        return [queue for queue in self._routes.queues if progress is not None and progress.unfinished(queue) > 0]


def manifests(store: ObjectStore) -> Iterator[Manifest]:
    """All batches of the store, newest first."""
    found = []
    for batch_id in store.names(layout.BATCHES):
        try:
            found.append(read_manifest(store, batch_id))
        except NoSuchBatchError:
            continue  # a submit that did not get to its manifest: no batch
    yield from sorted(found, key=lambda manifest: (manifest.created_at, manifest.batch_id), reverse=True)


def purge(store: ObjectStore, older_than_s: float, *, dry_run: bool = False) -> Iterator[str]:
    """Remove batches whose newest run closed at least so long ago; yields the id of each before it is removed.

    First the next run's place is taken, so that a retry at the same moment finds the batch gone, or is left alone.
    """
    limit = now() - older_than_s
    for manifest in manifests(store):
        if not _is_old(store, manifest, limit, dry_run=dry_run):
            continue
        yield manifest.batch_id
        if not dry_run:
            remove_batch(store, manifest.batch_id)


def _is_old(store: ObjectStore, manifest: Manifest, limit: float, *, dry_run: bool) -> bool:
    """Whether the batch is to be purged; unless `dry_run` nobody can run it again from then on."""
    try:
        run = newest_run(store, manifest)
    except NoSuchBatchError:
        return True  # a purge that died
    end = read_end(store, run.batch_id, run.number)
    return end is not None and end.at <= limit and (dry_run or start_purge(store, run))


def fetch(store: ObjectStore, run: Run, destination: Destination) -> RunEnd | None:
    """Copy a closed run's output to a destination; None, with nothing touched, while the run is open.

    Nothing is touched either when the output is not there: the destination may hold the only other copy of the rows.
    What is remote is left to `Destination.deliver`.
    """
    end = read_end(store, run.batch_id, run.number)
    if end is None or not destination.grows:
        return end
    try:
        rows = store.open(layout.output(run.batch_id, run.number))
    except ObjectMissingError:
        read_manifest(store, run.batch_id)  # raises what tells most: that the batch was removed meanwhile
        raise
    with rows:
        destination.begin()
        destination.append(rows)
    return end


def take_up(fleet: Fleet, run: Run) -> None:
    """Send again what a fleet that is gone had taken and not recorded. Its queues are empty, and no worker runs yet.

    Raises `BrokerUnavailableError` as `start` does.
    """
    with _stored_all_the_same(run):
        progress = fleet.ledger.progress(run.batch_id, run.number)
        frontier = progress.frontier if progress is not None else 0
        sealed = sealed_shards(fleet.store, run.batch_id, run.number)
        for shard in run.shards[:frontier]:
            if shard.number not in sealed:
                missing = fleet.ledger.missing(run.batch_id, run.number, shard.number, shard.indexes)
                republish(fleet.app, fleet.store, run, shard, missing, routes=fleet.routes)
