"""The aggregator's work: seal shards, assemble the output, feed the window.

Owns: `Aggregator`. Must not know: Celery's tasks (`workers.tasks` calls it), engines.
On failure: everything here can run twice and die anywhere. Objects are created whole and first-wins; a shard's rows
leave Redis last. A row that is missing raises `HoleError` and nothing is written: a hole is never sealed.

    shard:  rows in the ledger ─▶ part created ─▶ marked sealed ─▶ rows dropped
    batch:  all parts ─▶ output, errors ─▶ end created ─▶ run closed in the ledger
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from common import layout
from common.batch import BatchStatus, Manifest, RequestCounts, RunEnd, Usage, row_failed
from common.dispatch import Feeder
from common.errors import HoleError
from common.runs import Tally, now, read_end, read_manifest, restore, sealed_shards, write_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery import Celery

    from common.batch import Shard
    from common.ledger import Ledger
    from common.store import ObjectStore

logger = logging.getLogger("fleet.aggregate")

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
        name = layout.part(batch_id, run, number)
        if not self._store.exists(name):
            with self._store.writing(name) as part:
                for row in self._rows(batch_id, run, shard):
                    part.write(row + b"\n")
            logger.info("sealed shard %d of %s (%d rows)", number, batch_id, shard.count)
        restore(self._store, self._ledger, manifest, run=run, window=self._window)
        self._ledger.mark_sealed(batch_id, run, number)
        self._ledger.drop_shard(batch_id, run, number)
        return self._ledger.sealed_count(batch_id, run) >= len(manifest.counts)

    def assemble_batch(self, batch_id: str, run: int) -> RunEnd | None:
        """Join the parts into the output and close the run; None while a part is missing."""
        manifest = self._manifest(batch_id)
        end = read_end(self._store, batch_id, run)
        if end is None:
            if sealed_shards(self._store, batch_id, run) != set(range(len(manifest.counts))):
                return None
            end = write_end(self._store, batch_id, self._join(manifest, run), run)
            logger.info("batch %s %s: %s", batch_id, end.status.value, end.counts.model_dump())
        self._ledger.close(batch_id, run, end.status.value)
        return end

    def feed(self, batch_id: str, run: int) -> int:
        """Publish what the window allows; returns how many shards. A run that Redis lost is restored first."""
        manifest = self._manifest(batch_id)
        restore(self._store, self._ledger, manifest, run=run, window=self._window)
        feeder = Feeder(self._app, self._ledger, self._store, manifest, run=run, window=self._window, queue=self._queue)
        return feeder.feed()

    def _rows(self, batch_id: str, run: int, shard: Shard) -> Iterator[bytes]:
        for index, row in zip(
            shard.indexes, self._ledger.rows(batch_id, run, shard.number, shard.indexes), strict=True
        ):
            if row is None:
                raise HoleError(f"row {index} of {batch_id}, shard {shard.number}, is not recorded")
            yield row

    def _join(self, manifest: Manifest, run: int) -> RunEnd:
        """Write the output and the failed rows' file; both are replaced as a whole."""
        batch_id, tally = manifest.batch_id, Tally()
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
                        else:
                            tally.completed += 1
        counts = RequestCounts(total=manifest.total, completed=tally.completed, failed=tally.failed)
        return RunEnd(status=BatchStatus.COMPLETED, at=now(), counts=counts, usage=self._usage(manifest, run))

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
