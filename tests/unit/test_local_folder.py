"""The temporary folder of a local broker's socket: a signal at the worst moment leaves none behind."""

from __future__ import annotations

import signal
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import UsageError
from producer.interrupts import Interrupted, raise_interrupted
from producer.local import LocalFleet

if TYPE_CHECKING:
    from pathlib import Path


def test_a_signal_while_the_folder_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("long" * 40)))
    make = tempfile.mkdtemp

    def make_and_be_interrupted(*args: Any, **options: Any) -> str:
        made = make(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_be_interrupted)
    fleet = LocalFleet("batch_" + "0" * 24, store_uri="file:///s", model="m", engine="echo", workers=1, engine_args=[])
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    raise_interrupted()
    try:
        with pytest.raises(Interrupted), fleet:
            pytest.fail("it started")
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

    assert not list(temporary.iterdir())


def test_a_temporary_folder_that_is_too_long_for_a_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("long" * 40)))
    fleet = LocalFleet("batch_" + "0" * 24, store_uri="file:///s", model="m", engine="echo", workers=1, engine_args=[])

    with pytest.raises(UsageError, match="set TMPDIR"), fleet:
        pytest.fail("it started")

    assert not list(temporary.iterdir())
