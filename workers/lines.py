"""Lines that are too large to travel in a message: fetched when their request is about to run.

Owns: `Lines` for a worker, `lend_line` for the aggregator. Must not know: engines, Celery.
On failure: nothing is raised; an outage, or a store that is not there, is waited for until the delivery is cancelled.

    worker with the store:      reads the line where it lies in the batch directory
    without, or that store does not have it:
                                asks the aggregator, who has it, for a loan: a key with the line, which lives a minute
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import redis

from common import layout
from common.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.ledger import Address, Ledger
    from common.store import ObjectStore

logger = logging.getLogger("fleet.lines")

#: Seconds between looks for a line that was asked for (then doubled, up to the second number), and until it is asked
#: for again: the message may be lost.
POLL_S = 0.02
MAX_POLL_S = 0.5
ASK_S = 5.0
#: Lines that are read at once; the loop and the ledger have threads of their own.
_READERS = 4


class Place(NamedTuple):
    """Where a line lies: the number of the input shard, and bytes in it."""

    source: int
    offset: int
    length: int


def read_line(store: ObjectStore, batch_id: str, place: Place) -> bytes:
    """The line at `place`. Raises what the store raises."""
    return store.read_range(layout.shard_input(batch_id, place.source), place.offset, place.length)


class Lines:
    """Fetches lines. `open_store` is None for a worker without a store; `ask` asks the aggregator and may block."""

    def __init__(
        self, open_store: Callable[[], ObjectStore] | None, ledger: Ledger, ask: Callable[[Address, Place], None]
    ) -> None:
        self._open_store = open_store
        self._ledger = ledger
        self._ask = ask
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="fleet-lines")

    async def fetch(self, at: Address, place: Place) -> str:
        """The line of the request `at`. Ends by cancellation only, when nobody has it."""
        loop = asyncio.get_running_loop()
        line = await loop.run_in_executor(self._readers, self._read, at, place)
        wait_s, since_asked_s = POLL_S, ASK_S
        while line is None:
            if since_asked_s >= ASK_S:
                await loop.run_in_executor(self._readers, self._ask_for, at, place)
                wait_s, since_asked_s = POLL_S, 0.0
            await asyncio.sleep(wait_s)
            since_asked_s += wait_s
            wait_s = min(2 * wait_s, MAX_POLL_S)
            line = await loop.run_in_executor(self._readers, self._borrow, at)
        return line.decode()

    def _read(self, at: Address, place: Place) -> bytes | None:
        if self._open_store is None:
            return None
        try:
            return read_line(self._open_store(), at.batch_id, place)
        except FleetError as exc:
            logger.warning("a line of %s is not read but asked for: %s", at.batch_id, exc)
            return None

    def _ask_for(self, at: Address, place: Place) -> None:
        try:
            self._ask(at, place)
        except Exception as exc:  # noqa: BLE001 - kombu raises its transports' errors; it is asked again
            logger.warning("a line of %s could not be asked for: %s", at.batch_id, type(exc).__name__)

    def _borrow(self, at: Address) -> bytes | None:
        try:
            return self._ledger.borrow_line(at)
        except redis.RedisError as exc:
            logger.warning("the ledger does not answer (%s); trying again", type(exc).__name__)
            return None
