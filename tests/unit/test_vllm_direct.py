"""The endpoints that vLLM's batch runner does not serve, answered by vLLM's own handlers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from common.batch import SUCCESS_END
from common.failures import FailureKind
from tests.fakevllm import (
    BODIES,
    SENTINEL,
    Answered,
    Runner,
    ask,
    chat,
    direct,
)


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
