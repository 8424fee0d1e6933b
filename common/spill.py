"""Spills: finished rows of a shard that stays open, moved from Redis into the batch directory.

Owns: writing and reading spill objects. Must not know: when to spill (`workers.watchdog`, `workers.aggregate`).
On failure: raises what the store and Redis raise. A spill object is created, never replaced; only then does Redis let
go of exactly the rows that it holds, so dying in between leaves rows in both, and either is right.

    row in Redis ─▶ spill object created ─▶ `SPILLED` in its place ─▶ in the part, with the shard's other rows

A line of a spill object is an index, a space, and the row. Indexes ascend within an object.
"""

from __future__ import annotations

import hashlib
import heapq
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING

from common import layout
from common.errors import ObjectMissingError
from common.ledger import SPILLED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.batch import Run, Shard
    from common.ledger import Ledger
    from common.store import ObjectStore

_NO_ROW = (-1, b"")

#: Rows, or bytes of rows, that are worth a spill object; and how many objects a shard may have.
LEAST_ROWS = 16
LEAST_BYTES = 1024 * 1024
MAX_SPILLS = 200

#: Rows that Redis is asked to let go of at once.
_SLICE = 500


def spill_shard(store: ObjectStore, ledger: Ledger, run: Run, shard: Shard) -> int:
    """Move the recorded rows of an open shard into the batch directory; returns how many left Redis.

    Nothing happens where few rows are new: objects must not pile up, they are all open when a shard is sealed. A spill
    that comes after the run has closed is removed again.
    """
    sizes = ledger.row_sizes(run.batch_id, run.number, shard.number, shard.indexes)
    if len(sizes) < LEAST_ROWS and sum(sizes) < LEAST_BYTES:
        return 0
    numbers = _numbers(store, run, shard.number)
    if len(numbers) >= MAX_SPILLS:
        return 0
    number = max(numbers, default=0) + 1
    digests: list[tuple[int, str]] = []
    try:
        with store.writing(layout.spill(run.batch_id, run.number, shard.number, number)) as out:
            rows = ledger.rows(run.batch_id, run.number, shard.number, shard.indexes)
            for index, row in zip(shard.indexes, rows, strict=True):
                if row is not None and row != SPILLED:
                    out.write(b"%d %s\n" % (index, row))
                    digests.append((index, hashlib.sha1(row, usedforsecurity=False).hexdigest()))
    except ObjectMissingError:
        return 0  # the folder was removed while it was written: the run has closed
    if not out.created:
        return 0  # somebody else spills this shard
    if store.exists(layout.end(run.batch_id, run.number)):
        # Whoever closed the run removed its spills after that, and may not have seen this one.
        store.remove(layout.spills(run.batch_id, run.number))
        return 0
    return sum(
        ledger.mark_spilled(run.batch_id, run.number, shard.number, digests[start : start + _SLICE])
        for start in range(0, len(digests), _SLICE)
    )


def shard_rows(store: ObjectStore, ledger: Ledger, run: Run, shard: Shard, *, forget: bool) -> Iterator[bytes | None]:
    """The rows of an unsealed shard in order, wherever they lie; None where a row is missing.

    With `forget` a row that should have been spilled and is not there is forgotten, so that its request is run again.
    """
    spilled = spilled_rows(store, run, shard.number)
    at, found = next(spilled, _NO_ROW)

    def look_again(index: int) -> tuple[int, bytes]:
        """The rows were spilled after the spills were listed: list them once more, up to this index."""
        nonlocal spilled
        spilled = spilled_rows(store, run, shard.number)
        return next((each for each in spilled if each[0] >= index), _NO_ROW)

    for index, row in zip(
        shard.indexes, ledger.rows(run.batch_id, run.number, shard.number, shard.indexes), strict=True
    ):
        while 0 <= at < index:
            at, found = next(spilled, _NO_ROW)
        if row == SPILLED and at != index:
            at, found = look_again(index)
        if row != SPILLED:
            yield row
        elif at == index:
            yield found
        else:
            if forget:
                ledger.unspill(run.batch_id, run.number, shard.number, index)
            yield None


def spilled_shards(store: ObjectStore, run: Run) -> set[int]:
    """Numbers of the shards that have spills."""
    return set(map(int, store.names(layout.spills(run.batch_id, run.number))))


def spilled_rows(store: ObjectStore, run: Run, shard: int) -> Iterator[tuple[int, bytes]]:
    """Index and row (no line end) of all that was spilled of a shard, ascending; the first spill of an index counts."""
    with ExitStack() as stack:
        streams = [
            _lines(stack.enter_context(store.open(layout.spill(run.batch_id, run.number, shard, number))), number)
            for number in sorted(_numbers(store, run, shard))
        ]
        last = -1
        for index, _, row in heapq.merge(*streams):
            if index != last:
                last = index
                yield index, row


def _numbers(store: ObjectStore, run: Run, shard: int) -> list[int]:
    names = store.names(layout.spills(run.batch_id, run.number, shard))
    return [int(name.partition(".")[0]) for name in names]


def _lines(file: IO[bytes], number: int) -> Iterator[tuple[int, int, bytes]]:
    for line in file:
        index, _, row = line.rstrip(b"\n").partition(b" ")
        yield int(index), number, row
