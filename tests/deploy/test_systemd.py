"""The units, as systemd itself reads them, and what they promise about stopping."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.deploy.conftest import TOP, binary, run
from workers.cli import build_parser

if TYPE_CHECKING:
    from pathlib import Path

UNITS = sorted((TOP / "deploy/systemd").glob("*.service"))
PAGE = (TOP / "docs/deploy/systemd.md").read_text()


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    analyze = binary("systemd-analyze", "apt-get install systemd", in_ci=False)
    # It looks for the program.
    own = tmp_path / unit.name
    own.write_text(unit.read_text().replace("/opt/batch-fleet/bin/worker", "/bin/true"))

    checked = run(analyze, "verify", str(own))

    assert (checked.returncode, checked.stderr) == (0, "")


def test_systemd_would_not_take_a_misspelt_setting(tmp_path: Path) -> None:
    analyze = binary("systemd-analyze", "apt-get install systemd", in_ci=False)
    own = tmp_path / "x.service"
    own.write_text("[Service]\nExecStart=/bin/true\nTimoutStopSec=3\n")

    assert "TimoutStopSec" in run(analyze, "verify", str(own)).stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists_without_privileges(unit: Path) -> None:
    found = settings(unit)
    program, command, *_ = found["ExecStart"][0].split()

    assert program == "/opt/batch-fleet/bin/worker"
    assert re.search(rf"^ +{command}\b", build_parser().format_help(), re.MULTILINE)
    assert found["User"] == ["fleet"]
    assert (found["NoNewPrivileges"], found["CapabilityBoundingSet"]) == (["yes"], [""])
    assert found["ProtectSystem"] == ["strict"]
    assert f"`{unit.stem.replace('@', '@N')}`" in PAGE


def test_a_worker_gets_more_time_to_stop_than_it_needs_to_drain() -> None:
    found = settings(TOP / "deploy/systemd/fleet-worker@.service")
    (drain_s,) = re.findall(r"`FLEET_DRAIN_S=(\d+)`", PAGE)

    assert int(found["TimeoutStopSec"][0]) >= int(drain_s) + 50
    assert found["KillMode"] == ["mixed"]
