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

from common.ledger import SUSPECT_STRIKES

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

    def admit(self, strikes: int) -> Admission:
        """Wait until a request with so many strikes may run; it runs inside the context."""
        return Admission(self, strikes)

    async def enter(self, strikes: int) -> None:
        """Wait for admission."""
        if strikes >= SUSPECT:
            await self._suspects.acquire()
        try:
            if strikes >= ALONE:
                self._open.clear()
                await self._idle.wait()
            else:
                # Not a lock: those who run are many. Asked again, since another may have closed it meanwhile.
                while not self._open.is_set():
                    await self._open.wait()
        except BaseException:
            self._reopen(strikes)
            raise
        self._running += 1
        self._idle.clear()

    def leave(self, strikes: int) -> None:
        """End what `enter` began."""
        self._running -= 1
        if not self._running:
            self._idle.set()
        self._reopen(strikes)

    def _reopen(self, strikes: int) -> None:
        if strikes >= ALONE:
            self._open.set()
        if strikes >= SUSPECT:
            self._suspects.release()


class Admission:
    """A request's stay. Made by hand: `contextlib` takes longer for it than all the rest of the way to the engine."""

    __slots__ = ("_quarantine", "_strikes")

    def __init__(self, quarantine: Quarantine, strikes: int) -> None:
        self._quarantine = quarantine
        self._strikes = strikes

    async def __aenter__(self) -> None:
        await self._quarantine.enter(self._strikes)

    async def __aexit__(self, *_: object) -> None:
        self._quarantine.leave(self._strikes)
