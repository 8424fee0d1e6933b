"""The adapter over versions of vLLM, and what becomes of vLLM's answers, with fakes of vLLM's own interfaces.

The fakes have the signatures of vLLM 0.30 to 0.33 as read in its sources; the real one is driven in tests/vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.batch import SUCCESS_END
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import MAX_MESSAGE_BYTES, Failure, FailureKind
from workers.engine import Request
from workers.engine.media import Media
from workers.engine.vllm import VllmEngine, prepare_environment, served_models
from workers.engine.vllm_cpu import GIB, KV_MAX_BYTES, KV_MIN_BYTES, available_bytes, fit_cpu, kv_cache_bytes
from workers.engine.vllm_doors import PLAIN_DOOR, TRACKER_DOOR, Vllm, check_functions, door_of
from workers.engine.vllm_endpoints import build_endpoints
from workers.engine.vllm_reasons import explain_unreadable, start_sentence
from workers.engine.vllm_serving import Serving, Watched, default_inflight

if TYPE_CHECKING:
    from collections.abc import Callable

SENTINEL = "a-secret-of-the-prompt"

# -- vLLM, as far as it is used ---------------------------------------------------------------------------------------


class ClientError(Exception):
    """As vllm.exceptions.VLLMValidationError: no ValueError, and its str() adds the refused value."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __str__(self) -> str:
        return f"{self.args[0]} (parameter={self.parameter}, value={SENTINEL})"


class Body(BaseModel):
    messages: list[dict[str, Any]]


class BatchRequestInput(BaseModel):
    custom_id: str
    url: str
    body: Any

    @field_validator("body", mode="plain")
    @classmethod
    def check(cls, value: dict[str, Any]) -> Any:
        if "client_error" in value:
            raise ClientError("`n` must be positive", "n")
        if "attribute_error" in value:
            value["attribute_error"].get("x")
        return Body.model_validate(value)


class Output(BaseModel):
    id: str = "vllm-1"
    custom_id: str = "a"
    response: Any = None
    error: Any = None


def answer(body: Any) -> Output:
    return Output(response=SimpleNamespaceModel(status_code=200, request_id="vllm-batch-1", body=body))


class SimpleNamespaceModel(BaseModel):
    status_code: int
    request_id: str
    body: Any = None


class Choice(BaseModel):
    finish_reason: str
    logprob: float = 0.0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None


class Chat(BaseModel):
    choices: list[Choice]
    usage: Usage


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


def failed(status: int, error: Any) -> Output:
    return Output(response=SimpleNamespaceModel(status_code=status, request_id="vllm-batch-1"), error=error)


class Runner:
    """The module vllm.entrypoints.launchers.run_batch, as far as it is the same in vLLM 0.30 to 0.33."""

    BatchRequestInput = BatchRequestInput
    BaseFrontendArgs = object
    ErrorResponse = ErrorResponse

    @staticmethod
    def make_transcription_wrapper(is_translation: bool, allowed_media_domains: Any = None) -> Any:
        return lambda handler: handler

    @staticmethod
    def create_error_response(
        message: Any, err_type: str = "BadRequestError", status_code: int = 400, param: str | None = None
    ) -> ErrorResponse:
        if isinstance(message, Exception):
            status_code, err_type = 500, "InternalServerError"
        return ErrorResponse(error=ErrorInfo(message=str(message), type=err_type, param=param, code=status_code))


class RunBatch(Runner):
    """The same of vLLM 0.30 to 0.32."""

    @staticmethod
    async def run_request(serving_engine_func: Any, request: Any, tracker: Any) -> Any:
        output = await serving_engine_func(request)
        tracker.completed()
        return output


class RunBatch33(Runner):
    """The same of vLLM 0.33."""

    @staticmethod
    async def run_request(serving_engine_func: Any, request: Any) -> Any:
        return await serving_engine_func(request)


def build_client(args: Any, *, usage_context: Any = None, client_config: Any = None) -> None: ...


class Prompt(BaseModel):
    """The body of a completion."""

    prompt: str
    stream: bool = False


class Input(BaseModel):
    """The body of /v1/responses; unknown fields are kept, as vLLM's request types keep them."""

    model_config = ConfigDict(extra="allow")

    input: str
    store: bool | None = True
    stream: bool | None = False
    background: bool | None = False
    previous_response_id: str | None = None


BODIES = {"/v1/completions": Prompt, "/v1/responses": Input}


def make_vllm(version: str, handlers: dict[str, Any]) -> Vllm:
    """A vLLM of this version whose model has these handlers, by their names on the state of its HTTP server."""
    door = door_of(version)
    run_batch: Any = RunBatch if door is TRACKER_DOOR else RunBatch33

    async def init_app_state(engine_client: Any, state: Any, args: Any, supported_tasks: Any = None) -> None:
        assert supported_tasks == ("generate",)
        for name, handler in handlers.items():
            setattr(state, name, handler)

    check_functions(version, door, run_batch, build_client, init_app_state)
    return Vllm(version, door, run_batch, build_client, init_app_state, BODIES, ClientError)


class Engine:
    errored = False
    #: What `generate` gives.
    outputs: tuple[Any, ...] = ()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, sampling_params: Any = None, request_id: str = "") -> Any:
        for output in self.outputs:
            yield output

    vllm_config: ClassVar = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=512), parallel_config=SimpleNamespace(data_parallel_size=2)
    )


@pytest.fixture(params=["0.30.0", "0.31.2", "0.32.0", "0.33.0"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(
    handler: Callable[[Any], Any] | None,
    version: str = "0.32.0",
    engine: Engine | None = None,
    media: Media | None = None,
    **handlers: Any,
) -> tuple[Serving, Engine]:
    """A served model that chats by `handler`, and has what else is given by the names of vLLM's state."""
    if handler is not None:
        handlers["openai_serving_chat"] = SimpleNamespace(create_chat_completion=handler)
    vllm = make_vllm(version, handlers)
    engine = engine or Engine()
    endpoints = asyncio.run(build_endpoints(vllm, engine, argparse.Namespace(allowed_media_domains=None)))
    return Serving(vllm, engine, endpoints, ("m",), media=media), engine


async def refuse_all(request: Any) -> Any:
    raise AssertionError("no request should come here")


def chat(body: dict[str, Any] | None = None, url: str = "/v1/chat/completions") -> Request:
    return Request(json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body or {"messages": []}}))


def ask(serving: Serving, request: Request) -> tuple[dict[str, Any], FailureKind | None]:
    reply = asyncio.run(serving.answer(request))
    assert reply.row.endswith(SUCCESS_END) == (reply.failure is None)
    return json.loads(reply.row), reply.failure


# -- versions ---------------------------------------------------------------------------------------------------------


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


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_good_answer_is_vllms_own_row(version: str) -> None:
    async def handler(request: Any) -> Output:
        return answer(Chat(choices=[Choice(finish_reason="stop")], usage=Usage(prompt_tokens=3, completion_tokens=5)))

    serving, _ = serve(handler, version)
    reply = asyncio.run(serving.answer(chat()))
    assert reply.row == asyncio.run(handler(None)).model_dump_json().encode()
    assert (reply.failure, reply.prompt_tokens, reply.completion_tokens) == (None, 3, 5)


def test_a_row_is_strict_json_whatever_the_numbers() -> None:
    async def handler(request: Any) -> Output:
        choices = [Choice(finish_reason="stop", logprob=number) for number in (float("nan"), float("-inf"))]
        return answer(Chat(choices=choices, usage=Usage(prompt_tokens=1, completion_tokens=None)))

    reply = asyncio.run(serve(handler)[0].answer(chat()))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads(reply.row, parse_constant=refuse)
    assert [choice["logprob"] for choice in row["response"]["body"]["choices"]] == [None, None]
    assert reply.completion_tokens == 0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.INVALID_REQUEST),
        (404, FailureKind.MODEL_NOT_FOUND),
        (422, FailureKind.INVALID_REQUEST),
        (500, FailureKind.ENGINE_ERROR),
        (503, FailureKind.ENGINE_OVERLOADED),
    ],
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_an_error_answer_keeps_ids_status_and_error(status: int, kind: FailureKind, as_dict: bool) -> None:
    info = {"message": "no", "type": "SomeError", "param": "model", "code": status}

    async def handler(request: Any) -> Output:
        return failed(status, {"error": info} if as_dict else ErrorResponse(error=ErrorInfo(**info)))

    row, failure = ask(serve(handler)[0], chat())
    assert failure is kind
    assert row == {
        "id": "vllm-1",
        "custom_id": "a",
        "response": {"status_code": status, "request_id": "vllm-batch-1", "body": {"error": info}},
        "error": {"code": kind.code, "message": "no"},
    }


def test_stream_mode_is_a_400_that_says_stream() -> None:
    async def handler(request: Any) -> Output:
        return failed(400, "Request must not be sent in stream mode")

    row, failure = ask(serve(handler)[0], chat())
    assert failure is FailureKind.INVALID_REQUEST
    assert "stream" in row["error"]["message"]
    assert row["response"]["body"]["error"]["code"] == 400


@pytest.mark.parametrize("url", ["/v1/complete", "/chat/completions", "/v1/chat/completions/", "", "score"])
def test_a_url_that_is_not_served_lists_those_that_are(version: str, url: str) -> None:
    async def handler(request: Any) -> Output:
        raise AssertionError

    serving, _ = serve(handler, version)
    row, failure = ask(serving, chat({"no": "body"}, url=url))
    assert failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert row["error"]["message"] == f"The url {url!r} is not served; supported: /v1/chat/completions."
    assert row["response"]["status_code"] == 400


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/score", "/v2/rerank"])
def test_an_endpoint_that_the_model_lacks_lists_those_it_has(version: str, url: str) -> None:
    """Whatever its body is: another one would not help."""
    row, failure = ask(serve(refuse_all, version)[0], chat({"no": "body"}, url=url))
    assert failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert row["error"]["message"] == "The model does not support this endpoint; supported: /v1/chat/completions."
    assert row["response"]["status_code"] == 400


def test_a_model_states_what_it_serves(version: str) -> None:
    async def handler(request: Any, raw_request: Any = None) -> Any: ...

    speech = {"create_transcription": handler, "create_translation": handler}
    serving, _ = serve(
        handler,
        version,
        openai_serving_completion=SimpleNamespace(create_completion=handler),
        openai_serving_responses=SimpleNamespace(create_responses=handler),
        serving_embedding=handler,
        serving_scores=handler,
        openai_serving_transcription=SimpleNamespace(**speech),
        openai_serving_translation=SimpleNamespace(**speech),
    )
    assert serving.urls == (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    )
    assert serve(None, version, serving_scores=handler)[0].urls == ("/v1/score", "/v1/rerank")


# -- what vLLM's batch runner does not serve --------------------------------------------------------------------------


class Answered(BaseModel):
    """An answer with a field that is written by another name, and a number that JSON lacks."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: str = Field("s", alias="schema")
    logprob: float = float("-inf")
    usage: Any = None


def direct(url: str, handler: Any, version: str = "0.32.0") -> Serving:
    name, method = {
        "/v1/completions": ("openai_serving_completion", "create_completion"),
        "/v1/responses": ("openai_serving_responses", "create_responses"),
    }[url]
    return serve(None, version, **{name: SimpleNamespace(**{method: handler})})[0]


@pytest.mark.parametrize("url", BODIES)
def test_a_direct_answer_is_a_row_of_the_batch_runners_shape(version: str, url: str) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5} if url == "/v1/completions" else {}
    usage = usage or {"input_tokens": 3, "output_tokens": 5}

    async def handler(request: Any, raw_request: Any = None) -> Any:
        assert raw_request is None
        return Answered(usage=SimpleUsage(**usage))

    reply = asyncio.run(direct(url, handler, version).answer(chat({"prompt": "x", "input": "x"}, url=url)))
    row = json.loads(reply.row)
    assert (reply.failure, reply.prompt_tokens, reply.completion_tokens) == (None, 3, 5)
    assert reply.row.endswith(SUCCESS_END)
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["response"]["body"] == {"schema": "s", "logprob": None, "usage": usage}
    assert row["id"].startswith("vllm-")
    assert row["response"]["request_id"].startswith("vllm-batch-")


class SimpleUsage(BaseModel):
    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize(
    ("url", "field", "value"),
    [
        ("/v1/completions", "stream", True),
        ("/v1/responses", "stream", True),
        ("/v1/responses", "background", True),
        ("/v1/responses", "previous_response_id", "resp_1"),
        ("/v1/responses", "conversation", "conv_1"),
    ],
)
def test_what_a_batch_cannot_honour_is_refused_by_name(url: str, field: str, value: Any) -> None:
    async def handler(request: Any, raw_request: Any = None) -> Any:
        raise AssertionError

    row, failure = ask(direct(url, handler), chat({"prompt": "x", "input": "x", field: value}, url=url))
    assert failure is FailureKind.INVALID_REQUEST
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"]["error"]["param"] == field
    assert field in row["error"]["message"]


def test_no_response_is_stored() -> None:
    """Where vLLM's store is switched on, it would grow with the batch."""
    seen = []

    async def handler(request: Any, raw_request: Any = None) -> Any:
        seen.append(request.store)
        return Answered()

    ask(direct("/v1/responses", handler), chat({"input": "x", "store": True}, url="/v1/responses"))
    assert seen == [False]


def test_an_unreadable_direct_body_names_its_field() -> None:
    row, _ = ask(direct("/v1/completions", refuse_direct), chat({"prompt": [SENTINEL]}, url="/v1/completions"))
    assert "body.prompt: Input should be a valid string" in row["error"]["message"]
    assert SENTINEL not in row["error"]["message"]


async def refuse_direct(request: Any, raw_request: Any = None) -> Any:
    raise AssertionError


@pytest.mark.parametrize("raises", [False, True])
def test_a_direct_handlers_error_is_its_row(raises: bool) -> None:
    async def handler(request: Any, raw_request: Any = None) -> Any:
        if raises:
            raise RuntimeError("broken")
        return Runner.create_error_response("no such model", "NotFoundError", 404, "model")

    row, failure = ask(direct("/v1/completions", handler), chat({"prompt": "x"}, url="/v1/completions"))
    assert failure is (FailureKind.ENGINE_ERROR if raises else FailureKind.MODEL_NOT_FOUND)
    assert row["response"]["status_code"] == (500 if raises else 404)
    assert row["error"]["message"] == ("broken" if raises else "no such model")


def test_a_long_url_is_cut() -> None:
    row, _ = ask(serve(None)[0], chat(url="/" + "x" * 10_000))
    assert len(row["error"]["message"]) < 400


def test_a_number_that_is_not_finite_never_reaches_the_engine() -> None:
    line = chat().line.replace('"messages"', '"temperature": 1e400, "messages"')
    row, failure = ask(serve(refuse_all)[0], Request(line))
    assert failure is FailureKind.INVALID_REQUEST
    assert "finite" in row["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"x": SENTINEL}, "body.messages: Field required"),
        ({"messages": SENTINEL}, "body.messages: Input should be a valid array"),
        ({"messages": [SENTINEL] * 1000}, "and 995 more"),
        ({"client_error": 1}, "body.n: `n` must be positive"),
        ({"attribute_error": SENTINEL}, "not a request of this endpoint"),
    ],
)
def test_a_line_that_vllm_cannot_read_is_explained_without_its_values(body: dict[str, Any], said: str) -> None:
    row, failure = ask(serve(refuse_all)[0], chat(body))
    assert failure is FailureKind.INVALID_REQUEST
    message = row["error"]["message"]
    assert said in message
    assert SENTINEL not in message
    assert len(message.encode()) < MAX_MESSAGE_BYTES
    assert (row["custom_id"], row["response"]["body"]["error"]["message"]) == ("a", message)


def test_a_field_is_named_without_vllms_functions() -> None:
    """vLLM's request types log unknown fields in a validator of their own, which a union names in its complaints."""

    class Wrapped(BaseModel):
        format: Literal["a"]

        @model_validator(mode="wrap")
        @classmethod
        def log_extra_fields(cls, value: Any, handler: Any) -> Any:
            return handler(value)

    class Other(BaseModel):
        format: Literal["b"]

    class Line(BaseModel):
        body: Wrapped | Other

    with pytest.raises(ValidationError) as raised:
        Line.model_validate({"body": {"format": SENTINEL}})
    assert explain_unreadable(raised.value).startswith("body.format: Input should be 'a'; ")


# -- what is no answer ------------------------------------------------------------------------------------------------


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


# -- media ------------------------------------------------------------------------------------------------------------


def image(url: str) -> Request:
    part = {"type": "image_url", "image_url": {"url": url}}
    return chat({"messages": [{"role": "user", "content": [part]}]})


def test_vllm_sees_content_in_place_of_a_url(version: str) -> None:
    seen = []

    async def handler(request: Any) -> Any:
        seen.append(request.body.messages)
        return answer(Chat(choices=[], usage=Usage(prompt_tokens=1, completion_tokens=1)))

    async def fetch(url: Any, budget: Any) -> bytes:
        return b"content"

    _, failure = ask(serve(handler, version, media=Media(download=fetch))[0], image("http://example.com/a"))

    assert failure is None
    (((part,),),) = [[message["content"] for message in messages] for messages in seen]
    assert part["image_url"]["url"] == "data:application/octet-stream;base64,Y29udGVudA=="


@pytest.mark.parametrize("kind", [FailureKind.MEDIA_DOWNLOAD, FailureKind.MEDIA_REFUSED, FailureKind.MEDIA_UNAVAILABLE])
def test_vllm_sees_nothing_of_a_request_whose_media_are_missing(kind: FailureKind) -> None:
    async def handler(request: Any) -> Any:
        raise AssertionError("asked")

    async def fetch(url: Any, budget: Any) -> Failure:
        return Failure(kind, "because")

    row, failure = ask(serve(handler, media=Media(download=fetch))[0], image("http://example.com/a?token=1"))

    assert failure is kind
    assert row["response"]["status_code"] == kind.status
    assert row["error"] == {"code": kind.code, "message": "messages.0.content.0.image_url: because"}


# -- starting ---------------------------------------------------------------------------------------------------------


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


# -- the CPU ----------------------------------------------------------------------------------------------------------


def cpu_args(**given: Any) -> argparse.Namespace:
    values = {
        "kv_cache_memory_bytes": None,
        "fleet_sized": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_lora": False,
        "lora_modules": None,
        "max_loras": 1,
    }
    return argparse.Namespace(**values | given)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 cores with 8 GiB free."""
    monkeypatch.setattr("workers.engine.vllm_cpu.available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr("workers.engine.vllm_cpu.cores", lambda: 8)


@pytest.mark.usefixtures("machine")
def test_engines_on_one_host_share_its_memory_and_cores() -> None:
    alone: dict[str, str] = {}
    shared = {"FLEET_WORKERS_ON_HOST": "2"}
    one, half = cpu_args(), cpu_args()
    fit_cpu(one, alone)
    fit_cpu(half, shared)
    assert (one.kv_cache_memory_bytes, half.kv_cache_memory_bytes) == (GIB, GIB // 2)
    assert (alone["OMP_NUM_THREADS"], shared["OMP_NUM_THREADS"]) == ("8", "4")
    assert alone["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"kv_cache_memory_bytes": 7}, {}),
        ({"fleet_sized": True}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
    ],
)
def test_a_users_memory_stays(given: dict[str, Any], environ: dict[str, str]) -> None:
    args = cpu_args(**given)
    fit_cpu(args, environ)
    assert args.kv_cache_memory_bytes == given.get("kv_cache_memory_bytes")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {}),
        ({"data_parallel_size": 2}, {}),
        ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "0,1"}),
    ],
)
def test_a_users_processes_and_threads_stay(given: dict[str, Any], environ: dict[str, str]) -> None:
    before = dict(environ)
    fit_cpu(cpu_args(**given), environ)
    assert environ == before


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("enabled", "modules", "slots", "chosen"),
    [(True, 1, 1, 2), (True, 3, 2, 4), (True, 2, 8, 8), (True, 0, 1, 1), (False, 1, 1, 1)],
)
def test_one_slot_for_adapters_stays_empty(enabled: bool, modules: int, slots: int, chosen: int) -> None:
    """vllm-project/vllm#48421: on a CPU requests without an adapter get the last slot's."""
    args = cpu_args(enable_lora=enabled, lora_modules=["m"] * modules or None, max_loras=slots)
    fit_cpu(args, {})
    assert args.max_loras == chosen


def test_a_kv_cache_has_bounds() -> None:
    assert kv_cache_bytes(1000 * GIB, 1) == KV_MAX_BYTES
    assert kv_cache_bytes(0, 1) == KV_MIN_BYTES


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_senseless_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(EngineStartError, match="FLEET_WORKERS_ON_HOST"):
        fit_cpu(cpu_args(), {"FLEET_WORKERS_ON_HOST": text})


def test_memory_is_counted_as_vllm_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "vllm.utils.cpu_resource_utils": SimpleNamespace(
            get_memory_node_info=lambda node: SimpleNamespace(available_memory=3 * GIB)
        ),
        "psutil": SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=8 * GIB)),
    }
    monkeypatch.setattr("workers.engine.vllm_cpu.import_module", modules.__getitem__)
    assert available_bytes() == 3 * GIB
    modules["vllm.utils.cpu_resource_utils"] = SimpleNamespace()
    assert available_bytes() == 8 * GIB
