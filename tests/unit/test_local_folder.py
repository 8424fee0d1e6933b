"""The folders of a local fleet: a signal leaves no temporary one behind, and a look at its lock disturbs nobody."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import UsageError
from producer import local
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


BATCH = "batch_" + "0" * 24


def test_a_look_at_a_batch_is_taken_for_no_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that a look holds for a moment is waited for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    fleet = LocalFleet(BATCH, store_uri="file:///s", model="m", engine="echo", workers=1, engine_args=[])
    path = local.local_folder(BATCH) / "lock"
    path.parent.mkdir(parents=True)
    looking = os.open(path, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("producer.local.time.sleep", lambda _: os.close(looking))

    fleet._lock()

    assert local.running_broker(BATCH) == ""
    fleet.stop()
    assert local.running_broker(BATCH) is None


def test_two_looks_take_neither_for_a_producer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert local.running_broker(BATCH) is None
    path = local.local_folder(BATCH) / "lock"
    path.parent.mkdir(parents=True)
    path.write_text("redis+socket:///of/one/that/was/killed")

    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)

        assert local.running_broker(BATCH) is None
