"""Publishing: one shard as a Celery chord, and the feed that keeps the window full.

Owns: task ids, message arguments, the order of publishing, pacing.
Must not know: who calls it; the producer feeds first, the aggregator feeds on.
On failure: a shard whose publishing broke off is not published again here. Its frontier is past it, the ids that went
out are deterministic, and what is missing is for the watchdog (plain tasks with fresh ids) to publish. Of small shards
that leave together that may be several: fewer than `PUBLISH_BATCH` requests.

    frontier ─▶ shard s: claimed (compare-and-set, one feeder wins) ─▶ chord size set ─▶ n messages ─▶ next shard
                                                                      (pushed together with those of small neighbours)

Rules that Celery 5.7 imposes (celery/backends/redis.py):
- The chord's size is set once, *before* the first message: set after the last part returned it would never fire, and
  setting it again would forget that the body was fired.
- Ids derive from batch, run, shard and index, so that a message that was sent twice counts once.
- Messages are made and sent by hand: `chord(generator)` keeps every signature and subscribes a channel for every
  request, and `send_task` serializes the chord's body, which is the same on all of them, once per request.
- The body's signature rides on every message, so it carries two numbers and an id.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kombu.common import maybe_declare

from common import broker, layout, tracing
from common.messages import RequestMessages
from common.packs import pack, pack_sizes
from common.settings import AGGREGATE_QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from celery import Celery

    from common.batch import Run, Shard
    from common.ledger import Ledger, Progress, WorkerBeat
    from common.packs import Claim
    from common.routes import Routes
    from common.store import ObjectStore

#: Messages of one command to Redis, and their bytes: no worker waits for long behind it, and rows come early.
PUBLISH_BATCH = 500
PUBLISH_BYTES = 1024 * 1024
#: Messages of the first command, so that workers begin; then twice as many, up to `PUBLISH_BATCH`.
PUBLISH_FIRST = 64

#: A longer line does not travel in its message, which crosses Redis three times and holds up what is behind it: from
#: here on fetching it is cheaper, and the window's lines take no more than this each (decision 11).
INLINE_BYTES = 16 * 1024

#: Nothing more is published while Redis uses more than this share of its memory: at its limit not even a lease could be
#: renewed.
SOFT_LIMIT = 0.7

#: A run asks for a feed after this share of the window was finished.
FEEDS_PER_WINDOW = 16


def feed_step(window: int) -> int:
    """After how many finished requests a worker asks for a feed."""
    return max(1, window // FEEDS_PER_WINDOW)


class Feeder:
    """Publishes the shards of one run, as the window allows. Calling `feed` too often is harmless."""

    def __init__(
        self,
        app: Celery,
        ledger: Ledger,
        store: ObjectStore,
        run: Run,
        *,
        window: int,
        routes: Routes,
        pack_size: int = 1,
    ) -> None:
        self._app = app
        self._ledger = ledger
        self._store = store
        self._run = run
        self._window = window
        self._routes = routes
        self._pack_size = pack_size

    def feed(self, enough: int | None = None) -> int:
        """Publish shards until `window` requests are published and not finished; returns how many shards.

        With `enough` no more shards once so many requests were published. Unfinished requests count, not open shards:
        one straggler keeps its shard open and must not starve engines.
        """
        batch_id, run = self._run.batch_id, self._run.number
        workers = [worker for worker in self._ledger.workers() if worker.engine and worker.state == "ready"]
        window = Window(workers, self._window, self._routes)
        packs = pack_sizes(workers, self._pack_size)
        began, published, requests = tracing.now(), 0, 0
        with _opened_outbox(self._app) as outbox:
            for shard in self._claimed(window, outbox):
                sent = _publish(outbox, self._store, self._run, shard, routes=self._routes, packs=packs)
                if not self._routes.single:
                    self._ledger.note_published(batch_id, run, sent)
                published += 1
                requests += shard.count
                if enough is not None and requests >= enough:
                    break
        if published:  # most looks of the watchdog find nothing to publish
            traced = self._run.traceparent
            tracing.joined(
                "feed", traced, since=began, batch_id=batch_id, run=run, shards=published, requests=requests
            ).end()
        return published

    def _claimed(self, window: Window, outbox: _Outbox) -> Iterator[Shard]:
        """The next shards, claimed for who takes them, until the window is full or nothing may be published.

        Where the run stands is looked at once for some hundred messages, not for each shard of a small file. What was
        seen may be old: then more has finished since, so it is looked at again before the window counts as full.
        """
        shards = self._run.shards
        progress, seen, new, first = self._look(), outbox.pushes, True, True
        while progress is not None:
            if progress.frontier >= len(shards):
                if first:
                    self._assemble_if_sealed()
                return
            shard = shards[progress.frontier]
            old = True
            if window.is_full(shard, progress):
                if new:
                    return
            elif self._ledger.claim_shard(self._run.batch_id, self._run.number, shard.number):
                progress, new, old = replace(progress, frontier=shard.number + 1), False, False
                # One that is sealed was done before Redis lost the run, and is known from its part.
                if not self._ledger.is_sealed(self._run.batch_id, self._run.number, shard.number):
                    first = False
                    yield shard
                    # With several queues, how many went to each of them fills the window.
                    old = outbox.pushes != seen or not self._routes.single
            if old:  # another feeder took it, for one
                progress, seen, new = self._look(), outbox.pushes, True

    def _look(self) -> Progress | None:
        """Where the run stands; None when nothing is to be published now."""
        progress = self._ledger.progress(self._run.batch_id, self._run.number)
        if progress is None or progress.closed:
            return None
        if progress.frontier < len(self._run.shards) and self._ledger.memory_share() > SOFT_LIMIT:
            return None  # the watchdog feeds when there is room
        return progress

    def _assemble_if_sealed(self) -> None:
        """Sealed and not assembled: whoever sealed the last shard died before it said so."""
        run = self._run
        if self._ledger.sealed_count(run.batch_id, run.number) >= len(run.shards):
            send(self._app, broker.ASSEMBLE_BATCH, batch_id=run.batch_id, run=run.number)


class Window:
    """How many requests of a run may be published and not finished.

    At least twice what the live workers take at once, however small the setting. With several queues each may have a
    window of its own, so that a model without workers does not starve the others; together they have as many windows as
    there are queues, since a shard is published whole.
    """

    def __init__(self, workers: Sequence[WorkerBeat], window: int, routes: Routes) -> None:
        """`workers` are those that are ready."""
        self._requests = max(window, 2 * sum(worker.inflight for worker in workers))
        # A single queue has but one window, and is not counted apart.
        self._live = set() if routes.single else {worker.queue for worker in workers} & set(routes.queues)
        self._most = self._requests * len(routes.queues)

    def is_full(self, next_shard: Shard, progress: Progress) -> bool:
        """Whether the next shard has to wait."""
        # `before` requests lie before the frontier, so so many were published.
        unfinished = next_shard.before - progress.finished
        if unfinished < self._requests:
            return False
        return unfinished >= self._most or all(progress.unfinished(queue) >= self._requests for queue in self._live)


def publish_shard(
    app: Celery, store: ObjectStore, run: Run, shard: Shard, *, routes: Routes, packs: Mapping[str, int] | None = None
) -> Counter[str]:
    """Send a shard's chord: its requests in order, and `seal_shard` when all of them returned their receipt.

    `packs` says how many requests a message may carry, by queue; 1 where it says nothing. Returns how many requests
    went to which queue.

    Raises kombu's `OperationalError` when the broker is away; messages that were pushed before stay.
    """
    with _opened_outbox(app) as outbox:
        return _publish(outbox, store, run, shard, routes=routes, packs=packs)


def _publish(
    outbox: _Outbox, store: ObjectStore, run: Run, shard: Shard, *, routes: Routes, packs: Mapping[str, int] | None
) -> Counter[str]:
    """`publish_shard`, but for the last messages, which leave with the outbox."""
    app, batch_id, number = outbox.app, run.batch_id, run.number
    group_id = _derived_id(batch_id, number, shard.number)
    body = app.signature(
        broker.SEAL_SHARD,
        kwargs={"batch_id": batch_id, "run": number, "shard": shard.number},
        options={
            "task_id": _derived_id(batch_id, number, shard.number, "seal"),
            "queue": AGGREGATE_QUEUE,
            "argsrepr": "-",
            "kwargsrepr": f"{batch_id}/{number}/{shard.number}",
        },
    )
    claims = _claims(store, run, shard, routes)
    messages: Iterable[tuple[str, int, list[Claim]]] = ((queue, index, [claim]) for queue, index, claim in claims)
    count = shard.count
    if packs and max(packs.values()) > 1:
        messages = list(pack(claims, packs))  # the chord's size comes first
        count = len(messages)
    app.backend.set_chord_size(group_id, count)

    def make(queue: str) -> RequestMessages:
        # Serialized once here instead of once per request.
        return RequestMessages(app, run, shard, queue=queue, group_id=group_id, body=dict(body))

    return _put_requests(
        outbox,
        make,
        (
            (queue, _derived_id(batch_id, number, shard.number, index), index, position, each)
            for position, (queue, index, each) in enumerate(messages)
        ),
    )


def republish(
    app: Celery, store: ObjectStore, run: Run, shard: Shard, indexes: Collection[int], *, routes: Routes
) -> None:
    """Send requests of a shard again, as plain tasks with fresh ids and no chord.

    One in each message, for what got lost may be one that kills. Celery's chord keeps done marks and sizes that would
    swallow a second publishing. Whoever records the shard's last row sends `seal_shard`; with no index missing it is
    sent at once.
    """
    if not indexes:
        send(app, broker.SEAL_SHARD, batch_id=run.batch_id, run=run.number, shard=shard.number)
        return
    with _opened_outbox(app) as outbox:
        _put_requests(
            outbox,
            lambda queue: RequestMessages(app, run, shard, queue=queue),
            (
                (queue, str(uuid.uuid4()), index, 0, [claim])
                for queue, index, claim in _claims(store, run, shard, routes)
                if index in indexes
            ),
        )


class _Outbox:
    """Messages on their way to their queues, a few hundred to a command, of one shard or of several small ones.

    Made by `_opened_outbox`. A push that fails raises kombu's `OperationalError`; its messages are not pushed again.
    """

    def __init__(self, app: Celery, opened: contextlib.ExitStack) -> None:
        self.app = app
        #: How often something was pushed.
        self.pushes = 0
        self._waiting: dict[str, list[bytes]] = {}
        self._count = self._bytes = 0
        self._enough = min(PUBLISH_FIRST, PUBLISH_BATCH)
        self._opened = opened

    @cached_property
    def _producer(self) -> Any:
        """From the first message on: most looks of the watchdog find nothing to publish."""
        return self._opened.enter_context(self.app.producer_pool.acquire(block=True))

    def declare(self, queue: str) -> None:
        """Declare a queue that messages will be put for."""
        maybe_declare(self.app.amqp.queues[queue], self._producer.channel)

    def put(self, queue: str, message: bytes) -> None:
        """Add a message, and push all that waits if it is enough."""
        self._waiting.setdefault(queue, []).append(message)
        self._count, self._bytes = self._count + 1, self._bytes + len(message)
        if self._count >= self._enough or self._bytes >= PUBLISH_BYTES:
            self._enough = min(2 * self._enough, PUBLISH_BATCH)
            self.push()

    def push(self) -> None:
        """Push all that waits."""
        waiting, self._waiting = self._waiting, {}
        self._count = self._bytes = 0
        for queue, together in waiting.items():
            self._producer.channel.push(queue, together)
        self.pushes += 1


@contextlib.contextmanager
def _opened_outbox(app: Celery) -> Iterator[_Outbox]:
    """An outbox. Leaving it pushes what waits, also when a later shard could not be read."""
    with contextlib.ExitStack() as opened:
        outbox = _Outbox(app, opened)
        try:
            yield outbox
        finally:
            outbox.push()


def _put_requests(
    outbox: _Outbox,
    make: Callable[[str], RequestMessages],
    messages: Iterable[tuple[str, str, int, int, list[Claim]]],
) -> Counter[str]:
    """Put messages into the outbox, in order: queue, task id, first index, position, and requests, each.

    `make` makes a queue's messages. Returns how many requests go to which queue. Raises kombu's `OperationalError`.
    """
    sent: Counter[str] = Counter()
    templates: dict[str, RequestMessages] = {}
    for queue, task_id, index, position, claims in messages:
        if queue not in templates:
            outbox.declare(queue)
            templates[queue] = make(queue)
        outbox.put(queue, templates[queue].fill(task_id, index, position, claims))
        sent[queue] += len(claims)
    return sent


def shard_queues(store: ObjectStore, run: Run, shard: Shard, routes: Routes) -> dict[int, str]:
    """The queue of each request of a shard, by index. Reads every line of it."""
    return {index: routes.queue_of_line(line) for index, line in shard_lines(store, run, shard)}


def _claims(store: ObjectStore, run: Run, shard: Shard, routes: Routes) -> Iterator[tuple[str, int, Claim]]:
    """Queue and index of each request, and what its message carries: its line, or where a large one lies."""
    for index, offset, line in _raw_lines(store, run, shard):
        inline = len(line) <= INLINE_BYTES
        text = line.decode("utf-8") if inline or not routes.single else ""
        queue = routes.default if routes.single else routes.queue_of_line(text)
        yield queue, index, text if inline else (shard.source, offset, len(line))


def shard_lines(store: ObjectStore, run: Run, shard: Shard) -> Iterator[tuple[int, str]]:
    """The index and the line (no line end) of each request of a shard, in order."""
    for index, _, line in _raw_lines(store, run, shard):
        yield index, line.decode("utf-8")


def _raw_lines(store: ObjectStore, run: Run, shard: Shard) -> Iterator[tuple[int, int, bytes]]:
    """Of each request of a shard, in order: its index, where its line lies in the input shard, and the line."""
    offset = 0
    wanted = shard.indexes if isinstance(shard.indexes, range) else frozenset(shard.indexes)
    with store.open(layout.shard_input(run.batch_id, shard.source)) as file:
        for index, raw in enumerate(file, start=shard.first):
            if index in wanted:
                yield index, offset, raw.rstrip(b"\n")
            offset += len(raw)


def _derived_id(*parts: object) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, ":".join(map(str, parts))))


def send(app: Celery, task: str, **kwargs: object) -> None:
    """Send one of the aggregator's tasks; `kwargs` are ids and numbers only."""
    app.send_task(
        task,
        kwargs=kwargs,
        queue=AGGREGATE_QUEUE,
        ignore_result=True,
        argsrepr="-",
        kwargsrepr="/".join(map(str, kwargs.values())),
    )
