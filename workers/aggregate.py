"""The aggregator's work: seal shards, assemble the output, feed the window.

Owns: `Aggregator`. Must not know: Celery's tasks (`workers.tasks` calls it), engines.
On failure: everything here can run twice and die anywhere. Objects are created whole and first-wins; a shard's rows
leave Redis last. A row that is missing raises `HoleError` and nothing is written: a hole is never sealed.

    shard:  rows in the ledger ─▶ part created ─▶ marked sealed ─▶ rows dropped
    run:    all parts (a later run: over the output of the run before) ─▶ output, errors ─▶ end created ─▶ closed
    early:  wish created ─▶ nothing is begun any more ─▶ open shards sealed with failed rows ─▶ as above
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import chain
from typing import TYPE_CHECKING

from common import broker, layout, tracing
from common.batch import (
    FIRST_RUN,
    BatchStatus,
    RequestCounts,
    RunEnd,
    RunEnding,
    Usage,
    custom_id_of,
    failed_row,
    row_failed,
)
from common.dispatch import SOFT_LIMIT, Feeder, send, shard_lines
from common.errors import HoleError
from common.failures import Failure, FailureKind
from common.ledger import Row
from common.runs import (
    Tally,
    failure_code,
    now,
    read_end,
    read_ending,
    read_manifest,
    read_run,
    restore,
    sealed_shards,
    state_of_run,
    write_end,
    write_ending,
)
from common.spill import shard_rows, spill_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from celery import Celery

    from common.batch import Run, Shard
    from common.ledger import Address, Ledger
    from common.routes import Routes
    from common.store import ObjectStore

logger = logging.getLogger("fleet.aggregate")

#: What an early end makes of the requests that were not finished, and how it is said.
_ENDINGS = {
    BatchStatus.CANCELLED: FailureKind.CANCELLED,
    BatchStatus.EXPIRED: FailureKind.EXPIRED,
    BatchStatus.FAILED: FailureKind.CANCELLED,
}
_ENDED = {
    BatchStatus.CANCELLED: "was cancelled",
    BatchStatus.EXPIRED: "expired",
    BatchStatus.FAILED: "was ended, because too many requests had failed (--fail-after),",
}

#: Seconds between two times that room is made in Redis.
RELIEF_INTERVAL_S = 1.0

#: Runs that are kept in memory; they never change.
_RUNS = 64


class Aggregator:
    """Seals, assembles and feeds over one store and one ledger."""

    def __init__(
        self, app: Celery, store: ObjectStore, ledger: Ledger, *, window: int, routes: Routes, pack_size: int = 1
    ) -> None:
        self._app = app
        self._store = store
        self._ledger = ledger
        self._window = window
        self._routes = routes
        self._pack_size = pack_size
        self._runs: dict[tuple[str, int], Run] = {}
        self._relief = threading.Lock()
        self._relieved: dict[str, float] = {}

    def seal_shard(self, batch_id: str, number: int, shard_number: int) -> bool:
        """Write the shard's part and drop its rows. True when every shard of the run is sealed now.

        Raises `HoleError` while a row is missing.
        """
        run = self._run(batch_id, number)
        shard = run.shards[shard_number]
        if not self._store.exists(layout.part(batch_id, number, shard_number)):
            with tracing.joined(
                "seal", run.traceparent, batch_id=batch_id, run=number, shard=shard_number, requests=shard.count
            ):
                self._write_part(run, shard, self._rows(run, shard))
            logger.info("sealed shard %d of %s (%d rows)", shard_number, batch_id, shard.count)
        restore(self._store, self._ledger, run, window=self._window)
        self._ledger.note_sealed(batch_id, number, shard_number, shard.count)
        return self._ledger.sealed_count(batch_id, number) >= len(run.shards)

    def end_early(self, batch_id: str, number: int) -> RunEnd | None:
        """Close a run that is to end before it is complete: finished rows stay, the others become failed ones.

        Nothing of the run is begun any more, and what still runs finds its shard sealed. None when it is not to end.
        """
        run = self._run(batch_id, number)
        wish = read_ending(self._store, batch_id, number)
        if wish is None:
            return None
        restore(self._store, self._ledger, run, window=self._window)
        self._ledger.set_ending(batch_id, number, wish.status.value)
        failure = Failure(_ENDINGS[wish.status], f"the batch {_ENDED[wish.status]} before this request was finished")
        sealed = sealed_shards(self._store, batch_id, number)
        for shard in run.shards:
            if shard.number not in sealed:
                self._write_part(run, shard, self._rows_or_failures(run, shard, failure))
            self._ledger.note_sealed(batch_id, number, shard.number, shard.count)
        return self.assemble_batch(batch_id, number)

    def fail_request(self, at: Address) -> None:
        """Record a request that somebody revoked, as a failed row, and seal its shard if that was the last one."""
        run = self._run(at.batch_id, at.run)
        shard = run.shards[at.shard]
        line = next(line for index, line in shard_lines(self._store, run, shard) if index == at.index)
        row = failed_row(custom_id_of(line), Failure(FailureKind.CANCELLED, "the request was revoked"))
        restore(self._store, self._ledger, run, window=self._window)
        (recorded,) = self._ledger.record(
            [Row(at, row, failed=True, prompt_tokens=0, completion_tokens=0, shard_count=shard.count)]
        )
        if recorded.full:
            send(self._app, broker.SEAL_SHARD, batch_id=at.batch_id, run=at.run, shard=at.shard)

    def assemble_batch(self, batch_id: str, number: int) -> RunEnd | None:
        """Join the parts into the output and close the run; None while a part is missing."""
        run = self._run(batch_id, number)
        end = read_end(self._store, batch_id, number)
        if end is None:
            if sealed_shards(self._store, batch_id, number) != set(range(len(run.shards))):
                return None
            wish = read_ending(self._store, batch_id, number)
            with tracing.joined("assemble", run.traceparent, batch_id=batch_id, run=number) as span:
                ours = self._assemble(run, wish)
                end = write_end(self._store, batch_id, number, ours)
                span.set(status=end.status.value, requests=end.counts.total, failed=end.counts.failed)
            self._relieved.pop(batch_id, None)
            if end is ours:  # else somebody else was first, and said so
                logger.info("batch %s %s: %s", batch_id, end.status.value, end.counts.model_dump())
        # Each time: whoever wrote the end may have died before this.
        self._store.remove(layout.spills(batch_id, number))
        self._ledger.close(batch_id, number, end.status.value)
        return end

    def feed(self, batch_id: str, number: int) -> int:
        """Publish what the window allows; returns how many shards. A run that Redis lost is restored first."""
        run = self._run(batch_id, number)
        restore(self._store, self._ledger, run, window=self._window)
        if self._goes_wrong(run):
            write_ending(self._store, batch_id, number, BatchStatus.FAILED)
            self.end_early(batch_id, number)
            return 0
        if self._ledger.memory_share() > SOFT_LIMIT:
            self.relieve(batch_id, number)
        return Feeder(
            self._app,
            self._ledger,
            self._store,
            run,
            window=self._window,
            routes=self._routes,
            pack_size=self._pack_size,
        ).feed()

    def _goes_wrong(self, run: Run) -> bool:
        """Whether more rows of the file's run have failed than its submitter wants to see."""
        limit = run.manifest.fail_after
        if limit is None or run.number != FIRST_RUN:
            return False
        progress = self._ledger.progress(run.batch_id, run.number)
        return progress is not None and not progress.closed and progress.failed >= limit

    def relieve(self, batch_id: str, number: int) -> None:
        """Make room in Redis: spill the finished rows of the run's open shards, once a second at most."""
        run = self._run(batch_id, number)
        progress = self._ledger.progress(batch_id, number)
        if progress is None or not self._relief.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._relieved.get(batch_id, 0.0) < RELIEF_INTERVAL_S:
                return
            sealed = self._ledger.sealed(batch_id, number)
            rows = sum(
                spill_shard(self._store, self._ledger, run, shard)
                for shard in run.shards[: progress.frontier]
                # A full shard is sealed now, and its sealer reads what we would move away.
                if shard.number not in sealed
                and 0 < self._ledger.recorded(batch_id, number, shard.number) < shard.count
            )
            self._relieved[batch_id] = time.monotonic()
        finally:
            self._relief.release()
        logger.warning("Redis is short of memory: moved %d rows of %s into the batch directory", rows, batch_id)

    def _write_part(self, run: Run, shard: Shard, rows: Iterable[bytes]) -> None:
        with self._store.writing(layout.part(run.batch_id, run.number, shard.number)) as part:
            for row in rows:
                part.write(row + b"\n")

    def _rows_or_failures(self, run: Run, shard: Shard, failure: Failure) -> Iterator[bytes]:
        rows = shard_rows(self._store, self._ledger, run, shard, forget=False)
        for row, (_, line) in zip(rows, shard_lines(self._store, run, shard), strict=True):
            yield row if row is not None else failed_row(custom_id_of(line), failure)

    def _rows(self, run: Run, shard: Shard) -> Iterator[bytes]:
        for index, row in zip(
            shard.indexes, shard_rows(self._store, self._ledger, run, shard, forget=True), strict=True
        ):
            if row is None:
                raise HoleError(f"row {index} of {run.batch_id}, shard {shard.number}, is not recorded")
            yield row

    def _assemble(self, run: Run, wish: RunEnding | None) -> RunEnd:
        """Write the output and the failed rows' file, each whole; returns how the run ends."""
        batch_id, tally, ended_early = run.batch_id, Tally(), False
        with (
            self._store.writing(layout.output(batch_id, run.number), replace=True) as output,
            self._store.writing(layout.errors(batch_id, run.number), replace=True) as errors,
        ):
            for row in self._joined(run):
                output.write(row)
                if row_failed(row):
                    errors.write(row)
                    tally.failed += 1
                    ended_early |= wish is not None and failure_code(row) == _ENDINGS[wish.status].code
                else:
                    tally.completed += 1
        counts = RequestCounts(total=run.manifest.total, completed=tally.completed, failed=tally.failed)
        # A wish that found nothing left to end came too late.
        status = wish.status if wish is not None and ended_early else BatchStatus.COMPLETED
        return RunEnd(status=status, at=now(), counts=counts, usage=self._usage(run))

    def _joined(self, run: Run) -> Iterator[bytes]:
        """All rows of the batch in the input's order, each from its newest run (lines with LF)."""
        if run.number == FIRST_RUN:
            yield from self._sealed_rows(run)
            return
        newer = zip(chain.from_iterable(shard.indexes for shard in run.shards), self._sealed_rows(run), strict=True)
        at, newest = next(newer, (-1, b""))
        with self._store.open(layout.output(run.batch_id, run.number - 1)) as older:
            for index, row in enumerate(older):
                if index == at:
                    yield newest
                    at, newest = next(newer, (-1, b""))
                else:
                    yield row

    def _sealed_rows(self, run: Run) -> Iterator[bytes]:
        for shard in run.shards:
            with self._store.open(layout.part(run.batch_id, run.number, shard.number)) as rows:
                yield from rows

    def _usage(self, run: Run) -> Usage:
        """The ledger's token counts, from the rows where Redis lost some, on top of those of the runs before."""
        restore(self._store, self._ledger, run, window=self._window)
        progress = self._ledger.progress(run.batch_id, run.number)
        exact = progress is not None and progress.exact
        return state_of_run(self._store, self._ledger if exact else None, run).usage

    def _run(self, batch_id: str, number: int) -> Run:
        run = self._runs.get((batch_id, number))
        if run is None:
            if len(self._runs) >= _RUNS:
                self._runs.clear()
            run = self._runs[batch_id, number] = read_run(self._store, read_manifest(self._store, batch_id), number)
        return run
