"""Which requests may run beside which, where some of them have killed workers.

Owns: `Quarantine`. Must not know: how a request runs, the ledger.
On failure: leaving the context always reopens what entering it closed, also by cancellation.

A request whose worker died while it ran has a *strike* for each death. One strike says little: everything that ran
there got one. So the first changes nothing; with more the request is watched more closely, until it is clear that it
is the one that kills:

    strikes   the request runs
    0, 1      freely
    2         as a suspect: one of them at a time, beside the innocent
    3 …       alone: nothing else runs here meanwhile

A worker that dies now strikes one suspect at most, so that an innocent neighbour never gets a third.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from common.ledger import SUSPECT_STRIKES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Strikes from which a request is a suspect, and from which it runs alone.
SUSPECT = SUSPECT_STRIKES
ALONE = 3


class Quarantine:
    """Lets requests in by their strikes. Lives on one event loop."""

    def __init__(self) -> None:
        self._suspects = asyncio.Lock()
        self._running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def admit(self, strikes: int) -> AsyncIterator[None]:
        """Wait until a request with so many strikes may run; it runs inside the context."""
        async with contextlib.AsyncExitStack() as stack:
            if strikes >= SUSPECT:
                await stack.enter_async_context(self._suspects)
            if strikes >= ALONE:
                self._open.clear()
                stack.callback(self._open.set)
                await self._idle.wait()
            else:
                # Not a lock: those who run are many. Asked again, since another may have closed it meanwhile.
                while not self._open.is_set():
                    await self._open.wait()
            self._enter()
            stack.callback(self._leave)
            yield

    def _enter(self) -> None:
        self._running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()
