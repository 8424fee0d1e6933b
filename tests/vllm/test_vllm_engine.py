"""The vLLM engine, driven for real on the CPU: rows, failures, cancellation, death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from common.errors import EngineDeadError
from common.failures import FailureKind
from tests.engines import body_of, case_lines, expect_case, failure_of
from tests.rows import parse_row, same_row
from workers.engine import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.engine import Reply
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


@pytest.mark.parametrize("case", ["I09", "I10", "I12", "I13", "I15", "I19", "I20", "I22", "I28", "I29", "I40", "I42"])
def test_a_replayed_report_has_the_right_outcome(
    ask: Callable[..., list[Reply]], engine: VllmEngine, case: str
) -> None:
    """tests/cases/README.md says what each of them is about. What ends an engine elsewhere must not end it here."""
    expect_case(CASES, case, ask(case_lines(CASES, case)))
    assert not engine.errored
    assert ask([chat()])[0].failure is None


def test_equal_request_ids_get_their_own_answers(ask: Callable[..., list[Reply]]) -> None:
    """vllm-project/vllm#10583: a request may name its own id, and two batches may name the same one."""
    lines = case_lines(CASES, "I40")
    together = ask(lines)
    for place, text in enumerate(lines):
        (alone,) = ask([text])
        assert same_row(alone.row, together[place].row)
    assert len({body_of(reply)["choices"][0]["message"]["content"] for reply in together}) == 3


def test_n_choices_are_one_row(ask: Callable[..., list[Reply]]) -> None:
    """vllm-project/vllm#10949."""
    rows = ask(case_lines(CASES, "I29"))
    assert [choice["index"] for choice in body_of(rows[0])["choices"]] == [0, 1, 2]


def test_two_batches_in_sequence_overlap_in_the_engine(engine: VllmEngine, loop: Any) -> None:
    """E06, vllm-project/vllm#17208 and #9757: with a loop for each batch the second one freezes, or runs one by one."""
    lines = case_lines(CASES, "base40")

    async def batch() -> tuple[int, int]:
        """How many succeeded, and how many the engine had in hand at most."""
        slots = asyncio.Semaphore(16)
        most = 0

        async def one(text: str) -> Reply:
            async with slots:
                return await engine.run(Request(text))

        async def watch() -> None:
            # What the engine itself has in hand, not what was sent to it; and not at replies, for a step has many.
            nonlocal most
            while True:
                most = max(most, engine._serving._engine.output_processor.get_num_unfinished_requests())
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        replies = await asyncio.gather(*(one(text) for text in lines))
        watching.cancel()
        return sum(reply.failure is None for reply in replies), most

    for _ in range(2):
        succeeded, most = loop.run(batch(), 120)
        assert succeeded == 40
        assert most > 4


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


def test_no_url_of_a_request_makes_the_worker_connect_to_its_own_machine(ask: Callable[..., list[Reply]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        case = (CASES / "I27.jsonl").read_text().replace("127.0.0.1:6379", here).splitlines()
        url = f"http://{here}/a?key=s3cret"
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"image_url": url},
            {"type": "input_image", "image_url": url},
            {"type": "audio_url", "audio_url": {"url": url}},
            # vLLM does not look at `type` when there is a `uuid`.
            {"type": "text", "text": "t", "uuid": "1", "video_url": {"url": url}},
        ]

        replies = ask([*case, *(chat(messages=[{"role": "user", "content": [part]}]) for part in parts)])

        with pytest.raises(BlockingIOError):
            listener.accept()
    assert [parse_row(reply.row)["custom_id"] for reply in replies if reply.failure is None] == ["au-chat"]
    assert {reply.failure for reply in replies[len(case) :]} == {FailureKind.MEDIA_REFUSED}
    assert not any(b"s3cret" in reply.row for reply in replies)


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
