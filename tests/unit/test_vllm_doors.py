"""Which versions of vLLM the adapter takes, and how it refuses the others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import EngineStartError
from tests.fakevllm import (
    RunBatch,
    RunBatch33,
    build_client,
    serve,
)
from workers.engine.vllm_doors import PLAIN_DOOR, TRACKER_DOOR, check_functions, door_of


def test_known_versions_have_a_door() -> None:
    assert {door_of(f"0.{minor}.1") for minor in (30, 31, 32)} == {TRACKER_DOOR}
    assert door_of("0.33.0") is PLAIN_DOOR
    assert door_of("0.32.0+cpu") is TRACKER_DOOR


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "0.3", "0.1.dev1+g0"])
def test_an_unknown_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(EngineStartError, match=rf"vLLM {version.replace('+', '.')} is not supported.*0\.30 to 0\.33"):
        door_of(version)


async def init_app_state(engine_client: Any, state: Any, args: Any, supported_tasks: Any = None) -> None: ...


@pytest.mark.parametrize(("version", "run_batch"), [("0.32.0", RunBatch33), ("0.33.0", RunBatch)])
def test_functions_of_another_version_are_refused(version: str, run_batch: Any) -> None:
    with pytest.raises(EngineStartError, match=rf"vLLM {version}.*run_request should take.*0\.30 to 0\.33"):
        check_functions(version, door_of(version), run_batch, build_client, init_app_state)


NEEDED = ("run_request", "make_transcription_wrapper", "create_error_response", "ErrorResponse", "BatchRequestInput")


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_function_is_refused(missing: str) -> None:
    names = (*NEEDED, "BaseFrontendArgs")
    part = SimpleNamespace(**{name: getattr(RunBatch, name) for name in names if name != missing})
    with pytest.raises(EngineStartError, match=missing):
        check_functions("0.32.0", TRACKER_DOOR, part, build_client, init_app_state)


def test_a_changed_engine_builder_is_refused() -> None:
    with pytest.raises(EngineStartError, match="build_async_engine_client"):
        check_functions("0.32.0", TRACKER_DOOR, RunBatch, lambda config: None, init_app_state)


def test_another_way_to_the_handlers_is_refused() -> None:
    with pytest.raises(EngineStartError, match="init_app_state"):
        check_functions("0.32.0", TRACKER_DOOR, RunBatch, build_client, lambda engine_client, app: None)


@pytest.mark.parametrize(
    ("name", "method"),
    [("openai_serving_completion", "create_completion"), ("openai_serving_responses", "create_responses")],
)
def test_a_handler_with_other_parameters_is_refused(name: str, method: str) -> None:
    async def changed(request: Any, raw_request: Any, tenant: str) -> Any: ...

    with pytest.raises(EngineStartError, match=r"/v1/\w+ should take \('request', 'raw_request'\)"):
        serve(None, **{name: SimpleNamespace(**{method: changed})})


def test_importing_the_module_imports_no_vllm() -> None:
    """The rest of the product runs where vLLM is not installed."""
    import subprocess

    code = "import sys, workers.engine.vllm; print([m for m in ('vllm', 'torch') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
