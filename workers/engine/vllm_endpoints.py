"""The endpoints of a started vLLM: which urls it serves, what reads a line for each, and what answers it.

Owns: the table of urls, and how the two endpoints that vLLM's batch runner lacks are asked. Must not know: rows.
On failure: `Endpoint.read` raises what vLLM's validators raise; `Endpoint.ask` answers with vLLM's own errors.

A handler is an attribute of the state that `init_app_state` fills, of one name in vLLM 0.30 to 0.33; where the model
lacks the task it is None or not there. `run_batch.build_endpoint_registry` takes them from such a state too, but keeps
it to itself, and with it the handlers of `/v1/completions` and `/v1/responses`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator, create_model
from pydantic_core import to_json

from workers.engine.vllm_doors import COMPLETIONS_URL, RESPONSES_URL, check_parameters

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Mapping

    from workers.engine.vllm_doors import Vllm

    Handler = Callable[..., Awaitable[Any]]

#: What a batch cannot honour, and what to say: a stream has nobody who reads it, and no response is kept.
_REFUSED = {
    "stream": "Request must not be sent in stream mode",  # as vLLM's batch runner says it
    "background": "`background` is not supported in a batch, where every request is waited for. Leave it out.",
    "previous_response_id": "`previous_response_id` is not supported in a batch, which keeps no response that could "
    "be continued. Send the whole conversation as `input`.",
    "conversation": "`conversation` is not supported in a batch, which keeps none. Send all of it as `input`.",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint; `handler` is None where the model lacks its task.

    `read` makes vLLM's request of a line, and raises for one that is none; `ask` awaits vLLM's answer to it:
    an object like its `BatchRequestOutput`.
    """

    url: str
    handler: Handler | None
    read: Callable[[str], Any]
    ask: Callable[[Any], Awaitable[Any]]


def find_endpoint(endpoints: Mapping[str, Endpoint], url: str) -> Endpoint | None:
    """Return the endpoint of a url. As in vLLM's batch runner, score and rerank go by the url's end."""
    for suffix in ("/score", "/rerank"):
        if url.endswith(suffix):
            return endpoints.get("/v1" + suffix)
    return endpoints.get(url)


async def build_endpoints(vllm: Vllm, engine: Any, args: Namespace) -> dict[str, Endpoint]:
    """Make the table of a started engine. Raises `EngineStartError` when vLLM is not what its version promises."""
    state = await vllm.build_handlers(engine, args)
    domains = getattr(args, "allowed_media_domains", None)

    def handler(name: str, method: str = "__call__") -> Handler | None:
        serving = getattr(state, name, None)
        return None if serving is None else getattr(serving, method)

    def fetched(found: Handler | None, *, is_translation: bool) -> Handler | None:
        wrap = vllm.run_batch.make_transcription_wrapper(is_translation=is_translation, allowed_media_domains=domains)
        return None if found is None else wrap(found)

    transcription = handler("openai_serving_transcription", "create_transcription")
    translation = handler("openai_serving_translation", "create_translation")
    handlers = {
        "/v1/chat/completions": handler("openai_serving_chat", "create_chat_completion"),
        COMPLETIONS_URL: handler("openai_serving_completion", "create_completion"),
        RESPONSES_URL: handler("openai_serving_responses", "create_responses"),
        "/v1/embeddings": handler("serving_embedding"),
        "/v1/score": handler("serving_scores"),
        "/v1/rerank": handler("serving_scores"),
        "/v1/audio/transcriptions": fetched(transcription, is_translation=False),
        "/v1/audio/translations": fetched(translation, is_translation=True),
    }
    return {url: _endpoint(vllm, url, found) for url, found in handlers.items()}


def _endpoint(vllm: Vllm, url: str, handler: Handler | None) -> Endpoint:
    runner = vllm.run_batch
    if url in vllm.bodies:
        if handler is not None:
            check_parameters(vllm.version, url, handler, ("request", "raw_request"))
        direct = _Direct(handler, vllm.bodies[url], runner)
        return Endpoint(url, handler, direct.read, direct.ask)

    def ask(request: Any) -> Awaitable[Any]:
        return vllm.door.call(runner.run_request, handler, request)

    return Endpoint(url, handler, runner.BatchRequestInput.model_validate_json, ask)


# -- what vLLM's batch runner does not serve --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Response:
    status_code: int
    body: Any = None
    request_id: str = field(default_factory=lambda: f"vllm-batch-{uuid.uuid4().hex}")


@dataclass(frozen=True, slots=True)
class _Output:
    """What vLLM's batch runner would have answered: as its `BatchRequestOutput`, whose bodies are other ones."""

    custom_id: str
    response: _Response
    error: Any = None
    id: str = field(default_factory=lambda: f"vllm-{uuid.uuid4().hex}")

    def model_dump_json(self) -> str:
        """Write the row as vLLM's HTTP API writes the body: by its aliases (entrypoints/openai/*/api_router.py)."""
        response = {
            "status_code": self.response.status_code,
            "request_id": self.response.request_id,
            "body": self.response.body.model_dump(mode="json", by_alias=True),
        }
        row = {"id": self.id, "custom_id": self.custom_id, "response": response, "error": self.error}
        return to_json(row, inf_nan_mode="null").decode("utf-8")


class _Direct:
    """A handler of vLLM's HTTP API that is asked without its batch runner."""

    def __init__(self, handler: Handler | None, body_type: Any, runner: Any) -> None:
        self._handler: Any = handler
        self._runner = runner
        #: As vLLM's `BatchRequestInput` does it: complaints name their fields alike, and the body is read as the HTTP
        #: API reads it, not in pydantic's stricter mode for JSON.
        body = Annotated[Any, PlainValidator(body_type.model_validate)]
        self._line_type: Any = create_model("BatchRequestInput", custom_id=(str, ...), body=(body, ...))

    def read(self, line: str) -> Any:
        """Make the request of a line; raises what vLLM's validators raise."""
        return self._line_type.model_validate_json(line)

    async def ask(self, request: Any) -> _Output:
        """Answer as vLLM's batch runner would (run_batch.run_request)."""
        answer = await self._answer(request.body)
        if isinstance(answer, self._runner.ErrorResponse):
            return _Output(request.custom_id, _Response(int(answer.error.code)), answer)
        return _Output(request.custom_id, _Response(200, answer))

    async def _answer(self, body: Any) -> Any:
        for name, reason in _REFUSED.items():
            if getattr(body, name, None):
                return self._runner.create_error_response(reason, param=name)
        if hasattr(body, "store"):
            # vLLM ignores it too, unless VLLM_ENABLE_RESPONSES_API_STORE is set: then it keeps responses for ever.
            body.store = False
        try:
            return await self._handler(body, None)
        except Exception as exc:  # noqa: BLE001 - as vLLM's batch runner: what a handler raises is an error row
            return self._runner.create_error_response(exc)
