"""What becomes of the answers of vLLM's batch handlers, and of lines that vLLM cannot read."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from common.failures import MAX_MESSAGE_BYTES, Failure, FailureKind
from tests.fakevllm import (
    SENTINEL,
    Chat,
    Choice,
    ErrorInfo,
    ErrorResponse,
    Output,
    Usage,
    answer,
    ask,
    chat,
    failed,
    refuse_all,
    serve,
)
from workers.engine import Request
from workers.engine.media import Media
from workers.engine.vllm_reasons import explain_unreadable


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
