"""`make tools` on machines that have none of it, and on one that has all of it: `make test` goes on."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.deploy.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = "tests/deploy/fetch_tools.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH with what every system has, and nothing of Debian's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "mkdir", "mktemp", "rm", "tail", "timeout"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def stub(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_system_that_is_not_debian_goes_without(programs: Path, tmp_path: Path) -> None:
    done = run("sh", SCRIPT, str(tmp_path / "tools"), PATH=str(programs))

    assert done.returncode == 0
    assert done.stderr == (
        "what comes from Debian's packages is left out, and its tests are skipped: no apt-get on this machine\n"
    )


def test_a_machine_without_a_network_goes_without(programs: Path, tmp_path: Path) -> None:
    stub(programs, "apt-get", 'echo "E: nobody answers" >&2; exit 100')
    stub(programs, "dpkg-deb", "exit 1")

    done = run("sh", SCRIPT, str(tmp_path / "tools"), PATH=str(programs))

    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "promtool is left out, and its tests are skipped: E: nobody answers",
        "a Redis with TLS is left out, and its tests are skipped: E: nobody answers",
    ]
    assert list((tmp_path / "tools/bin").iterdir()) == []


def test_what_is_there_is_not_fetched_again(programs: Path, tmp_path: Path) -> None:
    for name in ("apt-get", "dpkg-deb"):
        stub(programs, name, f"touch {tmp_path}/asked")
    there = tmp_path / "tools/bin"
    there.mkdir(parents=True)
    for name in ("promtool", "redis-server"):
        stub(there, name, "exit 0")

    done = run("sh", SCRIPT, str(tmp_path / "tools"), PATH=str(programs))

    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "asked").exists()
