"""SIGINT and SIGTERM in a producer: an exception, and the moments in which neither may arrive.

Owns: `Interrupted`, and the handlers of the two signals. Must not know: what is interrupted.
On failure: the handlers that were there before come back, whatever happens inside a block.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an `Exception`: nothing on the way may take it for a failure of its own."""

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(signal.Signals(signal_number).name)


def raise_interrupted() -> None:
    """From now on either signal raises `Interrupted`.

    Every time, not only at first: an exception that is raised inside a finalizer is lost.
    """

    def interrupt(number: int, _: object) -> None:
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
    before = [signal.signal(each, handler) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, handler_before in zip(_SIGNALS, before, strict=True):
            signal.signal(each, handler_before)
