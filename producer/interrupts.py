"""SIGINT and SIGTERM in a producer: an exception, and the moments in which neither may arrive.

Owns: `Interrupted`, and the handlers of the two signals. Must not know: what is interrupted.
On failure: the handlers that were there before come back, whatever happens inside a block.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: Seconds after a signal in which another says nothing new: a terminal's Ctrl-C that a parent passes on once more, an
#: impatient second one. It would interrupt the ending that the first began.
SAME_WISH_S = 1.0


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an `Exception`: nothing on the way may take it for a failure of its own."""

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(signal.Signals(signal_number).name)


def raise_interrupted() -> None:
    """From now on either signal raises `Interrupted`, but for one that follows within `SAME_WISH_S`.

    Every later time too, not only at first: an exception that is raised inside a finalizer is lost.
    """
    heard: float | None = None

    def interrupt(number: int, _: object) -> None:
        nonlocal heard
        at = time.monotonic()
        if heard is None or at - heard >= SAME_WISH_S:
            heard = at
            raise Interrupted(number)

    for each in _SIGNALS:
        signal.signal(each, interrupt)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Let both signals pass unheard while the block runs."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold both signals back until the block is left; the last one is then delivered as usual."""
    arrived: list[int] = []
    try:
        with _handled_by(lambda number, _: arrived.append(number)):
            yield
    finally:
        if arrived:
            signal.raise_signal(arrived[-1])


@contextlib.contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    """Outside the main thread a no-op: it alone may set handlers, and it alone is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that came before is heard in `signal.signal` itself: each handler is noted first, and returns alone.
    with contextlib.ExitStack() as returning:
        for each in _SIGNALS:
            returning.callback(_return, each, signal.getsignal(each))
            signal.signal(each, handler)
        yield


def _return(number: signal.Signals, handler: Any) -> None:
    """Set a handler for good: where another signal is heard first, its exception is raised afterwards."""
    try:
        signal.signal(number, handler)
    except BaseException:
        signal.signal(number, handler)
        raise
