"""The vLLM engine, driven for real on the CPU: rows, failures, cancellation, death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from common.batch import SUCCESS_END, custom_id_of
from common.errors import EngineDeadError
from common.failures import MAX_MESSAGE_BYTES, FailureKind
from tests.rows import parse_row, same_row
from workers.engine import Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.engine.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    # vLLM, torch and transformers warn of each other's deprecations.
    pytest.mark.filterwarnings("default"),
]

CASES = Path(__file__).resolve().parents[1] / "cases"
CHAT_URL = "/v1/chat/completions"
GENERATE_URLS = (CHAT_URL, "/v1/completions", "/v1/responses")


def chat(custom_id: str = "a", text: str = "Name one colour.", **body: Any) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": "test-model", "messages": messages, "max_tokens": 8, "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body})


def chats(count: int, **body: Any) -> list[str]:
    return [chat(f"c-{i}", f"Tell me something about the number {i}.", **body) for i in range(count)]


@pytest.fixture
def ask(engine: VllmEngine, loop: Any) -> Callable[[list[str]], list[Reply]]:
    """Answer lines, all at once; every reply is checked against what is promised of every row."""

    def run(lines: list[str]) -> list[Reply]:
        async def together() -> list[Reply]:
            return await asyncio.gather(*(engine.run(Request(line)) for line in lines))

        replies: list[Reply] = loop.run(together(), timeout_s=120)
        for line, reply in zip(lines, replies, strict=True):
            check_row(line, reply)
        return replies

    return run


def check_row(line: str, reply: Reply) -> None:
    row = parse_row(reply.row)
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert b"\n" not in reply.row
    assert row["id"].startswith("vllm-")
    assert row["custom_id"] == custom_id_of(line)
    assert row["response"]["request_id"].startswith("vllm-batch-")
    assert reply.row.endswith(SUCCESS_END) == (reply.failure is None)
    if reply.failure is None:
        assert row["response"]["status_code"] == 200
        return
    assert row["error"]["code"] == reply.failure.code
    answered = row["response"]["body"]["error"]
    assert answered.keys() == {"message", "type", "param", "code"}
    assert answered["code"] == row["response"]["status_code"] >= 400
    assert answered["message"] == row["error"]["message"]
    assert len(answered["message"].encode()) <= MAX_MESSAGE_BYTES


def failure_of(reply: Reply) -> str:
    return str(parse_row(reply.row)["error"]["message"])


def test_an_engine_says_what_it_serves(engine: VllmEngine, loop: Any) -> None:
    assert (engine.name, engine.models) == ("vllm", ("test-model",))
    assert engine.endpoints == GENERATE_URLS
    assert engine.default_inflight >= 256
    assert not engine.errored
    loop.run(engine.check_health())


def test_the_engine_is_one_process_with_every_core(engine: VllmEngine) -> None:
    """On a CPU a worker process of the engine would cost 5 s of start and bind itself to all cores but one."""
    assert engine is not None
    names = [child.name() for child in psutil.Process().children(recursive=True)]
    assert sum("Engine" in name for name in names) == 1
    assert not any("Worker" in name for name in names)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "FLEET_ENGINE_REASON_FILE" not in os.environ


def test_a_good_row_counts_its_tokens(ask: Callable[..., list[Reply]]) -> None:
    (reply,) = ask([chat(max_tokens=5, ignore_eos=True)])
    row = parse_row(reply.row)
    usage = row["response"]["body"]["usage"]
    assert reply.failure is None
    assert (reply.prompt_tokens, reply.completion_tokens) == (usage["prompt_tokens"], 5)
    assert row["response"]["body"]["model"] == "test-model"


def test_log_probabilities_of_minus_infinity_are_strict_json(ask: Callable[..., list[Reply]]) -> None:
    """A token that the parameters rule out has the log-probability -inf, which JSON has no word for."""
    (reply,) = ask([chat(logprobs=True, top_logprobs=5, max_tokens=2, temperature=1, allowed_token_ids=[28, 29])])
    assert reply.failure is None
    content = parse_row(reply.row)["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 2


def test_a_json_schema_shapes_the_answer(ask: Callable[..., list[Reply]]) -> None:
    """Also where xgrammar's triton was left out of the installation (deploy/cpu/requirements.py)."""
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    (reply,) = ask([chat(response_format=form, max_tokens=60)])
    message = parse_row(reply.row)["response"]["body"]["choices"][0]["message"]
    assert json.loads(message["content"])["c"] in ("red", "blue")


@pytest.mark.parametrize("case", ["I09", "I10", "I12", "I13", "I42"])
def test_a_replayed_report_has_the_right_outcome(ask: Callable[..., list[Reply]], case: str) -> None:
    """tests/cases/README.md says what each of them is about."""
    lines = (CASES / f"{case}.jsonl").read_text(encoding="utf-8").split("\n")
    replies = ask([line for line in lines if line.strip()])
    (expected,) = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))[case]
    found = [[parse_row(reply.row)["custom_id"], "ok" if reply.failure is None else "err"] for reply in replies]
    assert [custom_id for custom_id, _ in found] == [custom_id for custom_id, _ in expected["rows"]]
    for row, (custom_id, outcome) in zip(found, expected["rows"], strict=True):
        assert outcome in ("any", row[1]), custom_id


def test_stream_is_refused_by_that_word(ask: Callable[..., list[Reply]]) -> None:
    (reply,) = ask([chat(stream=True)])
    assert reply.failure is FailureKind.INVALID_REQUEST
    assert "stream" in failure_of(reply)


@pytest.mark.parametrize("url", ["/chat/completions", "/v1/completion", ""])
def test_a_url_that_is_not_served_names_those_that_are(ask: Callable[..., list[Reply]], url: str) -> None:
    (reply,) = ask([chat().replace(CHAT_URL, url)])
    assert reply.failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert failure_of(reply).endswith(f"supported: {', '.join(GENERATE_URLS)}.")


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/rerank"])
def test_an_endpoint_that_the_model_lacks_names_those_that_it_has(ask: Callable[..., list[Reply]], url: str) -> None:
    body = {"model": "test-model", "input": "x", "text_1": "x", "text_2": "y", "query": "x", "documents": ["y"]}
    (reply,) = ask([json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})])
    assert reply.failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert "does not support" in failure_of(reply)
    assert failure_of(reply).endswith(f"supported: {', '.join(GENERATE_URLS)}.")


def test_another_model_is_a_404(ask: Callable[..., list[Reply]]) -> None:
    (reply,) = ask([chat(model="another")])
    assert reply.failure is FailureKind.MODEL_NOT_FOUND
    error = parse_row(reply.row)["response"]["body"]["error"]
    assert (error["code"], error["type"], error["param"]) == (404, "NotFoundError", "model")


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -3},
        {"max_tokens": -1},
        {"max_tokens": 100_000},
        {"min_tokens": 9, "max_tokens": 4},
        {"messages": []},
        {"messages": "SENTINEL"},
        {"messages": [{"content": "SENTINEL"}]},
        {"top_logprobs": -7, "logprobs": True},
        {"structured_outputs": "SENTINEL"},
        {"tool_choice": 5, "tools": "SENTINEL"},
        {"seed": 2**70},
        {"logit_bias": {"999999999": 1}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
    ],
    ids=",".join,
)
def test_bad_parameters_are_the_rows_own_fault(ask: Callable[..., list[Reply]], body: dict[str, Any]) -> None:
    """And of their neighbours' rows nothing changes."""
    before, reply, after = ask([chat("before"), chat("bad", **body), chat("after")])
    assert (before.failure, reply.failure, after.failure) == (None, FailureKind.INVALID_REQUEST, None)
    assert "SENTINEL" not in failure_of(reply)


def test_64_at_once_have_their_own_answers(ask: Callable[..., list[Reply]]) -> None:
    lines = chats(64, max_tokens=16)
    together = ask(lines)
    assert all(reply.failure is None for reply in together)
    for place in (0, 31, 63):
        (alone,) = ask([lines[place]])
        assert same_row(alone.row, together[place].row)


def test_a_cancelled_request_never_returns_a_row(engine: VllmEngine, loop: Any, ask: Callable[..., Any]) -> None:
    async def cancel() -> list[bool]:
        lines = chats(8, max_tokens=800, ignore_eos=True)
        tasks = [asyncio.create_task(engine.run(Request(line))) for line in lines]
        await asyncio.wait({asyncio.create_task(engine.run(Request(chat())))})  # by now the others run too
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks]

    assert loop.run(cancel()) == [True] * 8
    assert ask([chat()])[0].failure is None


def test_a_killed_engine_is_dead_and_never_a_row(engine: VllmEngine, loop: Any) -> None:
    """The last test of the module: it ends the engine."""
    (core,) = [child for child in psutil.Process().children(recursive=True) if "Engine" in child.name()]

    async def outlive() -> list[Any]:
        lines = chats(16, max_tokens=900, ignore_eos=True)
        tasks = [asyncio.create_task(engine.run(Request(line))) for line in lines]
        await engine.run(Request(chat()))
        core.send_signal(signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = loop.run(outlive())
    assert {type(outcome) for outcome in outcomes} == {EngineDeadError}
    assert engine.errored
    for call in (engine.check_health, lambda: engine.run(Request(chat()))):
        with pytest.raises(EngineDeadError):
            loop.run(call())
    start = time.monotonic()
    loop.run(engine.stop())
    assert time.monotonic() - start < 10
    assert engine.errored
