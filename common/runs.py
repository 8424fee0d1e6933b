"""A run of a batch, as the store knows it: the manifest, the parts, the end, and the way back into Redis.

Owns: reading and writing the records of a batch directory, its runs, `restore`, and the state of a batch.
Must not know: Celery, engines, the command line.
On failure: raises what the store and Redis raise. The store is the truth; Redis only holds what is in flight, so
everything here can be called at any time, by anybody, twice.

    run 1 (the file) ──closed──▶ run 2 (some of its requests) ──closed──▶ run 3 …

A batch is as its newest run is. A run starts after the one before it has closed, and rests on the output of that one.
A purge takes the place of the next run before it removes anything, so that a batch is run again or removed, never both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pydantic_core import from_json

from common import layout
from common.batch import (
    FIRST_RUN,
    BatchStatus,
    Manifest,
    Record,
    RequestCounts,
    Run,
    RunEnd,
    RunEnding,
    RunStart,
    Usage,
    counted_tokens,
    first_run,
    later_run,
    row_failed,
    spans_of,
)
from common.dispatch import feed_step
from common.errors import NoSuchBatchError, ObjectMissingError
from common.ledger import PURGED
from common.spill import spilled_rows, spilled_shards
from common.store import store_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from common.ledger import Ledger
    from common.store import ObjectStore

Kind = TypeVar("Kind", bound=Record)


def read_manifest(store: ObjectStore, batch_id: str) -> Manifest:
    """The batch's manifest. Raises `NoSuchBatchError`."""
    try:
        return Manifest.model_validate_json(store.read(layout.manifest(batch_id)))
    except ObjectMissingError:
        raise NoSuchBatchError(f"there is no batch {batch_id} in {store.uri}") from None


def _read(store: ObjectStore, name: str, kind: type[Kind]) -> Kind | None:
    try:
        return kind.model_validate_json(store.read(name))
    except ObjectMissingError:
        return None


def _create(store: ObjectStore, name: str, record: Kind) -> Kind:
    """Write a record unless there is one; returns the one that won."""
    with store.writing(name) as out:
        out.write(record.model_dump_json().encode())
    won = record if out.created else _read(store, name, type(record))
    assert won is not None
    return won


def read_run(store: ObjectStore, manifest: Manifest, number: int) -> Run:
    """A run of the batch by its number. Raises `NoSuchBatchError` when there is none."""
    if number == FIRST_RUN:
        return first_run(manifest)
    start = _read(store, layout.start(manifest.batch_id, number), RunStart)
    if start is None:
        raise NoSuchBatchError(f"there is no run {number} of {manifest.batch_id} in {store.uri}")
    return _later(store, manifest, number, start)


def _later(store: ObjectStore, manifest: Manifest, number: int, start: RunStart) -> Run:
    if start.purged:
        raise NoSuchBatchError(f"{manifest.batch_id} was purged from {store.uri}")
    return later_run(manifest, number, start)


def refuse_removed(store: ObjectStore, batch_id: str) -> None:
    """Raise `NoSuchBatchError` when the batch is gone. Cheap enough for whoever waits to ask every few seconds."""
    if not store.exists(layout.manifest(batch_id)):
        raise NoSuchBatchError(f"{batch_id} was removed from {store.uri}")


def newest_run(store: ObjectStore, manifest: Manifest) -> Run:
    """The run that says how the batch stands. Raises `NoSuchBatchError` when the batch is being purged."""
    # A folder without its record is a run that is being started, or whose start broke off.
    for number in sorted(map(int, store.names(layout.runs(manifest.batch_id))), reverse=True):
        if number != FIRST_RUN and (start := _read(store, layout.start(manifest.batch_id, number), RunStart)):
            return _later(store, manifest, number, start)
    return first_run(manifest)


def start_run(store: ObjectStore, before: Run, indexes: Iterable[int]) -> Run:
    """Start the run after `before`, which has closed, over ascending indexes of the batch.

    Of two that start it at once the first wins; the run that won is returned. Raises `NoSuchBatchError` when a purge
    was first.
    """
    number = before.number + 1
    start = RunStart(at=now(), spans=spans_of(indexes))
    run = _later(store, before.manifest, number, _create(store, layout.start(before.batch_id, number), start))
    try:
        # A purge that is through has removed its own record too, and the manifest before that.
        refuse_removed(store, before.batch_id)
    except NoSuchBatchError:
        store.remove(layout.batch(before.batch_id))
        raise
    return run


def start_purge(store: ObjectStore, closed: Run) -> bool:
    """Take the place of the run after `closed`, so that nobody starts it; False when somebody has."""
    start = RunStart(at=now(), spans=(), purged=True)
    return _create(store, layout.start(closed.batch_id, closed.number + 1), start).purged


def remove_batch(store: ObjectStore, batch_id: str) -> None:
    """Remove a batch directory. A removal that dies in the middle leaves no batch, since the manifest goes first."""
    store.remove(layout.manifest(batch_id))
    store.remove(layout.batch(batch_id))


def failed_indexes(store: ObjectStore, closed: Run, codes: Collection[str] | None = None) -> Iterator[int]:
    """Indexes of the failed rows in the output of a closed run, ascending; with `codes` only those of these codes."""
    with store.open(layout.output(closed.batch_id, closed.number)) as rows:
        for index, row in enumerate(rows):
            if row_failed(row) and (codes is None or failure_code(row) in codes):
                yield index


def failure_code(row: bytes) -> str:
    """The failure's code of a failed row."""
    code: str = from_json(row)["error"]["code"]
    return code


def read_end(store: ObjectStore, batch_id: str, run: int) -> RunEnd | None:
    """How the run ended, or None while it is open."""
    return _read(store, layout.end(batch_id, run), RunEnd)


def write_end(store: ObjectStore, batch_id: str, run: int, end: RunEnd) -> RunEnd:
    """Close the run; returns the end that won, which may be an earlier one."""
    return _create(store, layout.end(batch_id, run), end)


def read_ending(store: ObjectStore, batch_id: str, run: int) -> RunEnding | None:
    """How the run is to end early, or None."""
    return _read(store, layout.ending(batch_id, run), RunEnding)


def write_ending(store: ObjectStore, batch_id: str, run: int, status: BatchStatus) -> RunEnding:
    """Wish that the run ends early; returns the wish that won, which may be an earlier one."""
    return _create(store, layout.ending(batch_id, run), RunEnding(status=status, at=now()))


def sealed_shards(store: ObjectStore, batch_id: str, run: int) -> set[int]:
    """Numbers of the shards whose part exists."""
    return {int(name.partition(".")[0]) for name in store.names(layout.parts(batch_id, run))}


@dataclass
class Tally:
    """Rows and tokens counted from result rows."""

    completed: int = 0
    failed: int = 0
    #: Model -> (prompt tokens, completion tokens).
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, rows: Iterable[bytes]) -> None:
        """Count rows, one line each."""
        for row in rows:
            if row_failed(row):
                self.failed += 1
                continue
            self.completed += 1
            model, prompt, completion = tokens_of(row)
            if prompt or completion:
                had = self.tokens.get(model, (0, 0))
                self.tokens[model] = (had[0] + prompt, had[1] + completion)


def tokens_of(row: bytes) -> tuple[str, int, int]:
    """The model, and the prompt and completion tokens, that a row which succeeded counts itself."""
    body = from_json(row)["response"]["body"] or {}
    prompt, completion = counted_tokens(body.get("usage") or {})
    return body.get("model") or "", prompt, completion


def _tally(store: ObjectStore, batch_id: str, run: int, sealed: Iterable[int]) -> Tally:
    tally = Tally()
    for shard in sealed:
        with store.open(layout.part(batch_id, run, shard)) as rows:
            tally.add(rows)
    return tally


def restore(store: ObjectStore, ledger: Ledger, run: Run, *, window: int) -> bool:
    """Write the run's head into Redis from what the store holds; False when Redis has it already.

    Counters are counted from parts and spills. Rows that were in Redis alone are gone with it and run again.
    A run that ended comes back closed, so that late deliveries are answered. Raises `NoSuchBatchError` for a batch that
    was removed.
    """
    batch_id, number = run.batch_id, run.number
    progress = ledger.progress(batch_id, number)
    if progress is not None and progress.closed != PURGED:
        return False
    end = read_end(store, batch_id, number)
    if end is None:
        # The run may come from somebody's memory: of a batch that was purged it would be open for ever.
        refuse_removed(store, batch_id)
    sealed = sealed_shards(store, batch_id, number)
    tally = _tally(store, batch_id, number, sealed)
    spilled: dict[int, list[int]] = {}
    for shard in spilled_shards(store, run) - sealed:
        for index, row in spilled_rows(store, run, shard):
            spilled.setdefault(shard, []).append(index)
            tally.add((row,))
    written = ledger.restore(
        batch_id,
        number,
        total=run.total,
        shards=len(run.shards),
        step=feed_step(window),
        sealed=sealed,
        spilled=spilled,
        finished=tally.completed + tally.failed,
        failed=tally.failed,
        tokens=tally.tokens,
        fail_after=run.manifest.fail_after if number == FIRST_RUN else None,
        closed="" if end is None else end.status.value,
        store=store_id(store),
    )
    if end is not None:
        ledger.close(batch_id, number, end.status.value)
    elif (ending := read_ending(store, batch_id, number)) is not None:
        ledger.set_ending(batch_id, number, ending.status.value)
    return written


def reconcile(store: ObjectStore, ledger: Ledger, run: Run) -> None:
    """Tell the ledger of parts that it does not know as sealed: their sealer died between creating and noting them."""
    for shard in sealed_shards(store, run.batch_id, run.number) - ledger.sealed(run.batch_id, run.number):
        ledger.note_sealed(run.batch_id, run.number, shard, run.shards[shard].count)


@dataclass(frozen=True, slots=True)
class BatchState:
    """Where a batch stands, by its newest run.

    `known` is False when Redis does not know an open run: the counts are the parts' then.
    """

    run: Run
    status: BatchStatus
    counts: RequestCounts
    usage: Usage
    closed_at: int | None = None
    known: bool = True

    @property
    def manifest(self) -> Manifest:
        """What the batch is."""
        return self.run.manifest


def state_of(store: ObjectStore, ledger: Ledger | None, manifest: Manifest) -> BatchState:
    """Where the batch stands, by the newest run's end if it has one, else by the ledger, else by its parts."""
    return state_of_run(store, ledger, newest_run(store, manifest))


def state_of_run(store: ObjectStore, ledger: Ledger | None, run: Run) -> BatchState:
    """Where the batch stands with this run as its newest one."""
    end = read_end(store, run.batch_id, run.number)
    if end is not None:
        return BatchState(run, end.status, end.counts, end.usage, closed_at=end.at)
    progress = ledger.progress(run.batch_id, run.number) if ledger is not None else None
    status = BatchStatus.IN_PROGRESS
    if progress is None:
        tally = _tally(store, run.batch_id, run.number, sealed_shards(store, run.batch_id, run.number))
    else:
        tally = Tally(
            completed=progress.finished - progress.failed,
            failed=progress.failed,
            tokens=progress.tokens,
        )
        if progress.ending == BatchStatus.CANCELLED.value:
            status = BatchStatus.CANCELLING
        elif progress.ending or progress.finished >= progress.total:
            status = BatchStatus.FINALIZING
    counts, usage = _on_top(store, run, tally)
    return BatchState(run, status, counts, usage, known=progress is not None)


def _on_top(store: ObjectStore, run: Run, tally: Tally) -> tuple[RequestCounts, Usage]:
    """The batch's counts while a run is open: a later one replaces failed rows of the run before it."""
    counts, usage = RequestCounts(total=run.manifest.total), Usage()
    if run.number != FIRST_RUN and (before := read_end(store, run.batch_id, run.number - 1)) is not None:
        counts, usage = before.counts, before.usage
        counts = counts.model_copy(update={"failed": counts.failed - run.total})
    return (
        RequestCounts(
            total=counts.total, completed=counts.completed + tally.completed, failed=counts.failed + tally.failed
        ),
        usage.plus(Usage.of(tally.tokens)),
    )


def now() -> int:
    """Unix seconds, as the OpenAI Batch object has them."""
    return int(time.time())
