"""Publishing: one shard as a Celery chord, and the feed that keeps the window full.

Owns: task ids, message arguments, the order of publishing, pacing.
Must not know: who calls it; the producer feeds first, the aggregator feeds on.
On failure: a shard whose publishing broke off is not published again here. Its frontier is past it, the ids that went
out are deterministic, and what is missing is for the watchdog (plain tasks with fresh ids) to publish.

    frontier ─▶ shard s: claimed (compare-and-set, one feeder wins) ─▶ chord size set ─▶ n messages ─▶ next shard

Rules that Celery 5.7 imposes (celery/backends/redis.py):
- The chord's size is set once, *before* the first message: set after the last part returned it would never fire, and
  setting it again would forget that the body was fired.
- Ids derive from batch, run, shard and index, so that a message that was sent twice counts once.
- Messages are made and sent by hand: `chord(generator)` keeps every signature and subscribes a channel for every
  request, and `send_task` serializes the chord's body, which is the same on all of them, once per request.
- The body's signature rides on every message, so it carries two numbers and an id.
"""

from __future__ import annotations

import uuid
from collections import Counter
from typing import TYPE_CHECKING

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

    def feed(self, at_most: int | None = None) -> int:
        """Publish shards until `window` requests are published and not finished; returns how many shards.

        Unfinished requests count, not open shards: one straggler keeps its shard open and must not starve engines.
        """
        batch_id, run, shards = self._run.batch_id, self._run.number, self._run.shards
        workers = [worker for worker in self._ledger.workers() if worker.engine and worker.state == "ready"]
        window = Window(workers, self._window, self._routes)
        packs = pack_sizes(workers, self._pack_size)
        began, published, requests = tracing.now(), 0, 0
        while published != at_most:
            progress = self._ledger.progress(batch_id, run)
            if progress is None or progress.closed:
                break
            shard = shards[progress.frontier] if progress.frontier < len(shards) else None
            if shard is None or window.is_full(shard, progress):
                if not published:
                    self._assemble_if_sealed()
                break
            if self._ledger.memory_share() > SOFT_LIMIT:
                break  # the watchdog feeds when there is room
            if not self._ledger.claim_shard(batch_id, run, shard.number):
                continue  # another feeder took it
            if self._ledger.is_sealed(batch_id, run, shard.number):
                continue  # done before Redis lost the run, and known from its part
            sent = publish_shard(self._app, self._store, self._run, shard, routes=self._routes, packs=packs)
            if not self._routes.single:
                self._ledger.note_published(batch_id, run, sent)
            published += 1
            requests += shard.count
        if published:  # most looks of the watchdog find nothing to publish
            traced = self._run.traceparent
            tracing.joined(
                "feed", traced, since=began, batch_id=batch_id, run=run, shards=published, requests=requests
            ).end()
        return published

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

    Raises kombu's `OperationalError` when the broker is away; messages that were flushed before stay.
    """
    batch_id, number = run.batch_id, run.number
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

    return _send_requests(
        app,
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
    _send_requests(
        app,
        lambda queue: RequestMessages(app, run, shard, queue=queue),
        (
            (queue, str(uuid.uuid4()), index, 0, [claim])
            for queue, index, claim in _claims(store, run, shard, routes)
            if index in indexes
        ),
    )


def _send_requests(
    app: Celery,
    make: Callable[[str], RequestMessages],
    messages: Iterable[tuple[str, str, int, int, list[Claim]]],
) -> Counter[str]:
    """Send messages in order, a few hundred at a time: queue, task id, first index, position, and requests, each.

    `make` makes a queue's messages. Returns how many requests went to which queue. Raises kombu's `OperationalError`.
    """
    sent: Counter[str] = Counter()
    templates: dict[str, RequestMessages] = {}
    waiting: dict[str, list[bytes]] = {}
    with app.producer_pool.acquire(block=True) as producer:

        def push() -> None:
            for queue, together in waiting.items():
                producer.channel.push(queue, together)
            waiting.clear()

        size = count = 0
        for queue, task_id, index, position, claims in messages:
            if queue not in templates:
                maybe_declare(app.amqp.queues[queue], producer.channel)
                templates[queue] = make(queue)
            message = templates[queue].fill(task_id, index, position, claims)
            waiting.setdefault(queue, []).append(message)
            sent[queue] += len(claims)
            count, size = count + 1, size + len(message)
            if count >= PUBLISH_BATCH or size >= PUBLISH_BYTES:
                push()
                size = count = 0
        push()
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
