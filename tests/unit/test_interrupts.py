"""Signals in a producer: each is heard, and handlers come back. What they do to a local fleet: `test_local_endings`."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from producer import interrupts
from producer.interrupts import Interrupted, raise_interrupted, signals_ignored

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_return() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_second_signal_right_after_the_first_says_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    raise_interrupted()

    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    clock[0] += interrupts.SAME_WISH_S
    with pytest.raises(Interrupted) as later:
        signal.raise_signal(signal.SIGTERM)

    assert later.value.exit_code == 143


def test_a_signal_while_handlers_are_set_leaves_none_of_them_set(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_interrupted()
    before = {each: signal.getsignal(each) for each in SIGNALS}
    set_handler = signal.signal

    def hears_one_first(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and handler is signal.SIG_IGN:
            raise Interrupted(signal.SIGTERM)
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", hears_one_first)
    with pytest.raises(Interrupted), signals_ignored():
        pytest.fail("it was not heard")

    assert {each: signal.getsignal(each) for each in SIGNALS} == before


@pytest.mark.parametrize("during", SIGNALS)
def test_a_signal_while_handlers_return_leaves_none_of_them_ignored(
    monkeypatch: pytest.MonkeyPatch, during: signal.Signals
) -> None:
    raise_interrupted()
    before = {each: signal.getsignal(each) for each in SIGNALS}
    set_handler, waiting = signal.signal, [during]

    def hears_one_first(number: int, handler: Any) -> Any:
        if waiting and number == during and handler is before[during]:
            raise Interrupted(waiting.pop())
        return set_handler(number, handler)

    with pytest.raises(Interrupted), signals_ignored():
        monkeypatch.setattr(signal, "signal", hears_one_first)

    assert not waiting
    assert {each: signal.getsignal(each) for each in SIGNALS} == before
