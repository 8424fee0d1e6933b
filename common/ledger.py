"""The ledger: the Redis record of a run in flight.

Owns: result rows by index (the first one wins), running marks, engine calls, progress counters, the frontier of
published shards, and the workers' heartbeats. `common.keys` has the table of keys.
Must not know: Celery, stores, engines.
On failure: every method raises redis-py's own errors; nothing here retries. A run without a head is *unknown*
(`restore` was not called, or Redis lost it): scripts then write nothing, and the caller keeps what it has.

A request's index in the ledger:

    (nothing) ──begin──▶ marked ──record──▶ recorded ──seal_shard──▶ in the part, dropped here
                            │ record of somebody else's row: the second row is dropped
                            │ spilled: the row is in the batch directory, a mark (`SPILLED`) stands for it here
    begin on a recorded index, a sealed shard, a closed or ending run: DONE, no engine call
    begin on an index that a live worker has marked: PARKED
    begin on an index whose marker is dead: a strike, then as if unmarked
    begin on an index with strikes that the quarantine has not admitted: SUSPECT; with too many: POISON
    release (a drain): marked ──▶ (nothing), no strike

Every step is one Lua script, so a crash leaves the state before or after it, never between.
Counters serve pacing and progress; what a batch finally holds is counted from its parts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from common import keys, scripts
from common.scripts import Script

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import redis

#: Strikes from which a request is a suspect and needs the quarantine's word to begin.
SUSPECT_STRIKES = 2

#: Rows that are read in one slice while a shard is sealed: at most so many, and about so many bytes.
SLICE = 500
SLICE_BYTES = 8 * 1024 * 1024

#: Fields of a head that count by model or queue: tokens of recorded rows; requests published, and finished.
PROMPT, COMPLETION, PUBLISHED, FINISHED = "prompt:", "completion:", "published:", "finished:"

#: Value of an index whose row lies in the batch directory: it counts as recorded.
SPILLED = b""

#: How a run is closed whose batch the store no longer has. Should it come back, `restore` replaces such a head.
PURGED = "purged"


class Verdict(Enum):
    """What `begin` and `record` answer."""

    #: `begin`: a live worker runs it, this one perhaps. Ask again later.
    PARKED = "parked"
    #: `begin`: it has cost some workers their life. Nothing was marked: ask again once the quarantine admits it.
    SUSPECT = "suspect"
    #: `begin`: it has cost too many workers their life. Record a failure.
    POISON = "poison"

    #: No head: Redis does not know the run. Nothing was written.
    UNKNOWN = "unknown"
    #: `begin`: recorded, sealed or closed; answer with the receipt. `record`: somebody was first; the row is dropped.
    DONE = "done"
    #: `begin`: marked, run it. `record`: the row is now *the* row.
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer to `begin`. `calls` counts earlier engine calls of this request, `strikes` the deaths while it ran."""

    verdict: Verdict
    calls: int = 0
    strikes: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """Answer to `record`. `full`: every row of the shard is there. `feed`: the window wants more shards."""

    verdict: Verdict
    full: bool = False
    feed: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """Where a request's row belongs. `index` counts the batch's requests from 0."""

    batch_id: str
    run: int
    shard: int
    index: int


class Claim(NamedTuple):
    """A delivery that wants to begin. `mark` is "worker/delivery", `admitted` the strikes that the quarantine knows."""

    at: Address
    mark: str
    admitted: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row to record. `shard_count` is the number of requests of its shard, `queue` the one that it was taken from."""

    at: Address
    row: bytes
    failed: bool
    prompt_tokens: int
    completion_tokens: int
    shard_count: int
    model: str = ""
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run in flight. `frontier` is the number of the next shard to publish, `finished` counts recorded rows."""

    total: int
    shards: int
    frontier: int
    finished: int
    failed: int
    closed: str
    ending: str = ""
    #: Model -> (prompt tokens, completion tokens).
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Queue -> requests that were published to it, and requests that were finished from it, since `restore`.
    published: dict[str, int] = field(default_factory=dict)
    finished_from: dict[str, int] = field(default_factory=dict)
    #: False when rows were finished whose tokens are not counted here.
    exact: bool = True

    def unfinished(self, queue: str) -> int:
        """Requests of a queue that were published and are not finished."""
        return self.published.get(queue, 0) - self.finished_from.get(queue, 0)


def new_worker_id() -> str:
    """An id for this process, new at each start: a worker that was started again is another one."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """A worker's heartbeat. `state` is "loading" or "ready", `inflight` its capacity in requests.

    An aggregator also says its store: the URI for people, and the id that tells it from every other one.
    """

    worker_id: str
    state: str
    engine: str
    models: tuple[str, ...]
    queue: str
    inflight: int
    store: str = ""
    store_id: str = ""
    #: What its store last refused it, if that was just now: a full disk perhaps.
    trouble: str = ""
    #: Seconds of its engine's time that a request took lately that does not generate; 0 while none was measured.
    request_s: float = 0.0


class Ledger:
    """The ledger over one Redis client (`decode_responses` off). Safe to use from several threads."""

    def __init__(self, client: redis.Redis, *, max_deliveries: int = 3) -> None:
        """`max_deliveries` is the number of deaths that a request may cause before the next one fails it."""
        self._client = client
        self._max_deliveries = max_deliveries
        self._begin = Script(client, scripts.BEGIN)
        self._release = Script(client, scripts.RELEASE)
        self._beat = Script(client, scripts.BEAT)
        self._watch = Script(client, scripts.WATCH)
        self._record = Script(client, scripts.RECORD)
        self._restore = Script(client, scripts.RESTORE)
        self._claim = Script(client, scripts.CLAIM)
        self._mark_sealed = Script(client, scripts.MARK_SEALED)
        self._mark_spilled = Script(client, scripts.MARK_SPILLED)
        self._unspill = Script(client, scripts.UNSPILL)
        self._set_ending = Script(client, scripts.SET_ENDING)
        self._close = Script(client, scripts.CLOSE)
        self._keep_open = Script(client, scripts.KEEP_OPEN)

    # -- one request ------------------------------------------------------------------------------------------------

    def begin(self, claims: Sequence[Claim]) -> list[Begun]:
        """Start requests: one answer per claim, in one round trip."""
        answers = self._begin.call_many(
            [
                (
                    (
                        keys.head(at.batch_id, at.run),
                        keys.sealed(at.batch_id, at.run),
                        keys.rows(at.batch_id, at.run, at.shard),
                        keys.marks(at.batch_id, at.run, at.shard),
                        keys.calls(at.batch_id, at.run, at.shard),
                        keys.strikes(at.batch_id, at.run, at.shard),
                    ),
                    (at.shard, at.index, mark, keys.WORKER_PREFIX, self._max_deliveries, admitted, SUSPECT_STRIKES),
                )
                for at, mark, admitted in claims
            ]
        )
        return [Begun(Verdict(verdict.decode()), int(calls), int(strikes)) for verdict, calls, strikes in answers]

    def release(self, at: Address, mark: str) -> None:
        """Take our mark back: the delivery was handed back, which is no strike. Somebody else's mark stays."""
        self._release.call((keys.marks(at.batch_id, at.run, at.shard),), (at.index, mark))

    def record(self, rows: Sequence[Row]) -> list[Recorded]:
        """Record rows: one answer per row, in one round trip. The first row of an index wins."""
        answers = self._record.call_many(
            [
                (
                    (
                        keys.head(row.at.batch_id, row.at.run),
                        keys.sealed(row.at.batch_id, row.at.run),
                        keys.rows(row.at.batch_id, row.at.run, row.at.shard),
                        keys.marks(row.at.batch_id, row.at.run, row.at.shard),
                    ),
                    (
                        row.at.shard,
                        row.at.index,
                        row.row,
                        int(row.failed),
                        row.prompt_tokens,
                        row.completion_tokens,
                        row.shard_count,
                        row.model,
                        row.queue,
                    ),
                )
                for row in rows
            ]
        )
        return [Recorded(Verdict(verdict.decode()), bool(full), bool(feed)) for verdict, full, feed in answers]

    def lend_line(self, at: Address, line: bytes) -> None:
        """Lend a large line, for a minute, to the worker that asked for it."""
        self._client.set(keys.line(at.batch_id, at.run, at.index), line, ex=keys.LOAN_TTL_S)

    def borrow_line(self, at: Address) -> bytes | None:
        """A line that was lent, or None. The loan ends with this."""
        line: Any = self._client.getdel(keys.line(at.batch_id, at.run, at.index))
        return line  # type: ignore[no-any-return]  # redis-py's types are those of its asyncio client too

    # -- a run ------------------------------------------------------------------------------------------------------

    def restore(
        self,
        batch_id: str,
        run: int,
        *,
        total: int,
        shards: int,
        step: int,
        sealed: Iterable[int] = (),
        spilled: Mapping[int, Sequence[int]] | None = None,
        finished: int = 0,
        failed: int = 0,
        tokens: Mapping[str, tuple[int, int]] | None = None,
        fail_after: int | None = None,
        closed: str = "",
        store: str = "",
    ) -> bool:
        """Write the head of a run from what the store knows. A head that exists stays, but for `bury`'s; False then.

        `step` is the number of finished requests after which a worker asks for a feed, `spilled` the indexes by shard
        whose rows lie in the batch directory, `closed` the status of a run that has ended, `store` the id of the store
        that knows it. Spilled ones are noted first: once there is a head they may be begun.
        """
        if spilled:
            with self._client.pipeline(transaction=False) as pipe:
                for shard, indexes in spilled.items():
                    for index in indexes:
                        pipe.hsetnx(keys.rows(batch_id, run, shard), str(index), SPILLED)
                pipe.execute()
        counted = [
            each
            for model, (prompt, completion) in (tokens or {}).items()
            for each in (f"{PROMPT}{model}", prompt, f"{COMPLETION}{model}", completion)
        ]
        args = (
            total,
            shards,
            step,
            finished,
            failed,
            fail_after or "",
            closed,
            keys.CLOSED_TTL_S,
            store,
            len(counted),
            *counted,
            *sealed,
        )
        return bool(self._restore.call((keys.head(batch_id, run), keys.sealed(batch_id, run)), args))

    def bury(self, batch_id: str, run: int) -> None:
        """Answer deliveries of a run that nobody knows any more as done, for a day. A head that exists stays."""
        self.restore(batch_id, run, total=0, shards=0, step=1, closed=PURGED)

    def note_published(self, batch_id: str, run: int, requests: Mapping[str, int]) -> None:
        """Count requests that were published, by queue."""
        with self._client.pipeline(transaction=False) as pipe:
            for queue, count in requests.items():
                pipe.hincrby(keys.head(batch_id, run), f"{PUBLISHED}{queue}", count)
            pipe.execute()

    def progress(self, batch_id: str, run: int) -> Progress | None:
        """Where a run stands, or None when Redis does not know it."""
        head: Any = self._client.hgetall(keys.head(batch_id, run))
        return parse_head(head) if head else None

    def claim_shard(self, batch_id: str, run: int, shard: int) -> bool:
        """Move the frontier past `shard` if it stands there. Who gets True publishes the shard; nobody else does."""
        return bool(self._claim.call((keys.head(batch_id, run),), (shard,)))

    def rows(self, batch_id: str, run: int, shard: int, indexes: Sequence[int]) -> Iterator[bytes | None]:
        """The recorded rows of a shard in order, read in slices.

        None where a row is missing, `SPILLED` where it lies in the batch directory.
        """
        key = keys.rows(batch_id, run, shard)
        for start in range(0, len(indexes), SLICE):
            fields = [str(index) for index in indexes[start : start + SLICE]]
            for some in self._slices(key, fields):
                values: Any = self._client.hmget(key, some)
                yield from values

    def _slices(self, key: str, fields: list[str]) -> Iterator[list[str]]:
        """The fields in slices of about `SLICE_BYTES` of rows: rows may be large."""
        some: list[str] = []
        held = 0
        for name, size in zip(fields, self._sizes(key, fields), strict=True):
            if some and held + size > SLICE_BYTES:
                yield some
                some, held = [], 0
            some.append(name)
            held += size
        if some:
            yield some

    def row_sizes(self, batch_id: str, run: int, shard: int, indexes: Sequence[int]) -> list[int]:
        """The bytes of each row of a shard that lies in Redis."""
        sizes = self._sizes(keys.rows(batch_id, run, shard), map(str, indexes))
        return [size for size in sizes if size]

    def _sizes(self, key: str, fields: Iterable[str]) -> list[int]:
        """The bytes of each field's value; 0 where there is none."""
        with self._client.pipeline(transaction=False) as pipe:
            for name in fields:
                pipe.hstrlen(key, name)
            sizes: list[int] = pipe.execute()
        return sizes

    def mark_spilled(self, batch_id: str, run: int, shard: int, digests: Sequence[tuple[int, str]]) -> int:
        """Let go of rows that lie in the batch directory: each is given by its index and the SHA-1 of its bytes.

        A row that is not that one any more stays. Returns how many were let go.
        """
        arguments = [each for pair in digests for each in pair]
        return int(self._mark_spilled.call((keys.rows(batch_id, run, shard),), arguments))

    def unspill(self, batch_id: str, run: int, shard: int, index: int) -> None:
        """Forget a row that should lie in the batch directory and does not: its request is to be run again."""
        self._unspill.call((keys.rows(batch_id, run, shard),), (index,))

    def memory_share(self) -> float:
        """The share of its memory limit that Redis uses; 0 without a limit."""
        info: Any = self._client.info("memory")
        limit = int(info.get("maxmemory") or 0)
        return int(info["used_memory"]) / limit if limit else 0.0

    def mark_sealed(self, batch_id: str, run: int, shard: int, count: int) -> None:
        """Note that the shard's part exists. From now on its rows are dropped and its deliveries answered as done.

        Of its `count` rows those that Redis does not have, since it was emptied after they were sealed, count as
        finished from now on; their tokens are not known here then (`Progress.exact`).
        """
        self._mark_sealed.call(
            (keys.head(batch_id, run), keys.sealed(batch_id, run), keys.rows(batch_id, run, shard)), (shard, count)
        )

    def is_sealed(self, batch_id: str, run: int, shard: int) -> bool:
        """Whether the ledger knows the shard as sealed."""
        return bool(self._client.sismember(keys.sealed(batch_id, run), str(shard)))

    def sealed(self, batch_id: str, run: int) -> set[int]:
        """Numbers of the shards that the ledger knows as sealed."""
        members: Any = self._client.smembers(keys.sealed(batch_id, run))
        return {int(member) for member in members}

    def sealed_count(self, batch_id: str, run: int) -> int:
        """How many shards the ledger knows as sealed."""
        return int(self._client.scard(keys.sealed(batch_id, run)))

    def drop_shard(self, batch_id: str, run: int, shard: int) -> None:
        """Delete the rows of a sealed shard. Always the last step: part created, marked sealed, then this."""
        self._client.unlink(
            keys.rows(batch_id, run, shard),
            keys.marks(batch_id, run, shard),
            keys.calls(batch_id, run, shard),
            keys.strikes(batch_id, run, shard),
        )

    def note_sealed(self, batch_id: str, run: int, shard: int, count: int) -> None:
        """What follows the creation of a part, in this order: mark its shard as sealed, drop its rows."""
        self.mark_sealed(batch_id, run, shard, count)
        self.drop_shard(batch_id, run, shard)

    def set_ending(self, batch_id: str, run: int, ending: str) -> None:
        """Let the run end before it is complete ("cancelled", "expired"): nothing of it is begun any more."""
        self._set_ending.call((keys.head(batch_id, run),), (ending,))

    def endings(self, runs: Sequence[tuple[str, int]]) -> list[str]:
        """For each (batch id, run) how it is ending, "" for not at all, in one round trip."""
        with self._client.pipeline(transaction=False) as pipe:
            for batch_id, run in runs:
                pipe.hget(keys.head(batch_id, run), "ending")
            return [(ending or b"").decode() for ending in pipe.execute()]

    def close(self, batch_id: str, run: int, status: str) -> None:
        """Close the run: deliveries are answered as done, and what is left expires."""
        prefixes = [key(batch_id, run, 0)[:-1] for key in (keys.rows, keys.marks, keys.calls, keys.strikes)]
        self._close.call((keys.head(batch_id, run), keys.sealed(batch_id, run)), (status, keys.CLOSED_TTL_S, *prefixes))
        self.forget_reopened(batch_id, run)

    def note_reopened(self, batch_id: str, run: int) -> None:
        """Tell the watchdog, who looks at closed batches only now and then, of a run after the first."""
        self._client.sadd(keys.REOPENED, f"{batch_id}/{run}")

    def forget_reopened(self, batch_id: str, run: int) -> None:
        """Take a later run's announcement back: it has ended."""
        self._client.srem(keys.REOPENED, f"{batch_id}/{run}")

    def reopened(self) -> set[str]:
        """Batches with an open run after the first, by what was noted."""
        members: Any = self._client.smembers(keys.REOPENED)
        return {member.decode().partition("/")[0] for member in members}

    def missing(self, batch_id: str, run: int, shard: int, indexes: Sequence[int]) -> set[int]:
        """Indexes of an unsealed shard that are not recorded. Asks for the rows' names alone: rows may be large."""
        recorded: Any = self._client.hkeys(keys.rows(batch_id, run, shard))
        return set(indexes).difference(map(int, recorded))

    def running(self, batch_id: str, run: int, shard: int) -> set[int]:
        """Indexes of a shard that live workers have marked."""
        marks: Any = self._client.hgetall(keys.marks(batch_id, run, shard))
        if not marks:
            return set()
        owners = {mark.decode().rpartition("/")[0] for mark in marks.values()}
        alive = {owner for owner in owners if self._client.exists(keys.worker(owner))}
        return {int(index) for index, mark in marks.items() if mark.decode().rpartition("/")[0] in alive}

    def keep_open(self, batch_id: str, run: int, shards: Iterable[int]) -> None:
        """Take a TTL off the keys of these shards of an open run, whoever gave them one.

        Where its head has got one, as by `let_expire`, off those of all its shards: some that are not published yet may
        have marks of spilled rows. A run that has closed meanwhile keeps its TTLs.
        """
        prefixes = [key(batch_id, run, 0)[:-1] for key in (keys.rows, keys.marks, keys.calls, keys.strikes)]
        self._keep_open.call((keys.head(batch_id, run), keys.sealed(batch_id, run)), (*prefixes, *shards))

    def batches_of(self, store: str) -> set[str]:
        """Ids of the batches whose heads here all name the store with this id. One that names none is nobody's."""
        heads = list(self._client.scan_iter(match=keys.HEADS, count=1000))
        with self._client.pipeline(transaction=False) as pipe:
            for head in heads:
                pipe.hget(head, "store")
            named = pipe.execute()
        stores: dict[str, set[bytes | None]] = {}
        for head, name in zip(heads, named, strict=True):
            stores.setdefault(head.decode().split(":")[1], set()).add(name)
        return {batch_id for batch_id, names in stores.items() if names == {store.encode()}}

    def let_expire(self, batch_id: str) -> int:
        """Give those of the batch's keys a TTL that have none; returns how many. `keep_open` takes it back.

        At once: a head tells `keep_open` whether the others have one too.
        """
        found = list(self._client.scan_iter(match=keys.of_batch(batch_id), count=1000))
        with self._client.pipeline(transaction=False) as pipe:
            for key in found:
                pipe.ttl(key)
            lasting = [key for key, ttl_s in zip(found, pipe.execute(), strict=True) if ttl_s == -1]
        with self._client.pipeline(transaction=True) as pipe:
            for key in lasting:
                pipe.expire(key, keys.CLOSED_TTL_S)
            pipe.execute()
        return len(lasting)

    # -- workers ----------------------------------------------------------------------------------------------------

    def beat(self, beat: WorkerBeat, ttl_s: float) -> None:
        """Say that a worker lives, for `ttl_s` seconds."""
        value = json.dumps(
            {
                "state": beat.state,
                "engine": beat.engine,
                "models": list(beat.models),
                "queue": beat.queue,
                "inflight": beat.inflight,
                "store": beat.store,
                "store_id": beat.store_id,
                "trouble": beat.trouble,
                "request_s": beat.request_s,
            }
        )
        self._beat.call(
            (keys.worker(beat.worker_id), keys.WORKERS), (value, int(ttl_s * 1000), time.time(), beat.worker_id)
        )

    def forget_worker(self, worker_id: str) -> None:
        """Remove a worker's heartbeat when it stops."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.delete(keys.worker(worker_id))
            pipe.zrem(keys.WORKERS, worker_id)
            pipe.execute()

    def forget_all_workers(self) -> None:
        """Remove every heartbeat, on a broker whose workers are known to be gone."""
        members: Any = self._client.zrange(keys.WORKERS, 0, -1)
        self._client.delete(keys.WORKERS, *(keys.worker(member.decode()) for member in members))

    def pass_marker(self, marker: str) -> None:
        """Note that a marker message was consumed."""
        self._client.set(keys.marker(marker), "1", ex=keys.CLOSED_TTL_S)

    def marker_passed(self, marker: str) -> bool:
        """Whether a marker message was consumed."""
        return bool(self._client.exists(keys.marker(marker)))

    def queue_length(self, queue: str) -> int:
        """How many messages wait in a queue (kombu 5.7: a list of the queue's name)."""
        length: Any = self._client.llen(queue)
        return int(length)

    def backlog(self, queue: str, runs: Iterable[tuple[str, int]]) -> tuple[int, set[tuple[str, int]]]:
        """How many messages wait in a queue, and which of these (batch id, run) have requests that are not published.

        In one round trip. A run that ends, or that Redis does not know, has none.
        """
        asked = list(runs)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.llen(queue)
            for batch_id, run in asked:
                pipe.hmget(keys.head(batch_id, run), "frontier", "shards", "ending", "closed")
            waiting, *heads = pipe.execute()
        unpublished = set()
        for run_of, (frontier, shards, ending, closed) in zip(asked, heads, strict=True):
            if shards is not None and int(frontier) < int(shards) and not ending and not closed:
                unpublished.add(run_of)
        return int(waiting), unpublished

    def be_watchdog(self, who: str, ttl_s: float) -> bool:
        """Become, or stay, the one watchdog for `ttl_s` seconds."""
        return bool(self._watch.call((keys.WATCHDOG,), (who, int(ttl_s * 1000))))

    def recorded(self, batch_id: str, run: int, shard: int) -> int:
        """How many rows of an unsealed shard are recorded."""
        return int(self._client.hlen(keys.rows(batch_id, run, shard)))

    def workers(self) -> list[WorkerBeat]:
        """The live workers. Dead ones are dropped from the index on the way."""
        members: Any = self._client.zrange(keys.WORKERS, 0, -1)
        ids = [member.decode() for member in members]
        if not ids:
            return []
        values: Any = self._client.mget([keys.worker(worker_id) for worker_id in ids])
        dead = [worker_id for worker_id, value in zip(ids, values, strict=True) if value is None]
        if dead:
            self._client.zrem(keys.WORKERS, *dead)
        return parse_beats(zip(ids, values, strict=True))


def parse_head(head: Mapping[bytes, bytes]) -> Progress:
    """A head as it stands in Redis."""

    def number(field: bytes) -> int:
        return int(head.get(field, b"0"))

    return Progress(
        total=number(b"total"),
        shards=number(b"shards"),
        frontier=number(b"frontier"),
        finished=number(b"finished"),
        failed=number(b"failed"),
        exact=b"inexact" not in head,
        tokens=_pairs(head, PROMPT, COMPLETION),
        published=_numbers(head, PUBLISHED),
        finished_from=_numbers(head, FINISHED),
        closed=head.get(b"closed", b"").decode(),
        ending=head.get(b"ending", b"").decode(),
    )


def _numbers(head: Mapping[bytes, bytes], prefix: str) -> dict[str, int]:
    """The numbers of the fields with this prefix, by what follows it."""
    start = prefix.encode()
    return {field[len(start) :].decode(): int(value) for field, value in head.items() if field.startswith(start)}


def _pairs(head: Mapping[bytes, bytes], first: str, second: str) -> dict[str, tuple[int, int]]:
    ones, others = _numbers(head, first), _numbers(head, second)
    return {name: (ones.get(name, 0), others.get(name, 0)) for name in {**ones, **others}}


def parse_beats(found: Iterable[tuple[str, bytes | None]]) -> list[WorkerBeat]:
    """Heartbeats as they stand in Redis. One that cannot be read is nobody's: Redis is open to more than the fleet."""
    beats = []
    for worker_id, value in found:
        if value is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                beats.append(parse_beat(worker_id, value))
    return beats


def parse_beat(worker_id: str, value: bytes) -> WorkerBeat:
    """A heartbeat as it stands in Redis."""
    fields = json.loads(value)
    return WorkerBeat(
        worker_id=worker_id,
        state=fields["state"],
        engine=fields["engine"],
        models=tuple(fields["models"]),
        queue=fields["queue"],
        inflight=fields["inflight"],
        store=fields.get("store", ""),
        store_id=fields.get("store_id", ""),
        trouble=fields.get("trouble", ""),
        request_s=fields.get("request_s", 0.0),
    )
