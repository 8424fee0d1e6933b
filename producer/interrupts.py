"""SIGINT, SIGTERM and SIGHUP in a producer: an exception, and the moments in which none may arrive.

Owns: `Interrupted`, and the handlers of these signals. Must not know: what is interrupted.
On failure: the handlers that were there before come back, whatever happens inside a block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: SIGHUP is a terminal that was closed, or a lost connection to it.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Seconds after a signal in which another says nothing new: a terminal's Ctrl-C that a parent passes on once more, an
#: impatient second one. It would interrupt the ending that the first began.
SAME_WISH_S = 1.0


class Interrupted(BaseException):
    """One of the signals arrived. Not an `Exception`: nothing on the way may take it for a failure of its own."""

    def __init__(self, signal_number: int) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(signal.Signals(signal_number).name)


class _Hearing:
    """The handler that `raise_interrupted` sets."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._at = 0.0
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def __call__(self, number: int, _: object) -> None:
        at = time.monotonic()
        if self.heard is None or at - self._at >= SAME_WISH_S:
            self.heard, self._at = number, at
            _forget_closed(self._terminals)
            raise Interrupted(number)


def raise_interrupted() -> None:
    """From now on each signal raises `Interrupted`, but for one that follows within `SAME_WISH_S`.

    Every later time too, not only at first, and see `raise_lost`. Under `nohup` SIGHUP stays ignored.
    """
    hearing = _Hearing()
    for each in _SIGNALS:
        if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, hearing)


def raise_lost() -> None:
    """Raise what was raised before and got lost: in a finalizer, or what runs around a fork, Python ignores exceptions.

    For loops that wait, which nobody enters once `Interrupted` was raised. Nothing without `raise_interrupted`.
    """
    hearing = signal.getsignal(signal.SIGTERM)
    if isinstance(hearing, _Hearing) and hearing.heard is not None:
        raise Interrupted(hearing.heard)


def ignore_for_good() -> None:
    """From now on no signal is heard: what the command came to stands.

    Otherwise one that arrives while the interpreter ends, which sets handlers of Python's back to the default, would
    kill a command that is done.
    """
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def _forget_closed(terminals: list[int]) -> None:
    """Point what was a terminal and is closed to nowhere: the way back cannot be printed, and that is no failure."""
    for number in terminals:
        if not os.isatty(number):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Let the signals pass unheard while the block runs."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold the signals back until the block is left; the last one is then delivered as usual."""
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
            before = signal.getsignal(each)
            if before is signal.SIG_IGN:
                continue  # nothing is to be heard of it later either
            returning.callback(_return, each, before)
            signal.signal(each, handler)
        yield


def _return(number: signal.Signals, handler: Any) -> None:
    """Set a handler for good: where another signal is heard first, its exception is raised afterwards."""
    try:
        signal.signal(number, handler)
    except BaseException:
        signal.signal(number, handler)
        raise
