"""`make tools` on machines that have none of it, and on one that has all of it: `make test` goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.deploy.conftest import TOP, run
from tests.servers import wait_until

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
    asked = tmp_path / "asked"
    stub(programs, "apt-get", f'echo "$*" >>{asked}; echo "E: nobody answers" >&2; exit 100')
    stub(programs, "dpkg-deb", "exit 1")

    done = run("sh", SCRIPT, str(tmp_path / "tools"), PATH=str(programs))

    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "promtool is left out, and its tests are skipped: E: nobody answers",
        "a Redis with TLS is left out, and its tests are skipped: E: nobody answers",
    ]
    assert list((tmp_path / "tools/bin").iterdir()) == []
    # Each waits for its time-out: the packages of the second tool are not asked for.
    assert [line.split()[-1] for line in asked.read_text().splitlines()] == ["prometheus", "update"]


def test_lists_of_its_own_are_made_once(programs: Path, tmp_path: Path) -> None:
    """Where the system's are too old for the one tool they are so for the other."""
    asked = tmp_path / "asked"
    own = 'case "$*" in *Dir::State*update) exit 0;; *Dir::State*) : >x.deb; exit 0;; *) exit 100;; esac'
    stub(programs, "apt-get", f'echo "$*" >>{asked}; {own}')
    stub(programs, "dpkg-deb", "exit 1")

    assert run("sh", SCRIPT, str(tmp_path / "tools"), PATH=str(programs)).returncode == 0
    assert [line.split()[-1] for line in asked.read_text().splitlines()] == [
        "prometheus", "update", "prometheus", "liblzf1",
    ]  # fmt: skip


def test_a_package_that_cannot_be_unpacked_is_left_out(programs: Path, tmp_path: Path) -> None:
    stub(programs, "apt-get", ": >x.deb")
    stub(programs, "dpkg-deb", 'echo "E: no room" >&2; exit 1')

    done = run("sh", SCRIPT, str(tmp_path / "tools"), PATH=str(programs))

    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "promtool is left out, and its tests are skipped: E: no room",
        "a Redis with TLS is left out, and its tests are skipped: E: no room",
    ]


def test_ctrl_c_ends_a_fetch_and_leaves_nothing(programs: Path, tmp_path: Path) -> None:
    (programs / "sleep").symlink_to(str(shutil.which("sleep")))
    asked = tmp_path / "asked"
    stub(programs, "apt-get", f": >{asked}; exec sleep 300")
    stub(programs, "dpkg-deb", "exit 1")
    # Whoever runs the tests in the background ignores SIGINT, and a shell that inherits that cannot trap it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fetching = subprocess.Popen(
            ["/bin/sh", SCRIPT, str(tmp_path / "tools")], env={"PATH": str(programs)}, cwd=TOP, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        wait_until(asked.exists, 20, "it fetches")
        os.killpg(fetching.pid, signal.SIGINT)

        assert fetching.wait(20) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(fetching.pid, signal.SIGKILL)
        fetching.wait()
    assert [path.name for path in (tmp_path / "tools").iterdir()] == ["bin"]


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
