"""Signals in a producer: each is heard, and none comes between an ending and its processes."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from producer import interrupts, local
from producer.interrupts import Interrupted, raise_interrupted, signals_ignored
from producer.local import LocalFleet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Workplace

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _handlers_return() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_second_signal_right_after_the_first_says_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
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


def a_fleet() -> LocalFleet:
    return LocalFleet("batch_" + "0" * 24, store_uri="file:///s", model="m", engine="echo", workers=1, engine_args=[])


@pytest.mark.parametrize("raised", [Interrupted(signal.SIGTERM), KeyboardInterrupt()])
def test_a_signal_just_before_the_ending_is_raised_after_it(
    raised: BaseException, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(workplace.state))
    monkeypatch.chdir(workplace.folder)
    waiting = [raised]

    def hears_one_first() -> Any:
        if waiting:
            raise waiting.pop()
        return signals_ignored()

    monkeypatch.setattr(local, "signals_ignored", hears_one_first)
    with pytest.raises(type(raised)), a_fleet():
        monkeypatch.chdir("/")
        assert workplace.alive()

    assert not waiting
    workplace.assert_nothing_left()


def test_an_impatient_second_signal_does_not_come_between_a_fleet_and_its_ending(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(workplace.state))
    monkeypatch.chdir(workplace.folder)
    stop = LocalFleet.stop

    def stop_after_another(self: LocalFleet) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(self)

    monkeypatch.setattr(LocalFleet, "stop", stop_after_another)
    raise_interrupted()
    with pytest.raises(Interrupted), a_fleet():
        monkeypatch.chdir("/")
        assert workplace.alive()
        signal.raise_signal(signal.SIGINT)

    workplace.assert_nothing_left()
