"""What is no answer: of a dead engine, cut short, or cancelled. It is never a row."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import EngineAbortedError, EngineDeadError
from tests.fakevllm import (
    Answered,
    Chat,
    Choice,
    Engine,
    Output,
    Usage,
    answer,
    chat,
    direct,
    failed,
    serve,
)
from workers.engine.vllm_serving import Watched


def test_a_dead_engine_is_never_a_row() -> None:
    engine = Engine()

    async def handler(request: Any) -> Output:
        engine.errored = True
        return failed(500, {"error": {"message": "EngineCore", "type": "x", "param": None, "code": 500}})

    serving, _ = serve(handler, engine=engine)
    with pytest.raises(EngineDeadError):
        asyncio.run(serving.answer(chat()))
    with pytest.raises(EngineDeadError):  # and from now on
        asyncio.run(serving.answer(chat()))


def test_an_exception_of_a_dead_engine_is_its_death() -> None:
    engine = Engine()

    async def handler(request: Any) -> Output:
        engine.errored = True
        raise RuntimeError

    with pytest.raises(EngineDeadError):
        asyncio.run(serve(handler, engine=engine)[0].answer(chat()))


@pytest.mark.parametrize(("dies", "error"), [(False, EngineAbortedError), (True, EngineDeadError)])
def test_an_aborted_choice_is_never_a_row(dies: bool, error: type[Exception]) -> None:
    engine = Engine()

    async def handler(request: Any) -> Output:
        engine.errored = dies
        choices = [Choice(finish_reason="stop"), Choice(finish_reason="abort")]
        return answer(Chat(choices=choices, usage=Usage(prompt_tokens=1, completion_tokens=1)))

    with pytest.raises(error):
        asyncio.run(serve(handler, engine=engine)[0].answer(chat()))


def test_without_the_look_at_aborts_an_answer_cut_short_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The safeguard off: vLLM itself calls it a success."""
    monkeypatch.setattr("workers.engine.vllm_serving.was_aborted", lambda _: False)

    async def handler(request: Any) -> Output:
        return answer(Chat(choices=[Choice(finish_reason="abort")], usage=Usage(prompt_tokens=1, completion_tokens=1)))

    reply = asyncio.run(serve(handler)[0].answer(chat()))

    assert reply.failure is None
    assert b'"finish_reason":"abort"' in reply.row


def output_of(request_id: str, finish_reason: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(finish_reason=finish_reason)])


@pytest.mark.parametrize(("dies", "error"), [(False, EngineAbortedError), (True, EngineDeadError)])
def test_an_abort_that_the_answer_does_not_tell_is_never_a_row(dies: bool, error: type[Exception]) -> None:
    """Of /v1/responses it reads "completed". A neighbour that was not cut short has its row."""
    engine = Engine()
    watched = Watched(engine)

    async def handler(request: Any, raw_request: Any = None) -> Any:
        engine.outputs = (output_of("r", "stop" if request.input == "whole" else "abort"),)
        # As vLLM does for several prompts: the engine is asked in a task of its own.
        await asyncio.create_task(drain(watched.generate("x", None, request_id="r")))
        engine.errored = dies and request.input == "cut"
        return Answered()

    async def drain(outputs: Any) -> None:
        async for _ in outputs:
            pass

    serving = direct("/v1/responses", handler)
    serving._engine = watched

    async def both() -> list[Any]:
        requests = [chat({"input": text}, url="/v1/responses") for text in ("whole", "cut")]
        whole = await serving.answer(requests[0])
        return [whole, *await asyncio.gather(serving.answer(requests[1]), return_exceptions=True)]

    whole, cut = asyncio.run(both())
    assert whole.failure is None
    assert type(cut) is error


def test_a_watched_engine_is_told_when_nobody_listens() -> None:
    """A cancelled request must end in the engine too, at once and not with the garbage collector."""
    closed = []

    class Endless(Engine):
        async def generate(self, prompt: Any, sampling_params: Any = None, request_id: str = "") -> Any:
            try:
                while True:
                    yield output_of(request_id, "stop")
            finally:
                closed.append(request_id)

    async def leave() -> None:
        outputs = Watched(Endless()).generate("x", None, request_id="r")
        await anext(outputs)
        await outputs.aclose()
        assert closed == ["r"]

    asyncio.run(leave())


def test_a_cancelled_request_is_never_a_row() -> None:
    """vLLM answers a cancellation with a row; the cancellation is what counts."""
    entered = asyncio.Event()

    async def handler(request: Any) -> Output:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return failed(400, "Client disconnected")
        raise AssertionError

    serving, _ = serve(handler)

    async def cancel() -> asyncio.Task[Any]:
        task = asyncio.create_task(serving.answer(chat()))
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
        return task

    assert asyncio.run(cancel()).cancelled()


def test_a_time_limit_ends_as_a_timeout() -> None:
    """asyncio.timeout cancels too, and must see its cancellation come back."""

    async def handler(request: Any) -> Output:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return failed(400, "Client disconnected")
        raise AssertionError

    serving, _ = serve(handler)

    async def limited() -> None:
        async with asyncio.timeout(0.01):
            await serving.answer(chat())

    with pytest.raises(TimeoutError):
        asyncio.run(limited())
