"""The echo engine: deterministic answers without a model, and faults on request.

Owns: what echo answers, and the `echo` knobs that a request's body may carry. Part of the product: tests, CI and queue
benchmarks run on it. Every id of its rows starts with `echo-`, so nobody takes its rows for a model's.
Must not know: Celery, Redis, stores, and which worker it runs in (but to kill it, when a knob says so).
On failure: a request that it refuses is a `Reply` with a failure, whose message quotes nothing of the request but the
name of an unknown model. `contract.md` lists what it answers; refusals read as vLLM 0.32's (entrypoints/openai).

An answer depends on the request and on `Request.calls` alone; only ids and times differ between two runs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import os
import signal
import struct
import time
import uuid
from dataclasses import dataclass
from hashlib import shake_128
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import from_json, to_json

from common.batch import failed_row, has_nonfinite_number, http_error
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import Failure, FailureKind, kind_of_status
from workers.engine import Reply
from workers.engine.media import Media, MediaRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.engine import Request

CHAT_URL = "/v1/chat/completions"
EMBEDDINGS_URL = "/v1/embeddings"
SUPPORTED_URLS = (CHAT_URL, EMBEDDINGS_URL)

#: The "context length": a prompt of more words is refused.
MAX_PROMPT_WORDS = 8192

#: Numbers of a vector when the request does not say.
DIMENSIONS = 8

#: Choices multiply an answer that a line may make large; this is the OpenAI API's own bound for `n`.
_MAX_CHOICES = 128

_MAX_RESULT_BYTES = 64 * 1024 * 1024

#: What one number of a vector takes in a row, on average, with its comma.
_BYTES_PER_NUMBER = 9

#: How much of an unknown model's name a refusal repeats, in characters.
_MAX_NAME_CHARS = 200

#: The names that vLLM and the OpenAI clients give to HTTP errors; others go by their class, see `_failed`.
_ERROR_TYPES = {404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailableError"}


# -- what a body may hold ---------------------------------------------------------------------------------------------


class Knobs(BaseModel):
    """The faults that a request asks for. Strict: a misspelt knob must not become a test that tests nothing."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    status: Annotated[int, Field(ge=400, le=599)] | None = None
    times: Annotated[int, Field(ge=0)] | None = None
    raise_: Annotated[bool | None, Field(alias="raise")] = None
    kill: bool | None = None
    engine_dead: bool | None = None
    hang: bool | None = None
    result_bytes: Annotated[int, Field(ge=0, le=_MAX_RESULT_BYTES)] | None = None
    nan: bool | None = None


_KNOB_NAMES = ", ".join(field.alias or name for name, field in Knobs.model_fields.items())
_NO_KNOBS = Knobs()


class _Body(BaseModel):
    """What chat and embeddings share. As with vLLM, null is unset and an unknown field is ignored."""

    model: str | None = None
    stream: bool | None = None
    echo: Knobs | None = None


class _Part(BaseModel):
    type: str
    text: str | None = None


class _Message(BaseModel):
    role: str
    content: str | list[str | _Part] | None = None


class _Chat(_Body):
    """Bounds are vLLM's, so that a file that is tried on echo first meets the same refusals."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


_Tokens = Annotated[list[StrictInt], Field(min_length=1)]


class _Embeddings(_Body):
    input: str | Annotated[list[str], Field(min_length=1)] | _Tokens | Annotated[list[_Tokens], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=8192)] | None = None


#: For these, pydantic reports one problem per alternative, none of which says what is wanted.
_ALTERNATIVES = {
    "content": "a string, a list of parts, or null",
    "input": "a string, a list of strings, a list of tokens or a list of token lists, none of them empty",
}


class _RefusedError(ValueError):
    """The request is at fault; becomes a failed row and never leaves this module, but for `echo_answer`."""

    def __init__(
        self, message: str, *, kind: FailureKind = FailureKind.INVALID_REQUEST, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message)
        self.param = param


_BodyT = TypeVar("_BodyT", bound=_Body)


def _read(body_type: type[_BodyT], body: object) -> _BodyT:
    try:
        return body_type.model_validate(body)
    except ValidationError as exc:
        # One of what may be thousands: a message that grows with the input is vllm-project/vllm#49239.
        problem = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(name) for name in problem["loc"]]
        message = _explain(place, problem["type"], problem["msg"])
        raise _RefusedError(message, param=place[0] if place else None) from None


def _explain(place: list[str], problem: str, message: str) -> str:
    if problem == "extra_forbidden":  # Only knobs forbid extras, and the place would name the user's own key.
        return f"echo: unknown knob; the knobs are {_KNOB_NAMES}"
    for depth, name in enumerate(place):
        if name in _ALTERNATIVES:
            return f"{'.'.join(place[: depth + 1])}: must be {_ALTERNATIVES[name]}"
    return f"{'.'.join(place)}: {message}"


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """The part of a response body that tells one endpoint from the other, and what it counts."""

    object: str
    payload: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int


def echo_answer(line: str) -> str:
    """The text of each choice that the engine answers to this chat request, when it answers it: the tests' oracle.

    Raises `ValueError` for a request that has no text as its answer.
    """
    request = from_json(line)
    if request["url"] != CHAT_URL:
        raise ValueError("only a chat request is answered with text")
    chat = _read(_Chat, request["body"])
    return _answer_text(chat, [_text(message) for message in chat.messages])[0]


def _text(message: _Message) -> str:
    """The message's text; parts are joined as vLLM joins them. What is no text (an image) counts nothing."""
    content = message.content
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, str) else part.text for part in content or ()]
    return "\n".join(part for part in parts if part is not None)


def _answer_text(chat: _Chat, texts: list[str]) -> tuple[str, int, bool]:
    """The answer to a chat whose messages have these texts: the text, its words, and whether it was cut."""
    knobs = chat.echo or _NO_KNOBS
    if knobs.result_bytes is not None:
        return "x" * (knobs.result_bytes // (chat.n or 1)), 1, False
    text = ""
    for message, said in zip(chat.messages, texts, strict=True):
        if message.role == "user":
            text = said
    limit = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    # No prompt has more words than this, and `str.split` takes no number beyond a C integer.
    limit = MAX_PROMPT_WORDS if limit is None else min(limit, MAX_PROMPT_WORDS)
    words = text.split(None, limit)
    if len(words) <= limit:
        return text, len(words), False
    # The rest keeps its spaces, so the answer is what stands before it, spaces between its words included.
    return text[: -len(words[-1])].rstrip(), limit, True


def _check_length(words: int) -> None:
    if words > MAX_PROMPT_WORDS:
        raise _RefusedError(
            f"This model's maximum context length is {MAX_PROMPT_WORDS} tokens (of the echo engine: words). However, "
            f"your prompt contains {words}. Please reduce the length of the input prompt."
        )


def _chat(chat: _Chat) -> _Answer:
    texts = [_text(message) for message in chat.messages]
    prompt_words = sum(len(text.split()) for text in texts)
    _check_length(prompt_words)
    text, words, is_cut = _answer_text(chat, texts)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _logprobs(chat, text),
            "finish_reason": "length" if is_cut else "stop",
        }
        for index in range(chat.n or 1)
    ]
    return _Answer("chat.completion", {"choices": choices}, prompt_words, words * len(choices))


def _logprobs(chat: _Chat, text: str) -> dict[str, Any] | None:
    if chat.echo is not None and chat.echo.nan:
        return {"content": [_logprob("nan", math.nan, ranked=False), _logprob("inf", -math.inf, ranked=False)]}
    if not chat.logprobs:
        return None
    ranked = bool(chat.top_logprobs)
    return {"content": [_logprob(word, 0.0, ranked=ranked) for word in text.split()]}


def _logprob(token: str, logprob: float, *, ranked: bool) -> dict[str, Any]:
    entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
    return {**entry, "top_logprobs": [entry] if ranked else []}


def _embeddings(wanted: _Embeddings) -> _Answer:
    items = _items(wanted.input)
    counts = [len(item.split()) if isinstance(item, str) else len(item) for item in items]
    _check_length(max(counts))
    knobs = wanted.echo or _NO_KNOBS
    dimensions = wanted.dimensions or DIMENSIONS
    if knobs.result_bytes is not None:
        dimensions = max(1, knobs.result_bytes // len(items) // _BYTES_PER_NUMBER)
    data: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        vector = _vector(item, dimensions)
        if knobs.nan:
            vector[:2] = [math.nan, -math.inf]
        packed = _pack(vector) if wanted.encoding_format == "base64" else vector
        data.append({"index": index, "object": "embedding", "embedding": packed})
    return _Answer("list", {"data": data}, sum(counts), 0)


def _items(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(
        value[0], int
    ):  # One list of tokens is one item; pydantic made sure that the others are integers too.
        return [value]
    return cast("list[str | list[int]]", value)


def _vector(item: str | list[int], dimensions: int) -> list[float]:
    """Numbers in [-1, 1) that a float32 holds exactly, so that both encodings give the same vector."""
    seed = b"text " + item.encode() if isinstance(item, str) else b"tokens " + to_json(item)
    return [(byte - 128) / 128 for byte in shake_128(seed).digest(dimensions)]


def _pack(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


# -- the engine -------------------------------------------------------------------------------------------------------


class EchoEngine:
    """An `Engine` that needs no model.

    `latency_s` and `tokens_per_s` (0: at once) delay every answer: `latency_s + completion tokens / tokens_per_s`; a
    request's own `latency_s` knob replaces the whole delay. A refused request is answered at once.
    """

    name = "echo"
    default_inflight = 256

    def __init__(
        self,
        model: str,
        *,
        latency_s: float = 0.0,
        tokens_per_s: float = 0.0,
        served_names: Sequence[str] = (),
        media: MediaRules | None = None,
    ) -> None:
        self.models: tuple[str, ...] = tuple(served_names) or (model,)
        self.endpoints: tuple[str, ...] = SUPPORTED_URLS
        # Nothing is fetched: no answer depends on it.
        self._media = Media(media or MediaRules())
        self._latency_s = latency_s
        self._tokens_per_s = tokens_per_s
        self._errored = False
        self._stopped = False
        self._waiting: set[asyncio.Future[None]] = set()

    @classmethod
    def from_args(cls, model: str, args: Sequence[str], media: MediaRules | None = None) -> EchoEngine:
        """The engine that these command-line flags describe.

        Raises `EngineStartError` for flags that are not echo's.
        """
        parser = _Flags(prog="echo", add_help=False, allow_abbrev=False)
        parser.add_argument("--latency-s", type=_amount, default=0.0)
        parser.add_argument("--tokens-per-s", type=_amount, default=0.0)
        parser.add_argument("--served-model-name", nargs="+", default=())
        flags = parser.parse_args(list(args))
        return cls(
            model,
            latency_s=flags.latency_s,
            tokens_per_s=flags.tokens_per_s,
            served_names=flags.served_model_name,
            media=media,
        )

    @property
    def errored(self) -> bool:
        """True from the moment the engine is dead."""
        return self._errored

    async def start(self) -> None:
        """Nothing to load."""

    async def run(self, request: Request) -> Reply:
        """Answer one request that `common.batch.parse_line` accepted. Plain requests are answered without a wait."""
        self._check_able()
        line = from_json(request.line)
        custom_id: str = line["custom_id"]
        admitted = await self._media.admit(request)
        if isinstance(admitted, Failure):
            return _failed(custom_id, admitted)
        try:
            knobs, answer = self._answer(request.line, line["url"], line["body"])
        except _RefusedError as refused:
            return _failed(custom_id, refused.failure, param=refused.param)
        delay_s = self._delay_s(knobs, answer)
        if delay_s > 0:
            await self._wait(delay_s)
        if knobs is not _NO_KNOBS:
            await self._misbehave(knobs)
            if knobs.status is not None and (knobs.times is None or request.calls < knobs.times):
                failure = Failure(kind_of_status(knobs.status), f"the echo engine was asked to answer {knobs.status}")
                return _failed(custom_id, failure, status=knobs.status)
        return self._answered(custom_id, answer)

    async def check_health(self) -> None:
        """Return when the engine can answer; raise `EngineDeadError` when it is dead."""
        if self._errored:
            raise EngineDeadError

    async def stop(self) -> None:
        """End what waits, with `EngineAbortedError`."""
        self._stopped = True
        self._wake_all()

    def _check_able(self) -> None:
        if self._errored:
            raise EngineDeadError
        if self._stopped:
            raise EngineAbortedError

    def _answer(self, text: str, url: str, body: dict[str, Any]) -> tuple[Knobs, _Answer]:
        if url not in SUPPORTED_URLS:
            raise _RefusedError(
                f"This URL is not supported. Supported endpoints: {', '.join(SUPPORTED_URLS)}.",
                kind=FailureKind.UNSUPPORTED_ENDPOINT,
                param="url",
            )
        if has_nonfinite_number(text):
            raise _RefusedError("a number of the request is too large for a float")
        if url == CHAT_URL:
            chat = _read(_Chat, body)
            self._check(chat)
            return chat.echo or _NO_KNOBS, _chat(chat)
        wanted = _read(_Embeddings, body)
        self._check(wanted)
        return wanted.echo or _NO_KNOBS, _embeddings(wanted)

    def _check(self, body: _Body) -> None:
        if body.stream:
            raise _RefusedError("Request must not be sent in stream mode", param="stream")
        # No name means the model served, as in vLLM.
        if body.model and body.model not in self.models:
            raise _RefusedError(
                f"The model `{body.model[:_MAX_NAME_CHARS]}` does not exist.",
                kind=FailureKind.MODEL_NOT_FOUND,
                param="model",
            )

    def _delay_s(self, knobs: Knobs, answer: _Answer) -> float:
        if knobs.latency_s is not None:
            return knobs.latency_s
        if self._tokens_per_s > 0:
            return self._latency_s + answer.completion_tokens / self._tokens_per_s
        return self._latency_s

    async def _misbehave(self, knobs: Knobs) -> None:
        if knobs.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if knobs.engine_dead:
            self._errored = True
            self._wake_all()
            raise EngineDeadError
        if knobs.raise_:
            raise RuntimeError("the echo engine was asked to raise")
        if knobs.hang:
            await self._wait(None)

    async def _wait(self, delay_s: float | None) -> None:
        """Sleep, for ever when None, but no longer than the engine lives.

        `asyncio.sleep` would outlive the engine, and racing it against an event costs a task for each request.
        """
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = None if delay_s is None else loop.call_later(delay_s, _wake, waiter)
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            if timer is not None:
                timer.cancel()
        self._check_able()

    def _wake_all(self) -> None:
        for waiter in self._waiting:
            _wake(waiter)

    def _answered(self, custom_id: str, answer: _Answer) -> Reply:
        unique = uuid.uuid4().hex
        body = {
            "id": f"echo-{unique}",
            "object": answer.object,
            "created": int(time.time()),
            "model": self.models[0],
            **answer.payload,
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }
        row = {
            "id": f"echo-{unique}",
            "custom_id": custom_id,
            "response": {"status_code": 200, "request_id": f"echo-batch-{unique}", "body": body},
            "error": None,
        }
        return Reply(
            to_json(row, inf_nan_mode="null"),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
        )


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _failed(custom_id: str, failure: Failure, *, status: int | None = None, param: str | None = None) -> Reply:
    status = failure.kind.status if status is None else status
    type_ = _ERROR_TYPES.get(
        status, "BadRequestError" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "InternalServerError"
    )
    answered = http_error(failure, type_=type_, param=param, code=status)
    return Reply(failed_row(custom_id, failure, answered=answered, status_code=status, prefix="echo"), failure.kind)


class _Flags(argparse.ArgumentParser):
    """A parser that raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise EngineStartError(
            f"the echo engine cannot use its flags ({message}); it takes --latency-s X, --tokens-per-s Y and "
            "--served-model-name NAME..."
        )


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError("must be a number that is not negative")
    return value
