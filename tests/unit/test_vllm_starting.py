"""The start of a vLLM engine: its environment, what it serves, and one sentence where it fails."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import EngineDeadError, EngineStartError
from tests.fakevllm import (
    Engine,
    chat,
)
from workers.engine.vllm import VllmEngine, prepare_environment, served_models
from workers.engine.vllm_doors import Vllm
from workers.engine.vllm_reasons import start_sentence
from workers.engine.vllm_serving import default_inflight

if TYPE_CHECKING:
    from pathlib import Path


def test_an_engine_that_never_started_answers_nothing_and_stops() -> None:
    async def use() -> None:
        engine = VllmEngine("m", [])
        assert not engine.errored
        with pytest.raises(EngineDeadError):
            await engine.run(chat())
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        await engine.stop()
        await engine.stop()

    asyncio.run(use())


def test_a_missing_model_folder_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "none"

    async def use() -> None:
        engine = VllmEngine(str(folder), [])
        with pytest.raises(EngineStartError, match=f"There is no model folder {folder}"):
            await engine.start()
        await engine.stop()

    asyncio.run(use())


def test_a_machine_without_vllm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_nothing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("workers.engine.vllm_doors.import_module", import_nothing)
    with pytest.raises(EngineStartError, match=r"not installed.*--engine echo"):
        Vllm.load()


def test_an_engine_that_is_stopped_while_it_starts_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start that hangs ends by `stop`, and never leaves its caller waiting."""

    @contextlib.asynccontextmanager
    async def hang(*_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr("workers.engine.vllm.open_engine", hang)
    monkeypatch.setattr(Vllm, "load", lambda: None)
    monkeypatch.setattr("os.environ", dict(os.environ))

    async def use(turns: int) -> None:
        engine = VllmEngine(str(tmp_path), [])
        start = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineStartError, match="stopped while it started"):
            await asyncio.wait_for(start, 5)
        with pytest.raises(EngineStartError, match="started before"):
            await engine.start()

    for turns in (1, 2, 3, 4):
        asyncio.run(use(turns))


def test_the_engine_processes_own_reason_is_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "reason"
    generic = RuntimeError("Engine core initialization failed.\nSee root cause above.")
    assert start_sentence(generic, path) == "vLLM did not start: Engine core initialization failed."
    path.write_text("No memory is left.")
    assert start_sentence(generic, path) == "vLLM did not start: No memory is left."


def test_inflight_is_twice_what_the_engine_runs_at_once() -> None:
    assert default_inflight(Engine.vllm_config) == 2048
    small = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4), parallel_config=SimpleNamespace(data_parallel_size=1)
    )
    assert default_inflight(small) == 256


@pytest.mark.parametrize(
    ("served", "loras", "models"),
    [
        (None, None, ("m",)),
        ("one", None, ("one",)),
        (["one", "two"], [SimpleNamespace(name="lora")], ("one", "two", "lora")),
    ],
)
def test_requests_may_name_what_is_served(served: Any, loras: Any, models: tuple[str, ...]) -> None:
    args = argparse.Namespace(model="m", served_model_name=served, lora_modules=loras)
    assert served_models(args) == models


def test_the_environment_stays_what_a_user_said(tmp_path: Path) -> None:
    environ = {
        "VLLM_NO_USAGE_STATS": "0",
        "VLLM_CONFIGURE_LOGGING": "1",
        "FLEET_WORKER": "0",
        "VLLM_PLUGINS": "mine",
        "HF_HUB_OFFLINE": "0",
    }
    prepare_environment(str(tmp_path), environ)
    assert environ == {
        "VLLM_NO_USAGE_STATS": "0",
        "VLLM_CONFIGURE_LOGGING": "1",
        "FLEET_WORKER": "0",
        "VLLM_PLUGINS": "mine,fleet",
        "HF_HUB_OFFLINE": "0",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    }


def test_only_a_local_model_is_loaded_offline(tmp_path: Path) -> None:
    local: dict[str, str] = {}
    hub: dict[str, str] = {}
    prepare_environment(str(tmp_path), local)
    prepare_environment("org/model", hub)
    assert local["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in hub
    assert local["VLLM_NO_USAGE_STATS"] == hub["VLLM_NO_USAGE_STATS"] == "1"
