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
from typing import TYPE_CHECKING

from kombu.common import maybe_declare

from common import broker, layout
from common.messages import RequestMessages
from common.settings import AGGREGATE_QUEUE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from celery import Celery

    from common.batch import Run, Shard
    from common.ledger import Ledger
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
        queue: str,
    ) -> None:
        self._app = app
        self._ledger = ledger
        self._store = store
        self._run = run
        self._window = window
        self._queue = queue

    def feed(self, at_most: int | None = None) -> int:
        """Publish shards until `window` requests are published and not finished; returns how many shards.

        Unfinished requests count, not open shards: one straggler keeps its shard open and must not starve engines.
        """
        batch_id, run, shards = self._run.batch_id, self._run.number, self._run.shards
        published = 0
        while published != at_most:
            progress = self._ledger.progress(batch_id, run)
            if progress is None or progress.closed:
                break
            shard = shards[progress.frontier] if progress.frontier < len(shards) else None
            # `before` requests lie before the frontier, so so many were published.
            if shard is None or shard.before - progress.finished >= self._window:
                if not published:
                    self._assemble_if_sealed()
                break
            if self._ledger.memory_share() > SOFT_LIMIT:
                break  # the watchdog feeds when there is room
            if not self._ledger.claim_shard(batch_id, run, shard.number):
                continue  # another feeder took it
            if self._ledger.is_sealed(batch_id, run, shard.number):
                continue  # done before Redis lost the run, and known from its part
            publish_shard(self._app, self._store, self._run, shard, queue=self._queue)
            published += 1
        return published

    def _assemble_if_sealed(self) -> None:
        """Sealed and not assembled: whoever sealed the last shard died before it said so."""
        run = self._run
        if self._ledger.sealed_count(run.batch_id, run.number) >= len(run.shards):
            send(self._app, broker.ASSEMBLE_BATCH, batch_id=run.batch_id, run=run.number)


def publish_shard(app: Celery, store: ObjectStore, run: Run, shard: Shard, *, queue: str) -> None:
    """Send a shard's chord: its requests in order, and `seal_shard` when all of them returned their receipt.

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
    # Serialized once here instead of once per request.
    messages = RequestMessages(app, run, shard, queue=queue, group_id=group_id, body=dict(body))
    app.backend.set_chord_size(group_id, shard.count)
    _send_requests(
        app,
        queue,
        (
            messages.fill(_derived_id(batch_id, number, shard.number, index), index, position, line)
            for position, (index, line) in enumerate(_claims(store, run, shard))
        ),
    )


def republish(app: Celery, store: ObjectStore, run: Run, shard: Shard, indexes: Collection[int], *, queue: str) -> None:
    """Send requests of a shard again, as plain tasks with fresh ids and no chord.

    Celery's chord keeps done marks and sizes that would swallow a second publishing. Whoever records the shard's last
    row sends `seal_shard`; with no index missing it is sent at once.
    """
    if not indexes:
        send(app, broker.SEAL_SHARD, batch_id=run.batch_id, run=run.number, shard=shard.number)
        return
    messages = RequestMessages(app, run, shard, queue=queue)
    lines = (each for each in _claims(store, run, shard) if each[0] in indexes)
    _send_requests(app, queue, (messages.fill(str(uuid.uuid4()), index, 0, line) for index, line in lines))


def _send_requests(app: Celery, queue: str, messages: Iterator[bytes]) -> None:
    """Send messages in order, a few hundred at a time. Raises kombu's `OperationalError`."""
    with app.producer_pool.acquire(block=True) as producer:
        maybe_declare(app.amqp.queues[queue], producer.channel)
        waiting: list[bytes] = []
        size = 0
        for message in messages:
            waiting.append(message)
            size += len(message)
            if len(waiting) >= PUBLISH_BATCH or size >= PUBLISH_BYTES:
                producer.channel.push(queue, waiting)
                waiting, size = [], 0
        if waiting:
            producer.channel.push(queue, waiting)


def _claims(store: ObjectStore, run: Run, shard: Shard) -> Iterator[tuple[int, str | tuple[int, int, int]]]:
    """The index of each request, and what its message carries: its line, or where a large one lies (source, bytes)."""
    offset = 0
    wanted = shard.indexes if isinstance(shard.indexes, range) else frozenset(shard.indexes)
    with store.open(layout.shard_input(run.batch_id, shard.source)) as file:
        for index, raw in enumerate(file, start=shard.first):
            line = raw.rstrip(b"\n")
            if index in wanted:
                inline = len(line) <= INLINE_BYTES
                yield index, line.decode("utf-8") if inline else (shard.source, offset, len(line))
            offset += len(raw)


def shard_lines(store: ObjectStore, run: Run, shard: Shard) -> Iterator[tuple[int, str]]:
    """The index and the line (no line end) of each request of a shard, in order."""
    wanted = shard.indexes if isinstance(shard.indexes, range) else frozenset(shard.indexes)
    with store.open(layout.shard_input(run.batch_id, shard.source)) as file:
        for index, raw in enumerate(file, start=shard.first):
            if index in wanted:
                yield index, raw.rstrip(b"\n").decode("utf-8")


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
