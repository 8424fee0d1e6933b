"""What the collector is told by a process that has loaded everything. In processes of their own: it is all of one."""

from __future__ import annotations

import subprocess
import sys

import pytest

CYCLE = """
import gc, weakref
from common import garbage
class Node: pass
node = Node()
node.itself = node
gone = weakref.ref(node)
garbage.settle()
del node
"""


@pytest.mark.parametrize(
    "checks",
    [
        "assert gc.get_freeze_count() > 1000 and gc.get_threshold() == garbage.THRESHOLDS",
        # An engine's client is part of cycles, and has to go before the interpreter does.
        "gc.collect(); assert gone() is not None; garbage.collect(); assert gone() is None",
    ],
    ids=["what was loaded is exempted, and the rest looked at seldom", "what was exempted can go at the end"],
)
def test_the_collector(checks: str) -> None:
    subprocess.run([sys.executable, "-c", CYCLE + checks], check=True, timeout=60)
