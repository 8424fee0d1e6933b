"""A real vLLM engine on the CPU, one for each module, on an event loop in a thread, as in the worker.

Needs the folder of a small chat model in FLEET_TEST_MODEL (deploy/cpu/prepare_model.py makes one). Without it the
tests are skipped at a desk and fail in CI.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm_flags import FLAGS

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from workers.engine.vllm import VllmEngine


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        """Run a coroutine on the loop and return its result; the time limit cancels it."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout_s), self.loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture(scope="session")
def model_folder() -> str:
    """The folder of the model that the tests serve."""
    folder = os.environ.get("FLEET_TEST_MODEL", "")
    spec = find_spec("vllm")
    missing = [
        what
        for what, there in (
            # A namespace package is no vLLM: tests/vllm itself is one when tests/ is on the path.
            ("vLLM is not installed", spec is not None and spec.origin is not None),
            ("FLEET_TEST_MODEL names no model folder", (Path(folder) / "config.json").is_file()),
        )
        if not there
    ]
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("; ".join(missing))
    return folder


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    """The loop that the module's engine lives on."""
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def engine(loop: LoopThread, model_folder: str) -> Iterator[VllmEngine]:
    """The module's engine, started."""
    from workers.engine.vllm import VllmEngine

    before = dict(os.environ)
    engine = VllmEngine(model_folder, FLAGS)
    loop.run(engine.start(), timeout_s=180)
    yield engine
    loop.run(engine.stop())
    os.environ.clear()
    os.environ.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Let vLLM 0.32 leave a zmq context unclosed: pytest collects it at its very end, and would call it an error."""
    warnings.filterwarnings("ignore", "Unclosed context", ResourceWarning)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests that end the module's engine to the end of their module, whatever order the others have."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            # An engine that was killed leaves sockets and contexts of vLLM's to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    for module in {item.path for item in items if item.path.parent == Path(__file__).parent}:
        places = [place for place, item in enumerate(items) if item.path == module]
        ordered = sorted((items[place] for place in places), key=lambda item: "killed" in item.name)
        for place, item in zip(places, ordered, strict=True):
            items[place] = item
