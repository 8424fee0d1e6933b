"""A local batch from outside its command: where it stands while another producer runs it, or nobody; its early end.

Owns: the look at another producer's local fleet, and the end of a batch that nobody runs. Must not know: the command
line.
On failure: a broker that is starting, silent or gone costs a moment; then the store tells what it knows, and a note
says that this is not all. Nothing is started for a look.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis

from common import broker
from common.batch import CLOSED
from common.errors import NoSuchBatchError
from common.ledger import Ledger
from common.runs import BatchState, newest_run, read_end, state_of
from producer import control
from producer.interrupts import raise_lost
from producer.local import LocalFleet, has_broker_file, running_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.batch import Manifest
    from common.settings import FleetSettings
    from common.store import ObjectStore

#: Seconds that a local broker has to answer.
ANSWER_S = 2.0
#: Seconds between two looks whether a batch that is ended here has closed.
END_POLL_S = 0.05

_NOT_HERE = "not in flight here"
_NOT_RUNNING = "not running; the same command goes on with it"
_SILENT = "running; its broker does not tell yet what is not stored"


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a batch stands, and a note for people where that is not all there is to know, else an empty one."""

    state: BatchState
    note: str = ""


def see(store: ObjectStore, ledger: Ledger | None, manifest: Manifest, *, local: bool) -> Seen:
    """Where the batch stands: a local one by the broker of its own fleet, if that runs, another one by `ledger`.

    `local`: ask for a local fleet of every batch, since `resume --local` takes up those of a fleet too.
    """
    if not (local or manifest.local):
        state = state_of(store, ledger, manifest)
        return Seen(state, "" if state.known else _NOT_HERE)
    # Before the store: a fleet that ends in between has closed the batch by then, or left it.
    try:
        url = running_broker(manifest.batch_id)
    except OSError:
        url = ""  # another user's
    state = _by_broker(store, url, manifest) if url else state_of(store, None, manifest)
    if state.known or state.status in CLOSED:
        return Seen(state)
    if url is not None:
        return Seen(state, _SILENT)
    return Seen(state, _NOT_RUNNING if manifest.local else _NOT_HERE)


def see_all(store: ObjectStore, ledger: Ledger | None, *, local: bool) -> Iterator[Seen]:
    """Where all batches of the store stand, newest first; see `see`."""
    for manifest in control.manifests(store):
        with contextlib.suppress(NoSuchBatchError):  # it is being purged
            yield see(store, ledger, manifest, local=local)


def _by_broker(store: ObjectStore, url: str, manifest: Manifest) -> BatchState:
    client = broker.redis_client(url, tries=0, timeout_s=ANSWER_S)
    try:
        return state_of(store, Ledger(client), manifest)
    except redis.RedisError:
        return state_of(store, None, manifest)
    finally:
        client.close()


def end_unattended(settings: FleetSettings, store: ObjectStore, manifest: Manifest) -> bool:
    """End a cancelled batch of local mode that nobody runs: in a local fleet of its own, without workers.

    So the rows that are in its broker's file alone are kept. False, with nothing done, while a producer runs the batch,
    and where that file is not on this machine: the batch ran on another one, which has rows that are not stored. Raises
    what a local fleet raises; the wish that the batch ends stays then.
    """
    batch_id = manifest.batch_id
    if not manifest.local or running_broker(batch_id) is not None or not has_broker_file(batch_id):
        return False
    fleet = LocalFleet(
        batch_id, store_uri=store.uri, model="", engine="echo", workers=0, engine_args=[], taken_up=True
    )  # fmt: skip
    with fleet:
        run = newest_run(store, manifest)
        here = settings.model_copy(update={"broker_url": fleet.broker_url, "routes": ""})
        control.start(control.Fleet.connect(here, store), run)
        while read_end(store, batch_id, run.number) is None:
            raise_lost()
            fleet.check()
            time.sleep(END_POLL_S)
    fleet.clear_up(store)
    return True
