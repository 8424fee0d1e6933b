"""Signals at the worst moments of a local fleet's ending: no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from producer import interrupts, local
from producer.interrupts import Interrupted, raise_interrupted, signals_ignored
from producer.local import LocalFleet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Workplace


@pytest.fixture
def fleet(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFleet]:
    """A fleet whose processes belong to the workplace, in this process; handlers come back after it."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setenv("XDG_STATE_HOME", str(workplace.state))
    start = LocalFleet._spawn

    def spawn_there(self: LocalFleet, *args: Any, **options: Any) -> None:
        """What runs in the workplace's folder belongs to it; this process must not."""
        here = os.getcwd()
        os.chdir(workplace.folder)
        try:
            start(self, *args, **options)
        finally:
            os.chdir(here)

    monkeypatch.setattr(LocalFleet, "_spawn", spawn_there)
    yield LocalFleet(
        "batch_" + "0" * 24,
        store_uri=(workplace.folder / "store").as_uri(),
        model="m",
        engine="echo",
        workers=1,
        engine_args=[],
    )
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("raised", [Interrupted(signal.SIGTERM), KeyboardInterrupt()])
def test_a_signal_just_before_the_ending_is_raised_after_it(
    workplace: Workplace, fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    waiting = [raised]

    def hears_one_first() -> Any:
        if waiting:
            raise waiting.pop()
        return signals_ignored()

    monkeypatch.setattr(local, "signals_ignored", hears_one_first)
    with pytest.raises(type(raised)), fleet:
        assert workplace.alive()

    assert not waiting
    workplace.assert_nothing_left()


def test_an_impatient_second_signal_does_not_come_between_a_fleet_and_its_ending(
    workplace: Workplace, fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "SAME_WISH_S", 60.0)
    stop = LocalFleet.stop

    def stop_after_another(self: LocalFleet) -> None:
        signal.raise_signal(signal.SIGINT)
        stop(self)

    monkeypatch.setattr(LocalFleet, "stop", stop_after_another)
    raise_interrupted()
    with pytest.raises(Interrupted), fleet:
        assert workplace.alive()
        signal.raise_signal(signal.SIGINT)

    workplace.assert_nothing_left()


def test_a_signal_around_a_fork_is_heard_and_leaves_no_process(
    workplace: Workplace, fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores what is raised in the hooks around a fork, and what follows would not know the process."""
    popen, waiting = subprocess.Popen, [signal.SIGTERM]

    def hears_one(*args: Any, **options: Any) -> Any:
        started = popen(*args, **options)
        if waiting:
            signal.raise_signal(waiting.pop())
        return started

    monkeypatch.setattr(local.subprocess, "Popen", hears_one)
    raise_interrupted()

    with pytest.raises(Interrupted), fleet:
        pytest.fail("it was not heard")

    workplace.assert_nothing_left()
