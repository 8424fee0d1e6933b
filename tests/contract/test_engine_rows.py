"""What every engine owes the fleet: strict rows that can be counted by their end, and an honest end of its own.

Runs once for each entry of `SUBJECTS`. Another engine joins by adding an entry: how to make one that serves `MODEL`
(skipping where it cannot run), what makes a request long, and how to kill it. An engine is started once for the module,
since a real one takes its time; tests that end an engine make their own.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from common.batch import SUCCESS_END, parse_line, row_failed
from common.errors import EngineDeadError
from common.failures import MAX_MESSAGE_BYTES, FailureKind
from workers.engine import Engine, Reply, Request
from workers.engine.echo import EchoEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

MODEL = "test-model"

#: A hung engine must fail the test, not the run.
LIMIT_S = 120

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Subject:
    """One engine under test."""

    make: Callable[[], Engine]
    #: What to add to a body so that its answer takes minutes.
    long: dict[str, Any]
    kill: Callable[[Engine], Awaitable[None]]


async def kill_echo(engine: Engine) -> None:
    """Kill an echo engine by the knob for it."""
    with pytest.raises(EngineDeadError):
        await engine.run(Request(chat(echo={"engine_dead": True})))


SUBJECTS = {
    "echo": Subject(make=lambda: EchoEngine(MODEL), long={"echo": {"latency_s": 600}}, kill=kill_echo),
}


def line(
    *, custom_id: str = "r-1", url: str = "/v1/chat/completions", body: dict[str, Any], ascii_only: bool = True
) -> str:
    """A line as a worker gets it: one that passed at submit."""
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return parse_line(json.dumps(fields, ensure_ascii=ascii_only).encode()).text


def chat(custom_id: str = "r-1", text: str = "Name one colour.", *, ascii_only: bool = True, **body: Any) -> str:
    """A chat line."""
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        **body,
    }
    return line(custom_id=custom_id, body=fields, ascii_only=ascii_only)


@dataclass(frozen=True, slots=True)
class Started:
    """A started engine with the event loop that owns it."""

    subject: Subject
    engine: Engine
    loop: asyncio.AbstractEventLoop

    def wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run this on the engine's loop, within the limit."""
        return self.loop.run_until_complete(asyncio.wait_for(work, LIMIT_S))

    def reply(self, text: str) -> Reply:
        """The reply to one line."""
        return self.wait(self.engine.run(Request(text)))


def started(subject: Subject) -> Iterator[Started]:
    """An engine of this kind, started, and stopped at the end."""
    loop = asyncio.new_event_loop()
    try:
        subject_started = Started(subject, subject.make(), loop)
        try:
            subject_started.wait(subject_started.engine.start())
            yield subject_started
        finally:
            subject_started.wait(subject_started.engine.stop())
    finally:
        loop.close()


@pytest.fixture(scope="module", params=SUBJECTS)
def shared(request: pytest.FixtureRequest) -> Iterator[Started]:
    """The engine that the tests of this module share; none of them may end it."""
    yield from started(SUBJECTS[request.param])


@pytest.fixture(params=SUBJECTS)
def own(request: pytest.FixtureRequest) -> Iterator[Started]:
    """An engine for one test, which may end it."""
    yield from started(SUBJECTS[request.param])


def strict(row: bytes) -> dict[str, Any]:
    """Read a row as strict JSON in UTF-8: Python's reader takes NaN and Infinity, which are not JSON."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    value = json.loads(row.decode("utf-8"), parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def check(reply: Reply, custom_id: str = "r-1") -> dict[str, Any]:
    """Hold a reply to what is owed for every row, success or failure; gives the row."""
    row = strict(reply.row)
    assert b"\n" not in reply.row
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["custom_id"] == custom_id
    assert (reply.failure is None) == (row["error"] is None) == reply.row.endswith(SUCCESS_END)
    assert row_failed(reply.row) == (reply.failure is not None)
    if reply.failure is None:
        assert row["response"]["status_code"] == 200
        usage = row["response"]["body"]["usage"]
        assert reply.prompt_tokens == usage["prompt_tokens"]
        assert reply.completion_tokens == usage.get("completion_tokens", 0)
    else:
        check_failed(row, reply.failure)
        assert (reply.prompt_tokens, reply.completion_tokens) == (0, 0)
    return row


def check_failed(row: dict[str, Any], failure: FailureKind) -> None:
    """Hold a failed row that the endpoint answered to the contract's shape."""
    assert row["error"]["code"] == failure.code
    assert row["error"]["message"]
    assert len(row["error"]["message"].encode()) <= MAX_MESSAGE_BYTES
    response = row["response"]
    assert response["status_code"] >= 400
    assert response["request_id"]
    error = response["body"]["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] == response["status_code"]
    assert len(error["message"].encode()) <= MAX_MESSAGE_BYTES


def test_an_engine_says_who_it_is(shared: Started) -> None:
    """A started engine knows its name, the names it serves, and how much to give it."""
    assert shared.engine.name in SUBJECTS
    assert MODEL in shared.engine.models
    assert "/v1/chat/completions" in shared.engine.endpoints
    assert shared.engine.default_inflight > 0
    assert not shared.engine.errored
    shared.wait(shared.engine.check_health())


def test_a_request_is_answered(shared: Started) -> None:
    """A row of success with text, and tokens counted."""
    reply = shared.reply(chat())
    row = check(reply)
    assert reply.failure is None
    assert isinstance(row["response"]["body"]["choices"][0]["message"]["content"], str)
    assert reply.prompt_tokens > 0
    assert reply.completion_tokens > 0


@pytest.mark.parametrize("ascii_only", [True, False], ids=["escaped", "raw"])
@pytest.mark.parametrize(
    "custom_id",
    [
        "日本😀",
        "sep-\u2028-\u2029-\u0085-id",
        'quote"back\\slash/',
        'forged"error":null}',
        "x" * 5000,
        " edges ",
        "nul-\u0000-tab-\t-lf-\n",
        "e\u0301 is not é",
        "17",
    ],
    ids=["wide", "separators", "quotes", "forged", "5000", "edges", "controls", "combining", "digits"],
)
def test_an_odd_id_comes_back_unchanged(shared: Started, custom_id: str, *, ascii_only: bool) -> None:
    """In rows of success and in failed ones."""
    good = shared.reply(chat(custom_id, ascii_only=ascii_only))
    assert check(good, custom_id)["error"] is None
    bad = shared.reply(chat(custom_id, ascii_only=ascii_only, model="no-such-model"))
    assert check(bad, custom_id)["error"] is not None


@pytest.mark.parametrize("text", ["left\u2028right", "\u0085", "a\x00b", "😀 é \ufffe", "\x7f\x1b[31m"], ids=ascii)
def test_odd_text_makes_a_strict_row(shared: Started, text: str) -> None:
    """Whatever the answer repeats of it."""
    check(shared.reply(chat(text=text)))
    check(shared.reply(chat(text=text, ascii_only=False)))


def test_logprobs_make_a_strict_row(shared: Started) -> None:
    """A token that cannot come has a logprob of -inf, which JSON lacks: vllm-project/vllm#10234."""
    reply = shared.reply(chat(logprobs=True, top_logprobs=5))
    row = check(reply)
    assert reply.failure is None
    assert row["response"]["body"]["choices"][0]["logprobs"]["content"]


def test_null_is_unset(shared: Started) -> None:
    """Clients write every field they know: vllm-project/vllm#19862."""
    unset: dict[str, Any] = dict.fromkeys(
        ("stop", "seed", "tools", "response_format", "top_p", "logprobs", "n", "stream")
    )
    assert check(shared.reply(chat(**unset)))["error"] is None


BAD_BODIES: dict[str, dict[str, Any]] = {
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -5},
    "temperature negative": {"temperature": -3},
    "messages null": {"messages": None},
    "messages empty": {"messages": []},
    "no role": {"messages": [{"content": "hi"}]},
    "n 0": {"n": 0},
    "seed beyond int64": {"seed": 2**63},
    "top_logprobs huge": {"logprobs": True, "top_logprobs": 100_000},
    "stream": {"stream": True},
    "too long": {"messages": [{"role": "user", "content": "word " * 40_000}]},
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_request_is_a_400_row(shared: Started, body: dict[str, Any]) -> None:
    """One bad request never ends the batch, and never reads as an engine at fault."""
    reply = shared.reply(chat(**body))
    row = check(reply)
    assert reply.failure is FailureKind.INVALID_REQUEST
    assert row["response"]["status_code"] == 400


def test_a_number_too_large_for_a_float_is_a_400_row(shared: Started) -> None:
    """It is JSON, so it passes at submit; sampled with, it would be infinity: sgl-project/sglang PR 28153."""
    text = chat(top_p=0.5).replace("0.5", "1e400")
    assert parse_line(text.encode()).text == text
    reply = shared.reply(text)
    check(reply)
    assert reply.failure is FailureKind.INVALID_REQUEST


@pytest.mark.parametrize("url", ["/chat/completions", "http://localhost:8000/v1/chat/completions", "/v1/responses", ""])
def test_an_unsupported_url_is_a_400_row_that_lists_the_supported(shared: Started, url: str) -> None:
    """The user reads what to write instead."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    reply = shared.reply(line(url=url, body=body))
    row = check(reply)
    assert reply.failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert row["response"]["status_code"] == 400
    assert row["error"]["message"].endswith(f"{', '.join(shared.engine.endpoints)}.")


def test_another_model_is_a_404_row(shared: Started) -> None:
    """As vLLM's HTTP API answers it."""
    reply = shared.reply(chat(model="no-such-model"))
    row = check(reply)
    assert reply.failure is FailureKind.MODEL_NOT_FOUND
    assert row["response"]["status_code"] == 404
    assert row["response"]["body"]["error"]["param"] == "model"


def test_a_request_with_thousands_of_faults_gets_a_bounded_message(shared: Started) -> None:
    """Validators repeat their input for each fault: vllm-project/vllm#49239."""
    reply = shared.reply(chat(messages=[{"role": 7, "content": {"bad": "z" * 100}}] * 2000))
    check(reply)
    assert reply.failure is FailureKind.INVALID_REQUEST
    assert len(reply.row) < 3 * MAX_MESSAGE_BYTES


def test_requests_at_once_get_their_own_rows(shared: Started) -> None:
    """Good and bad ones, equal ids included, as two batches may bring them."""

    async def scenario() -> None:
        texts = [
            *(chat(f"r-{k}", f"number {k}") for k in range(20)),
            *(chat(f"bad-{k}", model="no-such-model") for k in range(5)),
            chat("r-0", "number 0"),
        ]
        replies = await asyncio.gather(*(shared.engine.run(Request(text)) for text in texts))
        rows = [check(reply, json.loads(text)["custom_id"]) for text, reply in zip(texts, replies, strict=True)]
        assert [row["error"] is None for row in rows] == [True] * 20 + [False] * 5 + [True]
        assert len({row["id"] for row in rows}) == len(rows)

    shared.wait(scenario())


def test_requests_overlap(shared: Started) -> None:
    """A long request does not hold up a short one, and cancelling it raises CancelledError and harms nobody."""

    async def scenario() -> None:
        long = asyncio.create_task(shared.engine.run(Request(chat("long", max_tokens=4000, **shared.subject.long))))
        await asyncio.sleep(0)
        check(await shared.engine.run(Request(chat("short"))), "short")
        assert not long.done()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert long.cancelled()
        check(await shared.engine.run(Request(chat("after"))), "after")
        await shared.engine.check_health()

    shared.wait(scenario())


def test_a_dead_engine_makes_no_rows(own: Started) -> None:
    """What ran, and what comes later, raises: a row would drain the queue into failures (vllm-project/vllm#20056)."""

    async def scenario() -> None:
        running = asyncio.create_task(own.engine.run(Request(chat("long", max_tokens=4000, **own.subject.long))))
        await asyncio.sleep(0)
        await own.subject.kill(own.engine)
        with pytest.raises(EngineDeadError):
            await running
        assert own.engine.errored
        with pytest.raises(EngineDeadError):
            await own.engine.run(Request(chat()))
        with pytest.raises(EngineDeadError):
            await own.engine.run(Request(chat(model="no-such-model")))
        with pytest.raises(EngineDeadError):
            await own.engine.check_health()
        await own.engine.stop()

    own.wait(scenario())


def test_an_engine_may_be_stopped_twice(own: Started) -> None:
    """Whoever shuts down need not know whether somebody did already; the fixture stops it once more."""
    own.wait(own.engine.stop())
    own.wait(own.engine.stop())


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_an_engine_that_never_started_may_be_stopped(subject: Subject) -> None:
    """A worker that is told to go while it sets up."""
    asyncio.run(subject.make().stop())
