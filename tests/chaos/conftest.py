"""Chaos tests run on a fleet of their own; the long ones only when they are asked for (`make chaos`)."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.chaos.chaosfleet import ChaosFleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How many random sequences; unset: one, and no test that is marked `chaos_long`.
SEQUENCES = "FLEET_CHAOS_SEQUENCES"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip long tests that nobody asked for."""
    if os.environ.get(SEQUENCES):
        return
    for item in items:
        if item.get_closest_marker("chaos_long") is not None:
            item.add_marker(pytest.mark.skip(reason=f"long: set {SEQUENCES}, or say make chaos"))


@pytest.fixture
def chaos(server: str, tmp_path: Path) -> Iterator[ChaosFleet]:
    """A fleet to be hurt, without workers yet."""
    with closing(ChaosFleet(tmp_path)) as fleet:
        yield fleet
