"""Signals in a producer: each is heard, and handlers come back. What they do to a local fleet: `test_local_endings`."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from producer import interrupts
from producer.interrupts import Interrupted, raise_interrupted, raise_lost, signals_deferred, signals_ignored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers_return(hangups: None) -> Iterator[None]:
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


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_is_an_exit_code_as_a_shell_has_it(number: signal.Signals) -> None:
    raise_interrupted()

    with pytest.raises(Interrupted) as caught:
        signal.raise_signal(number)

    assert caught.value.exit_code == 128 + number


def test_what_is_ignored_stays_ignored_and_hides_no_other() -> None:
    """Under `nohup` that is SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_interrupted()
    signal.raise_signal(signal.SIGHUP)

    with pytest.raises(Interrupted) as caught, signals_deferred():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)

    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_was_raised_where_exceptions_are_ignored_is_raised_again() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    raise_interrupted()
    raise_lost()
    Finalized()

    with pytest.raises(Interrupted) as caught:
        raise_lost()

    assert caught.value.exit_code == 143


def test_nothing_is_lost_where_nothing_hears() -> None:
    """In a program that uses the Python interface, and after a test that was interrupted."""
    raise_interrupted()
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGINT)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)

    raise_lost()


#: Its object goes when the interpreter clears its modules, after it has set Python's handlers back.
LATE = """
import os, sys
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)
late = Late()
from producer.cli import main
main(["check", sys.argv[2]])
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_after_the_end_does_not_change_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    """A supervisor would repeat what was ended by a signal, and a batch that is closed would be made anew."""
    path = tmp_path / "in.jsonl"
    path.write_text("")

    ended = subprocess.run(
        [sys.executable, "-c", LATE, str(int(number)), str(path)], capture_output=True, timeout=60, check=False
    )

    assert ended.returncode == 0, ended.stderr


EARLY = """
import os
from common import tracing
from producer.cli import main
tracing.start = lambda: os.kill(os.getpid(), 15)
main(["submit", "in.jsonl"])
"""


def test_a_signal_while_tracing_starts_is_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr) == (143, b"")


#: Waits for a signal, and says the way back to a terminal that is no more.
HANGS_UP = """
import sys, time
from producer.interrupts import Interrupted, raise_interrupted
raise_interrupted()
try:
    print("up", file=sys.stderr, flush=True)
    time.sleep(60)
except Interrupted as exc:
    print("the way back", file=sys.stderr, flush=True)
    sys.exit(exc.exit_code)
"""


def test_a_closed_terminal_is_no_failure_of_its_own() -> None:
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", HANGS_UP], stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        assert os.read(ours, 10).startswith(b"up")
        os.close(ours)
        child.send_signal(signal.SIGHUP)

        assert child.wait(30) == 129
    finally:
        child.kill()
        child.wait()
