"""Python's garbage collector in a process that lives long and allocates much.

Owns: `settle` and `collect`. Must not know: what the process does.
On failure: nothing here can fail.
"""

from __future__ import annotations

import gc

#: Containers that must be left over before the collector looks, instead of 700; then the older generations' factors.
THRESHOLDS = (50_000, 20, 20)


def settle() -> None:
    """Everything is loaded: never look through it again, and look seldom at what comes.

    A request leaves no cycles behind, so there is nothing to find; but hundreds in flight are many thousand containers,
    and looking through them for every 700 new ones took two fifths of a worker's CPU. What does leave cycles, an
    exception now and then, is still found.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def collect() -> None:
    """Collect everything that can be, also of what `settle` exempted."""
    gc.unfreeze()
    gc.collect()
