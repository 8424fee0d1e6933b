"""The aggregator's work: seal shards, assemble the output, feed the window.

Owns: `Aggregator`. Must not know: Celery's tasks (`workers.tasks` calls it), engines.
On failure: everything here can run twice and die anywhere. Objects are created whole and first-wins; a shard's rows
leave Redis last. A row that is missing raises `HoleError` and nothing is written: a hole is never sealed.

    shard:  rows in the ledger ─▶ part created ─▶ marked sealed ─▶ rows dropped
    batch:  all parts ─▶ output, errors ─▶ end created ─▶ run closed in the ledger
    early:  wish created ─▶ nothing is begun any more ─▶ open shards sealed with failed rows ─▶ as above
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING

from pydantic_core import from_json

from common import broker, layout
from common.batch import (
    BatchStatus,
    Manifest,
    RequestCounts,
    RunEnd,
    RunEnding,
    Usage,
    custom_id_of,
    failed_row,
    row_failed,
)
from common.dispatch import Feeder, send
from common.errors import HoleError
from common.failures import Failure, FailureKind
from common.ledger import Row
from common.runs import Tally, now, read_end, read_ending, read_manifest, restore, sealed_shards, write_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from celery import Celery

    from common.batch import Shard
    from common.ledger import Address, Ledger
    from common.store import ObjectStore

logger = logging.getLogger("fleet.aggregate")

#: What an early end makes of the requests that were not finished, and how it is said.
_ENDINGS = {BatchStatus.CANCELLED: FailureKind.CANCELLED, BatchStatus.EXPIRED: FailureKind.EXPIRED}
_ENDED = {BatchStatus.CANCELLED: "was cancelled", BatchStatus.EXPIRED: "expired"}

#: Manifests that are kept in memory; they never change.
_MANIFESTS = 64


class Aggregator:
    """Seals, assembles and feeds over one store and one ledger."""

    def __init__(self, app: Celery, store: ObjectStore, ledger: Ledger, *, window: int, queue: str) -> None:
        self._app = app
        self._store = store
        self._ledger = ledger
        self._window = window
        self._queue = queue
        self._manifests: dict[str, Manifest] = {}

    def seal_shard(self, batch_id: str, run: int, number: int) -> bool:
        """Write the shard's part and drop its rows. True when every shard of the run is sealed now.

        Raises `HoleError` while a row is missing.
        """
        manifest = self._manifest(batch_id)
        shard = manifest.shard(number)
        if not self._store.exists(layout.part(batch_id, run, number)):
            self._write_part(batch_id, run, number, self._rows(batch_id, run, shard))
            logger.info("sealed shard %d of %s (%d rows)", number, batch_id, shard.count)
        restore(self._store, self._ledger, manifest, run=run, window=self._window)
        self._ledger.note_sealed(batch_id, run, number)
        return self._ledger.sealed_count(batch_id, run) >= len(manifest.counts)

    def end_early(self, batch_id: str, run: int) -> RunEnd | None:
        """Close a run that is to end before it is complete: finished rows stay, the others become failed ones.

        Nothing of the run is begun any more, and what still runs finds its shard sealed. None when it is not to end.
        """
        manifest = self._manifest(batch_id)
        wish = read_ending(self._store, batch_id, run)
        if wish is None:
            return None
        restore(self._store, self._ledger, manifest, run=run, window=self._window)
        self._ledger.set_ending(batch_id, run, wish.status.value)
        failure = Failure(_ENDINGS[wish.status], f"the batch {_ENDED[wish.status]} before this request was finished")
        sealed = sealed_shards(self._store, batch_id, run)
        for shard in manifest.shards():
            if shard.number not in sealed:
                rows = self._rows_or_failures(batch_id, run, shard, failure)
                self._write_part(batch_id, run, shard.number, rows)
            self._ledger.note_sealed(batch_id, run, shard.number)
        return self.assemble_batch(batch_id, run)

    def fail_request(self, at: Address) -> None:
        """Record a request that somebody revoked, as a failed row, and seal its shard if that was the last one."""
        manifest = self._manifest(at.batch_id)
        shard = manifest.shard(at.shard)
        with self._store.open(layout.shard_input(at.batch_id, at.run, at.shard)) as lines:
            line = next(islice(lines, at.index - shard.first, None)).decode()
        failure = Failure(FailureKind.CANCELLED, "the request was revoked")
        row = failed_row(custom_id_of(line), failure)
        restore(self._store, self._ledger, manifest, run=at.run, window=self._window)
        (recorded,) = self._ledger.record(
            [Row(at, row, failed=True, prompt_tokens=0, completion_tokens=0, shard_count=shard.count)]
        )
        if recorded.full:
            send(self._app, broker.SEAL_SHARD, batch_id=at.batch_id, run=at.run, shard=at.shard)

    def assemble_batch(self, batch_id: str, run: int) -> RunEnd | None:
        """Join the parts into the output and close the run; None while a part is missing."""
        manifest = self._manifest(batch_id)
        end = read_end(self._store, batch_id, run)
        if end is None:
            if sealed_shards(self._store, batch_id, run) != set(range(len(manifest.counts))):
                return None
            wish = read_ending(self._store, batch_id, run)
            end = write_end(self._store, batch_id, self._join(manifest, run, wish), run)
            logger.info("batch %s %s: %s", batch_id, end.status.value, end.counts.model_dump())
        self._ledger.close(batch_id, run, end.status.value)
        return end

    def feed(self, batch_id: str, run: int) -> int:
        """Publish what the window allows; returns how many shards. A run that Redis lost is restored first."""
        manifest = self._manifest(batch_id)
        restore(self._store, self._ledger, manifest, run=run, window=self._window)
        feeder = Feeder(self._app, self._ledger, self._store, manifest, run=run, window=self._window, queue=self._queue)
        return feeder.feed()

    def _write_part(self, batch_id: str, run: int, number: int, rows: Iterable[bytes]) -> None:
        with self._store.writing(layout.part(batch_id, run, number)) as part:
            for row in rows:
                part.write(row + b"\n")

    def _rows_or_failures(self, batch_id: str, run: int, shard: Shard, failure: Failure) -> Iterator[bytes]:
        rows = self._ledger.rows(batch_id, run, shard.number, shard.indexes)
        with self._store.open(layout.shard_input(batch_id, run, shard.number)) as lines:
            for row, line in zip(rows, lines, strict=True):
                yield row if row is not None else failed_row(custom_id_of(line.decode()), failure)

    def _rows(self, batch_id: str, run: int, shard: Shard) -> Iterator[bytes]:
        for index, row in zip(
            shard.indexes, self._ledger.rows(batch_id, run, shard.number, shard.indexes), strict=True
        ):
            if row is None:
                raise HoleError(f"row {index} of {batch_id}, shard {shard.number}, is not recorded")
            yield row

    def _join(self, manifest: Manifest, run: int, wish: RunEnding | None) -> RunEnd:
        """Write the output and the failed rows' file; both are replaced as a whole."""
        batch_id, tally, ended_early = manifest.batch_id, Tally(), False
        with (
            self._store.writing(layout.output(batch_id), replace=True) as output,
            self._store.writing(layout.errors(batch_id), replace=True) as errors,
        ):
            for number in range(len(manifest.counts)):
                with self._store.open(layout.part(batch_id, run, number)) as rows:
                    for row in rows:
                        output.write(row)
                        if row_failed(row):
                            errors.write(row)
                            tally.failed += 1
                            ended_early |= wish is not None and _code(row) == _ENDINGS[wish.status].code
                        else:
                            tally.completed += 1
        counts = RequestCounts(total=manifest.total, completed=tally.completed, failed=tally.failed)
        # A wish that found nothing left to end came too late.
        status = wish.status if wish is not None and ended_early else BatchStatus.COMPLETED
        return RunEnd(status=status, at=now(), counts=counts, usage=self._usage(manifest, run))

    def _usage(self, manifest: Manifest, run: int) -> Usage:
        """The ledger's token counts; counted from the rows where Redis lost them."""
        restore(self._store, self._ledger, manifest, run=run, window=self._window)
        progress = self._ledger.progress(manifest.batch_id, run)
        if progress is None:
            return Usage()
        return Usage(prompt_tokens=progress.prompt_tokens, completion_tokens=progress.completion_tokens)

    def _manifest(self, batch_id: str) -> Manifest:
        manifest = self._manifests.get(batch_id)
        if manifest is None:
            if len(self._manifests) >= _MANIFESTS:
                self._manifests.clear()
            manifest = self._manifests[batch_id] = read_manifest(self._store, batch_id)
        return manifest


def _code(row: bytes) -> str:
    code: str = from_json(row)["error"]["code"]
    return code
