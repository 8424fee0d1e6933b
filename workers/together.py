"""Running the requests of one message together.

Owns: what becomes of a message whose requests end differently. Must not know: what they run.
On failure: see `run_together`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from workers.engine.host import Parked

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable


async def run_together(requests: Iterable[Coroutine[None, None, None]]) -> None:
    """Run requests at once, each in a task of its own, until all have ended.

    None of them stops the others: what is recorded is found done when the message comes again. Then raises a fault of
    ours if one had it, so that the message goes back, else `Parked` if a live worker runs one of them. Cancelled, it
    cancels all and waits until they have given back their marks.
    """
    ends = await asyncio.gather(*requests, return_exceptions=True)
    raised = [end for end in ends if isinstance(end, BaseException)]
    for end in sorted(raised, key=lambda end: isinstance(end, Parked)):
        raise end
