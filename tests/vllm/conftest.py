"""A real vLLM engine on the CPU, one for each module, on an event loop in a thread, as in the worker.

Needs the folders of small models in FLEET_TEST_MODEL, FLEET_TEST_EMBEDDING_MODEL and FLEET_TEST_SPEECH_MODEL; the
Makefile makes them. Without one its tests are skipped at a desk and fail in CI.
"""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines import LoopThread, ask_all, served
from tests.vllm_flags import FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.engine import Reply
    from workers.engine.vllm import VllmEngine


def folder_of(variable: str) -> str:
    """The model folder that a variable names. Without one, or without vLLM: skipped at a desk, failed in CI."""
    folder = os.environ.get(variable, "")
    spec = find_spec("vllm")
    missing = [
        what
        for what, there in (
            # A namespace package is no vLLM: tests/vllm itself is one when tests/ is on the path.
            ("vLLM is not installed", spec is not None and spec.origin is not None),
            (f"{variable} names no model folder", (Path(folder) / "config.json").is_file()),
        )
        if not there
    ]
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("; ".join(missing))
    return folder


@pytest.fixture(scope="session")
def model_folder() -> str:
    """A chat model."""
    return folder_of("FLEET_TEST_MODEL")


@pytest.fixture(scope="session")
def embedding_folder() -> str:
    """A model that embeds."""
    return folder_of("FLEET_TEST_EMBEDDING_MODEL")


@pytest.fixture(scope="session")
def speech_folder() -> str:
    """A model that transcribes and translates."""
    return folder_of("FLEET_TEST_SPEECH_MODEL")


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    """The loop that the module's engine lives on."""
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def engine(loop: LoopThread, model_folder: str) -> Iterator[VllmEngine]:
    """The module's engine, started; a module that serves another model has a fixture of its own."""
    yield from served(loop, model_folder, FLAGS)


@pytest.fixture
def ask(engine: VllmEngine, loop: LoopThread) -> Callable[[list[str]], list[Reply]]:
    """Answer lines by the module's engine, all at once; every reply is checked."""
    return lambda lines: ask_all(engine, loop, lines)


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
