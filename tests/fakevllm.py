"""Fakes of vLLM, as far as the adapter uses it, and a served model over them.

They have the signatures of vLLM 0.30 to 0.33 as read in its sources; the real one is driven in tests/vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.batch import SUCCESS_END
from workers.engine import Request
from workers.engine.vllm_doors import TRACKER_DOOR, Vllm, check_functions, door_of
from workers.engine.vllm_endpoints import build_endpoints
from workers.engine.vllm_serving import Serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.failures import FailureKind
    from workers.engine.media import Media

#: A version behind each door of the adapter, and between.
VERSIONS = ("0.30.0", "0.31.2", "0.32.0", "0.33.0")

SENTINEL = "a-secret-of-the-prompt"


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
