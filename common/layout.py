"""Names inside a batch directory. Every name of an object in the store is made here and nowhere else.

batches/<batch_id>/manifest.json              what the batch is; written last at submit, never changed
batches/<batch_id>/runs/1/input/00000.jsonl   the lines of a shard, as the user wrote them; later runs read them too
batches/<batch_id>/runs/<run>/parts/00000.jsonl   its sealed rows; created once, the first one wins
batches/<batch_id>/runs/<run>/start.json      which requests a later run runs; created once, the first one wins
batches/<batch_id>/runs/<run>/spills/00000/000001.jsonl   finished rows of a shard that stayed open, with their indexes
batches/<batch_id>/runs/<run>/ending.json     that the run is to end early, and how; created once, the first one wins
batches/<batch_id>/runs/<run>/end.json        how the run ended; created once, the first one wins
batches/<batch_id>/output.jsonl               all rows, in the input's order, as run 1 left them
batches/<batch_id>/errors.jsonl               the failed ones among them
batches/<batch_id>/runs/<run>/output.jsonl    all rows, in the input's order, as a later run left them
batches/<batch_id>/runs/<run>/errors.jsonl    the failed ones among them
pointers/<digest>/000001                      id of a batch of this digest; created once, the highest number is in force
store-id                                      what tells this store from every other one; created once
create-once-probe                             means nothing: whether the store keeps to `If-None-Match` (S3 alone)
"""

from __future__ import annotations

import re
import uuid

from common.errors import UsageError

BATCHES = "batches"
STORE_ID = "store-id"
PROBE = "create-once-probe"

_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


def new_batch_id() -> str:
    """A fresh batch id."""
    return f"batch_{uuid.uuid4().hex[:24]}"


def checked_batch_id(text: str) -> str:
    """`text`, if it is a batch id; ids from people become names of objects, so nothing else may pass."""
    if _BATCH_ID.fullmatch(text) is None:
        raise UsageError(f"{text!r} is not a batch id; `producer list` (or `list --local`) shows them")
    return text


def batch(batch_id: str) -> str:
    """The batch directory."""
    return f"{BATCHES}/{batch_id}"


def manifest(batch_id: str) -> str:
    """The batch's manifest."""
    return f"{BATCHES}/{batch_id}/manifest.json"


def runs(batch_id: str) -> str:
    """The folder of a batch's runs."""
    return f"{BATCHES}/{batch_id}/runs"


def start(batch_id: str, run: int) -> str:
    """Which requests a later run runs."""
    return f"{runs(batch_id)}/{run}/start.json"


def shard_input(batch_id: str, shard: int) -> str:
    """The lines of an input shard."""
    return f"{runs(batch_id)}/1/input/{shard:05d}.jsonl"


def parts(batch_id: str, run: int) -> str:
    """The folder of a run's parts."""
    return f"{BATCHES}/{batch_id}/runs/{run}/parts"


def part(batch_id: str, run: int, shard: int) -> str:
    """The sealed rows of a shard."""
    return f"{parts(batch_id, run)}/{shard:05d}.jsonl"


def spills(batch_id: str, run: int, shard: int | None = None) -> str:
    """The folder of a run's spills, or of those of one shard."""
    folder = f"{runs(batch_id)}/{run}/spills"
    return folder if shard is None else f"{folder}/{shard:05d}"


def spill(batch_id: str, run: int, shard: int, number: int) -> str:
    """Rows of a shard that left Redis before the shard was full; numbered from 1."""
    return f"{spills(batch_id, run, shard)}/{number:06d}.jsonl"


def ending(batch_id: str, run: int) -> str:
    """The wish that a run ends before it is complete."""
    return f"{BATCHES}/{batch_id}/runs/{run}/ending.json"


def end(batch_id: str, run: int) -> str:
    """The end of a run."""
    return f"{BATCHES}/{batch_id}/runs/{run}/end.json"


def _of_run(batch_id: str, run: int, name: str) -> str:
    """What each run has of its own, so that a late writer of an earlier run changes nothing."""
    return f"{BATCHES}/{batch_id}/{name}" if run == 1 else f"{runs(batch_id)}/{run}/{name}"


def output(batch_id: str, run: int) -> str:
    """The assembled output, as this run left it."""
    return _of_run(batch_id, run, "output.jsonl")


def errors(batch_id: str, run: int) -> str:
    """The failed rows of the output."""
    return _of_run(batch_id, run, "errors.jsonl")


def pointers(digest: str) -> str:
    """The folder of a digest's pointers."""
    return f"pointers/{digest}"


def pointer(digest: str, number: int) -> str:
    """One pointer from a digest to a batch; the highest number is the one in force."""
    return f"{pointers(digest)}/{number:06d}"
