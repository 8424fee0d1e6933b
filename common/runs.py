"""A run of a batch, as the store knows it: the manifest, the parts, the end, and the way back into Redis.

Owns: reading and writing the records of a batch directory, `restore`, and the state of a batch.
Must not know: Celery, engines, the command line.
On failure: raises what the store and Redis raise. The store is the truth; Redis only holds what is in flight, so
everything here can be called at any time, by anybody, twice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pydantic_core import from_json

from common import layout
from common.batch import BatchStatus, Manifest, Record, RequestCounts, RunEnd, RunEnding, Usage, row_failed
from common.dispatch import feed_step
from common.errors import NoSuchBatchError, ObjectMissingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.ledger import Ledger
    from common.store import ObjectStore

#: The run that a submit makes.
FIRST_RUN = 1

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


def read_end(store: ObjectStore, batch_id: str, run: int = FIRST_RUN) -> RunEnd | None:
    """How the run ended, or None while it is open."""
    return _read(store, layout.end(batch_id, run), RunEnd)


def write_end(store: ObjectStore, batch_id: str, end: RunEnd, run: int = FIRST_RUN) -> RunEnd:
    """Close the run; returns the end that won, which may be an earlier one."""
    return _create(store, layout.end(batch_id, run), end)


def read_ending(store: ObjectStore, batch_id: str, run: int = FIRST_RUN) -> RunEnding | None:
    """How the run is to end early, or None."""
    return _read(store, layout.ending(batch_id, run), RunEnding)


def write_ending(store: ObjectStore, batch_id: str, status: BatchStatus, run: int = FIRST_RUN) -> RunEnding:
    """Wish that the run ends early; returns the wish that won, which may be an earlier one."""
    return _create(store, layout.ending(batch_id, run), RunEnding(status=status, at=now()))


def sealed_shards(store: ObjectStore, batch_id: str, run: int = FIRST_RUN) -> set[int]:
    """Numbers of the shards whose part exists."""
    return {int(name.partition(".")[0]) for name in store.names(layout.parts(batch_id, run))}


@dataclass
class Tally:
    """Rows and tokens counted from result rows."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, rows: Iterable[bytes]) -> None:
        """Count rows, one line each."""
        for row in rows:
            if row_failed(row):
                self.failed += 1
                continue
            self.completed += 1
            usage = (from_json(row)["response"]["body"] or {}).get("usage") or {}
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0


def _tally(store: ObjectStore, batch_id: str, run: int, sealed: Iterable[int]) -> Tally:
    tally = Tally()
    for shard in sealed:
        with store.open(layout.part(batch_id, run, shard)) as rows:
            tally.add(rows)
    return tally


def restore(store: ObjectStore, ledger: Ledger, manifest: Manifest, *, run: int = FIRST_RUN, window: int) -> bool:
    """Write the run's head into Redis from what the store holds; False when Redis has it already.

    Counters are counted from the parts. Rows of shards that were not sealed are gone with Redis and run again.
    A run that ended comes back closed, so that late deliveries are answered.
    """
    batch_id = manifest.batch_id
    if ledger.progress(batch_id, run) is not None:
        return False
    end = read_end(store, batch_id, run)
    sealed = sealed_shards(store, batch_id, run)
    tally = _tally(store, batch_id, run, sealed)
    written = ledger.restore(
        batch_id,
        run,
        total=manifest.total,
        shards=len(manifest.counts),
        step=feed_step(window),
        sealed=sealed,
        finished=tally.completed + tally.failed,
        failed=tally.failed,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
    )
    if end is not None:
        ledger.close(batch_id, run, end.status.value)
    elif (ending := read_ending(store, batch_id, run)) is not None:
        ledger.set_ending(batch_id, run, ending.status.value)
    return written


def reconcile(store: ObjectStore, ledger: Ledger, manifest: Manifest, run: int = FIRST_RUN) -> None:
    """Tell the ledger of parts that it does not know as sealed: their sealer died between creating and noting them."""
    for shard in sealed_shards(store, manifest.batch_id, run) - ledger.sealed(manifest.batch_id, run):
        ledger.note_sealed(manifest.batch_id, run, shard)


@dataclass(frozen=True, slots=True)
class BatchState:
    """Where a batch stands. `known` is False when Redis does not know an open run: the counts are the parts' then."""

    manifest: Manifest
    status: BatchStatus
    counts: RequestCounts
    usage: Usage
    closed_at: int | None = None
    known: bool = True


def state_of(store: ObjectStore, ledger: Ledger | None, manifest: Manifest, run: int = FIRST_RUN) -> BatchState:
    """Where the batch stands, by its end if it has one, else by the ledger, else by its parts."""
    batch_id = manifest.batch_id
    end = read_end(store, batch_id, run)
    if end is not None:
        return BatchState(manifest, end.status, end.counts, end.usage, closed_at=end.at)
    progress = ledger.progress(batch_id, run) if ledger is not None else None
    if progress is None:
        tally = _tally(store, batch_id, run, sealed_shards(store, batch_id, run))
        counts = RequestCounts(total=manifest.total, completed=tally.completed, failed=tally.failed)
        usage = Usage(prompt_tokens=tally.prompt_tokens, completion_tokens=tally.completion_tokens)
        return BatchState(manifest, BatchStatus.IN_PROGRESS, counts, usage, known=False)
    if progress.ending == BatchStatus.CANCELLED.value:
        status = BatchStatus.CANCELLING
    elif progress.ending or progress.finished >= progress.total:
        status = BatchStatus.FINALIZING
    else:
        status = BatchStatus.IN_PROGRESS
    counts = RequestCounts(total=manifest.total, completed=progress.finished - progress.failed, failed=progress.failed)
    usage = Usage(prompt_tokens=progress.prompt_tokens, completion_tokens=progress.completion_tokens)
    return BatchState(manifest, status, counts, usage)


def now() -> int:
    """Unix seconds, as the OpenAI Batch object has them."""
    return int(time.time())
