"""A local batch as seen from outside its command: where it stands while another producer runs it, or nobody.

Owns: the look at another producer's local fleet. Must not know: the command line.
On failure: a broker that is starting, silent or gone costs a moment; then the store tells what it knows, and a note
says that this is not all. Nothing is started for a look.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import redis

from common import broker
from common.batch import CLOSED
from common.errors import NoSuchBatchError
from common.ledger import Ledger
from common.runs import BatchState, state_of
from producer import control
from producer.local import running_broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.batch import Manifest
    from common.store import ObjectStore

#: Seconds that a local broker has to answer.
ANSWER_S = 2.0

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
    url = running_broker(manifest.batch_id)
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
