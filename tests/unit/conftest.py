"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.fakevllm import VERSIONS


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """A version of vLLM that the adapter takes."""
    return str(request.param)
