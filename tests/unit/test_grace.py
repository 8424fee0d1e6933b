"""The time that a platform gives a worker to stop, against what a worker takes."""

from __future__ import annotations

import re
from pathlib import Path

from common.settings import WorkerSettings

COMPOSE = (Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8")

#: The drain, then the engine: its host gives it 30 s, cancelling what still runs 5 s.
STOP_S = 35


def test_compose_gives_workers_more_time_than_a_drain_takes() -> None:
    """A03: Docker's own 10 s would kill what runs; and the first process of a container passes signals on."""
    drain_s = re.search(r'FLEET_DRAIN_S: "\$\{FLEET_DRAIN_S:-(\d+)\}"', COMPOSE)
    assert drain_s is not None
    assert float(drain_s.group(1)) == WorkerSettings.model_fields["drain_s"].default
    services = re.split(r"^  (?=[\w-]+:$)", COMPOSE.partition("\nservices:\n")[2], flags=re.MULTILINE)
    workers = [service for service in services if service.startswith("worker-")]
    assert len(workers) == 2
    for service in workers:
        grace_s = re.search(r'^    stop_grace_period: "?(?:\$\{\w+:-)?(\d+)s\b', service, re.MULTILINE)
        assert grace_s is not None, service
        assert int(grace_s.group(1)) >= int(drain_s.group(1)) + STOP_S
        assert "<<: *fleet" in service
    assert re.search(r"^x-fleet: &fleet\n(?:  .*\n)*  init: true$", COMPOSE, re.MULTILINE)
