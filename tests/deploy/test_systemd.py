"""The units, as systemd itself reads them, and what they promise about stopping."""

from __future__ import annotations

import re
import shlex
import sys
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
    program, command, *_ = re.sub(r"^/bin/sh -c 'exec ", "", found["ExecStart"][0]).split()

    assert program == "/opt/batch-fleet/bin/worker"
    assert re.search(rf"^ +{command}\b", build_parser().format_help(), re.MULTILINE)
    assert found["User"] == ["fleet"]
    assert (found["NoNewPrivileges"], found["CapabilityBoundingSet"]) == (["yes"], [""])
    assert found["ProtectSystem"] == ["strict"]
    assert f"`{unit.stem.replace('@', '@N')}`" in PAGE


@pytest.mark.parametrize("number", [0, 4, 5, 10, 99])
def test_each_worker_of_a_machine_has_a_port_of_its_own(tmp_path: Path, number: int) -> None:
    """The unit's own command, by a shell; its numbers are the documented ones and nobody else's."""
    (start,) = settings(TOP / "deploy/systemd/fleet-worker@.service")["ExecStart"]
    shell, option, line = shlex.split(start.replace("%i", str(number)).replace("$$", "$"))
    stub = tmp_path / "worker"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    (base,) = re.findall(r"on port (\d+) \+ N", PAGE)

    started = run(shell, option, line.replace("/opt/batch-fleet/bin/worker", str(stub)), FLEET_MODEL="a model")

    assert started.stdout.splitlines() == ["serve", "a model", "--metrics-port", str(int(base) + number)]
    assert not {9464, 9465} & set(range(int(base), int(base) + 100))


@pytest.mark.parametrize(
    ("store", "code", "says"),
    [("ftp://nowhere", 2, "FLEET_STORE must be"), ("{}/not-mounted/store", 1, "not-mounted/store cannot be used")],
    ids=["misspelt", "away"],
)
def test_an_aggregator_is_tried_again_when_its_store_is_away_and_not_when_it_is_misspelt(
    tmp_path: Path, store: str, code: int, says: str
) -> None:
    found = settings(TOP / "deploy/systemd/fleet-aggregator.service")
    started = run(sys.executable, "-m", "workers", "aggregate", FLEET_STORE=store.format(tmp_path))

    assert (started.returncode, started.stdout) == (code, "")
    assert says in started.stderr
    assert found["Restart"] == ["always"]
    assert (str(started.returncode) in found["RestartPreventExitStatus"]) is (code == 2)


def test_no_documented_command_shows_a_password_to_the_machine() -> None:
    """Arguments stand in the process list."""
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        assert not re.search(r"\benv [^\n]*FLEET_BROKER_URL=", block), block


def test_a_worker_gets_more_time_to_stop_than_it_needs_to_drain() -> None:
    found = settings(TOP / "deploy/systemd/fleet-worker@.service")
    (drain_s,) = re.findall(r"`FLEET_DRAIN_S=(\d+)`", PAGE)

    assert int(found["TimeoutStopSec"][0]) >= int(drain_s) + 50
    assert found["KillMode"] == ["mixed"]


def test_the_runbook_restarts_units_that_are_there() -> None:
    commands = re.findall(r"^systemctl .*$", (TOP / "docs/runbook.md").read_text(), re.MULTILINE)
    named = [re.sub(r"@\d$", "@", name) for line in commands for name in re.findall(r"fleet-[\w@]+", line)]

    assert list(dict.fromkeys(named)) == ["fleet-worker@", "fleet-aggregator", "fleet-exporter", "fleet-flower"]
    assert set(named) == {unit.stem for unit in UNITS}
