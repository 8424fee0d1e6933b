"""The echo engine's answers, refusals and knobs, as the contract lists them."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import signal
import struct
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.batch import SUCCESS_END, LineError, parse_line
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import MAX_MESSAGE_BYTES, FailureKind
from tests.replays import ALL
from workers.engine import Reply, Request
from workers.engine.echo import EMBEDDINGS_URL, MAX_PROMPT_WORDS, SUPPORTED_URLS, EchoEngine, echo_answer

MODEL = "test-model"
#: The files that are replayed on echo; one is made at run time, and only its lines' length is of interest.
ECHO_CASES = [case for case in ALL.values() if "echo" in case.targets and case.path.exists()]

#: Planted in requests; must never come back in a failed row.
SENTINEL = "SENTINEL-7f3a"


def chat(text: Any = "Name one colour.", **body: Any) -> str:
    """The line of a chat request with one user message; a field of the body that is `...` is left out."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], **body}
    return line(url="/v1/chat/completions", body={name: value for name, value in fields.items() if value is not ...})


def embed(given_input: Any = "blue", **body: Any) -> str:
    """The line of an embeddings request."""
    return line(url=EMBEDDINGS_URL, body={"model": MODEL, "input": given_input, **body})


def line(*, url: str, body: dict[str, Any], custom_id: str = "r-1") -> str:
    """The line of any request."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}, ensure_ascii=False)


def answer(text: str, *, calls: int = 0, engine: EchoEngine | None = None) -> tuple[Reply, dict[str, Any]]:
    """The engine's reply to this line, and its row read back."""
    reply = asyncio.run((engine or EchoEngine(MODEL)).run(Request(text, calls)))
    return reply, json.loads(reply.row)


def content(text: str) -> str:
    """The text of the first choice of the answer to this line."""
    reply, row = answer(text)
    assert reply.failure is None, row["error"]
    return str(row["response"]["body"]["choices"][0]["message"]["content"])


def refusal(text: str, *, calls: int = 0) -> tuple[FailureKind | None, int, str]:
    """The kind, status and message of the failed row that answers this line."""
    reply, row = answer(text, calls=calls)
    error = row["response"]["body"]["error"]
    assert error["message"] == row["error"]["message"]
    assert error["code"] == row["response"]["status_code"]
    return reply.failure, row["response"]["status_code"], error["message"]


def vectors(row: dict[str, Any]) -> list[Any]:
    """The vectors of an embeddings row, by their index."""
    data = row["response"]["body"]["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


# -- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered_with_its_text() -> None:
    """The whole row: OpenAI's shape, ids that say echo, usage in words, and the same tokens in the reply."""
    reply, row = answer(chat("Name one colour."))
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["id"].startswith("echo-")
    assert row["custom_id"] == "r-1"
    assert row["response"]["status_code"] == 200
    assert row["response"]["request_id"].startswith("echo-batch-")
    body = row["response"]["body"]
    assert body["id"].startswith("echo-")
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Name one colour.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert (reply.failure, reply.prompt_tokens, reply.completion_tokens) == (None, 3, 3)
    assert reply.row.endswith(SUCCESS_END)


def test_two_runs_differ_in_ids_and_times_only() -> None:
    """Two fleets, or two tries, give the same answer; no two rows share an id."""

    def split(row: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        response = row["response"]
        ids = {row.pop("id"), response.pop("request_id"), response["body"].pop("id")}
        del response["body"]["created"]
        return row, ids

    first, first_ids = split(answer(chat("a b c", n=2, logprobs=True))[1])
    second, second_ids = split(answer(chat("a b c", n=2, logprobs=True))[1])
    assert first == second
    assert not first_ids & second_ids


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, "one two  three"),
        ({"max_tokens": 3}, "one two  three"),
        ({"max_tokens": 2}, "one two"),
        ({"max_tokens": None}, "one two  three"),
        ({"max_tokens": None, "max_completion_tokens": 1}, "one"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "one two"),
        ({"max_tokens": 1, "max_completion_tokens": None}, "one"),
        ({"max_tokens": 2**70}, "one two  three"),
    ],
)
def test_an_answer_is_cut_at_the_words_asked_for(limits: dict[str, Any], expected: str) -> None:
    """Null is unset, and `max_completion_tokens` wins over the older name."""
    reply, row = answer(chat("one two  three", **limits))
    choice = row["response"]["body"]["choices"][0]
    assert choice["message"]["content"] == expected
    assert choice["finish_reason"] == ("stop" if expected.endswith("three") else "length")
    assert reply.completion_tokens == len(expected.split())


@pytest.mark.parametrize("text", ["", "  two  spaces ", "left\u2028right", "line\nbreak\n", "😀 日本\u0085", "\x00"])
def test_text_that_is_not_cut_comes_back_unchanged(text: str) -> None:
    """Space and rare characters included: tests of the fleet compare bytes."""
    assert content(chat(text, max_tokens=8)) == text


@given(st.text(max_size=200), st.integers(min_value=1, max_value=20))
@settings(deadline=None)
def test_a_cut_answer_is_the_beginning_of_the_text(text: str, limit: int) -> None:
    """At most so many words, and every one of them whole."""
    cut = echo_answer(chat(text, max_tokens=limit))
    assert text.startswith(cut)
    assert cut.split() == text.split()[:limit]


def test_the_last_user_message_is_answered_and_all_are_counted() -> None:
    """A conversation's usage covers its system and assistant messages."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "user", "content": "the last"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "wizard", "content": "so be it"},
    ]
    reply, row = answer(chat(messages=messages))
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "the last"
    assert reply.prompt_tokens == 8


def test_content_in_parts_is_its_text_parts() -> None:
    """Joined by line ends, as vLLM joins them; an image is no text."""
    parts = [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        "two",
    ]
    assert content(chat(parts)) == "one\ntwo"


def test_n_choices_are_answered_and_counted() -> None:
    """Indexes 0, 1, 2; usage counts every one."""
    reply, row = answer(chat("a b", n=3))
    choices = row["response"]["body"]["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [
        (0, "a b"),
        (1, "a b"),
        (2, "a b"),
    ]
    assert reply.completion_tokens == 6


def test_logprobs_are_given_for_each_word() -> None:
    """In the shape of the API, with alternatives only when they were asked for."""
    body = answer(chat("a bé", logprobs=True, top_logprobs=2))[1]["response"]["body"]
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "bé"]
    assert bytes(entries[1]["bytes"]).decode() == "bé"
    assert [len(entry["top_logprobs"]) for entry in entries] == [1, 1]
    body = answer(chat("a", logprobs=True))[1]["response"]["body"]
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_oracle_agrees_with_the_engine() -> None:
    """On every row of the replay cases that the engine answers with text."""
    compared = 0
    for case in ECHO_CASES:
        for raw in case.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
            try:
                text = parse_line(raw).text
            except LineError:
                continue
            if answer(text)[0].failure is None:
                assert content(text) == echo_answer(text)
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("text", [embed(), chat(max_tokens=0), chat(messages=...)])
def test_the_oracle_has_no_text_for_what_gets_none(text: str) -> None:
    """A test that asks for it has a fault; an empty text would hide it."""
    with pytest.raises(ValueError, match=r"only a chat request|max_tokens|messages"):
        echo_answer(text)


# -- embeddings -------------------------------------------------------------------------------------------------------


def test_an_embedding_is_fixed_by_its_input() -> None:
    """Small, the same each time, and another for another input."""
    reply, row = answer(embed("blue sky"))
    (vector,) = vectors(row)
    assert len(vector) == 8
    assert all(-1 <= number < 1 for number in vector)
    assert vectors(answer(embed("blue sky"))[1]) == [vector]
    assert vectors(answer(embed("blue sea"))[1]) != [vector]
    assert row["response"]["body"]["object"] == "list"
    assert row["response"]["body"]["id"].startswith("echo-")
    assert (reply.prompt_tokens, reply.completion_tokens) == (2, 0)


@pytest.mark.parametrize(
    ("given_input", "vector_count", "tokens"),
    [("a b", 1, 2), (["a b", "c", ""], 3, 3), ([1, 2, 3], 1, 3), ([[1, 2], [3]], 2, 3), (["1", "2"], 2, 2), ("", 1, 0)],
)
def test_every_form_of_input_is_embedded(given_input: Any, vector_count: int, tokens: int) -> None:
    """One vector for each text or token list; usage in words, or in the tokens given."""
    reply, row = answer(embed(given_input))
    assert len(vectors(row)) == vector_count
    assert reply.prompt_tokens == tokens


def test_a_list_embeds_each_item_as_if_alone() -> None:
    """Batching inputs changes no vector; tokens are not text."""
    together = vectors(answer(embed(["a", "b"]))[1])
    assert together == [*vectors(answer(embed("a"))[1]), *vectors(answer(embed("b"))[1])]
    assert vectors(answer(embed([1]))[1]) != vectors(answer(embed("[1]"))[1])


def test_base64_holds_the_same_vector() -> None:
    """As float32, exactly."""
    (packed,) = vectors(answer(embed("blue", encoding_format="base64"))[1])
    assert list(struct.unpack("<8f", base64.b64decode(packed))) == vectors(answer(embed("blue"))[1])[0]


def test_dimensions_set_the_length() -> None:
    """A shorter vector is the beginning of the longer one."""
    assert vectors(answer(embed("blue", dimensions=3))[1])[0] == vectors(answer(embed("blue"))[1])[0][:3]


# -- refusals ---------------------------------------------------------------------------------------------------------

BAD_CHATS: dict[str, dict[str, Any]] = {
    "no messages field": {"messages": ...},
    "null messages": {"messages": None},
    "messages no list": {"messages": "hi"},
    "no messages": {"messages": []},
    "message no object": {"messages": ["hi"]},
    "no role": {"messages": [{"content": SENTINEL}]},
    "role no string": {"messages": [{"role": 7, "content": SENTINEL}]},
    "content no text": {"messages": [{"role": "user", "content": {"bad": SENTINEL}}]},
    "part no text": {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
    "part without a type": {"messages": [{"role": "user", "content": [{"text": SENTINEL}]}]},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens -5": {"max_tokens": -5},
    "max_tokens no number": {"max_tokens": SENTINEL},
    "max_completion_tokens 0": {"max_completion_tokens": 0},
    "n 0": {"n": 0},
    "n huge": {"n": 100_000},
    "temperature negative": {"temperature": -0.1},
    "top_p 0": {"top_p": 0},
    "top_p above 1": {"top_p": 1.1},
    "presence_penalty": {"presence_penalty": 3},
    "frequency_penalty": {"frequency_penalty": -3},
    "seed beyond int64": {"seed": 2**63},
    "top_logprobs huge": {"logprobs": True, "top_logprobs": 100_000},
    "model no string": {"model": [SENTINEL]},
    "stream": {"stream": True},
    "prompt too long": {"messages": [{"role": "user", "content": "w " * (MAX_PROMPT_WORDS + 1)}]},
}


@pytest.mark.parametrize("body", BAD_CHATS.values(), ids=BAD_CHATS)
def test_a_bad_chat_request_is_a_400_row_that_quotes_nothing(body: dict[str, Any]) -> None:
    """The message says what is wrong and repeats nothing of the request."""
    reply, row = answer(chat(SENTINEL, **body))
    assert reply.failure is FailureKind.INVALID_REQUEST
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"]["error"]["type"] == "BadRequestError"
    assert row["error"]["code"] == "invalid_request"
    assert SENTINEL not in reply.row.decode()
    assert (reply.prompt_tokens, reply.completion_tokens) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": None},
        {"input": {"text": SENTINEL}},
        {"input": [SENTINEL, 1]},
        {"input": [[]]},
        {"input": [True]},
        {"input": "blue", "encoding_format": SENTINEL},
        {"input": "blue", "dimensions": 0},
        {"input": "blue", "stream": True},
        {"input": ["short", "w " * (MAX_PROMPT_WORDS + 1)]},
        {"input": [1] * (MAX_PROMPT_WORDS + 1)},
    ],
    ids=lambda body: ascii(body)[:30],
)
def test_a_bad_embeddings_request_is_a_400_row_that_quotes_nothing(body: dict[str, Any]) -> None:
    """As for chat."""
    reply, row = answer(line(url=EMBEDDINGS_URL, body=body))
    assert reply.failure is FailureKind.INVALID_REQUEST
    assert row["response"]["status_code"] == 400
    assert SENTINEL not in reply.row.decode()


def test_the_longest_prompt_is_answered() -> None:
    """The limit itself is inside."""
    assert answer(chat("w " * MAX_PROMPT_WORDS))[0].prompt_tokens == MAX_PROMPT_WORDS
    assert answer(embed("w " * MAX_PROMPT_WORDS))[0].prompt_tokens == MAX_PROMPT_WORDS


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"stream": True}, "stream"),
        ({"messages": [{"role": "user"}, {"content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content: must be a string"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": {"status": 200}}, "echo.status"),
        ({"echo": {"lateny_s": 1}}, "the knobs are latency_s, status, times, raise,"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], expected: str) -> None:
    """The user finds the place without searching."""
    assert expected in refusal(chat(**body))[2]


@pytest.mark.parametrize("stream", [False, None])
def test_a_request_that_does_not_stream_may_say_so(stream: bool | None) -> None:
    """Only `true` is refused."""
    assert answer(chat(stream=stream))[0].failure is None


def test_a_number_too_large_for_a_float_is_a_400_row() -> None:
    """It would reach a sampler as infinity; also in a field that is otherwise ignored."""
    text = chat(anything=1).replace('"anything": 1', '"anything": 1e400')
    assert refusal(text)[:2] == (FailureKind.INVALID_REQUEST, 400)


@pytest.mark.parametrize("url", ["/chat/completions", "http://localhost:8000/v1/chat/completions", "/v1/responses", ""])
def test_an_unsupported_url_is_a_400_row_that_lists_the_supported(url: str) -> None:
    """One bad url never ends the file."""
    kind, status, message = refusal(line(url=url, body={"model": MODEL}))
    assert (kind, status) == (FailureKind.UNSUPPORTED_ENDPOINT, 400)
    assert all(supported in message for supported in SUPPORTED_URLS)


@pytest.mark.parametrize("make", [chat, embed])
def test_another_model_is_a_404_row(make: Any) -> None:
    """As vLLM answers it, with the name, but not with a name without end."""
    reply, row = answer(make(model="x"))
    assert reply.failure is FailureKind.MODEL_NOT_FOUND
    assert row["response"]["body"]["error"] == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert len(refusal(make(model="x" * 100_000))[2]) < 300


@pytest.mark.parametrize("model", [..., None, ""])
def test_no_model_name_means_the_model_served(model: Any) -> None:
    """As in vLLM."""
    assert answer(chat(model=model))[1]["response"]["body"]["model"] == MODEL


def test_a_request_with_thousands_of_faults_gets_a_short_message() -> None:
    """Validators report each fault with its input: vllm-project/vllm#49239."""
    messages = [{"role": 7, "content": {"bad": SENTINEL * 10}} for _ in range(5000)]
    message = refusal(chat(messages=messages))[2]
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert SENTINEL not in message


def test_every_replay_case_comes_out_as_expected() -> None:
    """All rows of the cases that are not refused at submit."""
    checked = 0
    for case in ECHO_CASES:
        for raw in case.path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
            try:
                parsed = parse_line(raw)
            except LineError:
                continue
            wanted = case.rows.get(parsed.custom_id, "any")
            failed = answer(parsed.text)[0].failure is not None
            assert wanted == "any" or failed == (wanted == "err"), (case.file, parsed.custom_id)
            checked += wanted != "any"
    assert checked > 60


# -- knobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [None, {}, {"raise": False, "kill": None, "hang": False, "status": None}])
def test_knobs_that_are_off_change_nothing(knobs: Any) -> None:
    """Null and false are off."""
    assert content(chat("as ever", echo=knobs)) == "as ever"


@pytest.mark.parametrize(
    "knobs",
    [
        7,
        [],
        SENTINEL,
        {"latency_s": "1"},
        {"latency_s": -1},
        {"latency_s": True},
        {"status": "503"},
        {"status": 200},
        {"status": 600},
        {"status": 503.5},
        {"status": 503, "times": -1},
        {"status": 503, "times": "2"},
        {"raise": 1},
        {"kill": "true"},
        {"engine_dead": SENTINEL},
        {"hang": 1},
        {"result_bytes": -1},
        {"result_bytes": 10**12},
        {"nan": 0},
        {SENTINEL: True},
    ],
    ids=lambda knobs: ascii(knobs)[:30],
)
@pytest.mark.parametrize("make", [chat, embed])
def test_a_malformed_knob_is_a_400_row(make: Any, knobs: Any) -> None:
    """A misspelt fault must not pass for a test that found nothing, nor break the engine."""
    engine = EchoEngine(MODEL)
    reply, row = answer(make(echo=knobs), engine=engine)
    assert reply.failure is FailureKind.INVALID_REQUEST
    assert row["response"]["status_code"] == 400
    assert SENTINEL not in reply.row.decode()
    assert not engine.errored


@pytest.mark.parametrize(
    ("status", "kind", "type_"),
    [
        (400, FailureKind.INVALID_REQUEST, "BadRequestError"),
        (404, FailureKind.MODEL_NOT_FOUND, "NotFoundError"),
        (429, FailureKind.ENGINE_OVERLOADED, "RateLimitError"),
        (500, FailureKind.ENGINE_ERROR, "InternalServerError"),
        (503, FailureKind.ENGINE_OVERLOADED, "ServiceUnavailableError"),
    ],
)
def test_status_answers_with_that_status(status: int, kind: FailureKind, type_: str) -> None:
    """At every call when `times` is absent."""
    for calls in (0, 1, 50):
        reply, row = answer(chat(echo={"status": status}), calls=calls)
        assert reply.failure is kind
        assert row["response"]["status_code"] == status
        assert row["response"]["body"]["error"]["type"] == type_


def test_times_bounds_status_to_the_first_calls() -> None:
    """Calls are counted across the fleet, so the engine itself remembers nothing."""
    engine = EchoEngine(MODEL)
    failures = [
        answer(chat(echo={"status": 503, "times": 2}), calls=calls, engine=engine)[0].failure for calls in range(4)
    ]
    assert failures == [FailureKind.ENGINE_OVERLOADED, FailureKind.ENGINE_OVERLOADED, None, None]
    assert answer(chat(echo={"status": 503, "times": 0}))[0].failure is None


def test_raise_raises_an_exception_that_nobody_expects() -> None:
    """Not one of ours, and without the input in its message."""
    with pytest.raises(RuntimeError, match="asked to raise") as caught:
        answer(chat(SENTINEL, echo={"raise": True}))
    assert SENTINEL not in str(caught.value)


def test_kill_sends_this_process_a_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler, no cleaning up: as the kernel does it when memory ends."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    answer(chat(echo={"kill": True}))
    assert sent == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize("size", [0, 1, 1000, 1_000_000])
def test_result_bytes_sets_the_size_of_a_chat_answer(size: int) -> None:
    """However many choices share it; `max_tokens` does not cut it."""
    plain = len(answer(chat("", max_tokens=1))[0].row)
    assert len(answer(chat(echo={"result_bytes": size}, max_tokens=1))[0].row) - plain == pytest.approx(size, abs=50)
    many = len(answer(chat("", n=5))[0].row)
    assert len(answer(chat(n=5, echo={"result_bytes": size}))[0].row) - many == pytest.approx(size, abs=50)


def test_result_bytes_sets_the_size_of_an_embeddings_answer() -> None:
    """By the length of the vectors, whatever their number."""
    for given_input in ("a", ["a", "b", "c"]):
        row = answer(embed(given_input, echo={"result_bytes": 300_000}))[0].row
        assert len(row) == pytest.approx(300_000, rel=0.1)


@pytest.mark.parametrize("make", [chat, embed])
def test_nan_is_null_in_the_row(make: Any) -> None:
    """Python would write bare NaN, which is not JSON; the row is a success all the same."""
    reply, row = answer(make(echo={"nan": True}))
    assert reply.failure is None
    assert b"NaN" not in reply.row
    assert b"Infinity" not in reply.row
    if make is chat:
        entries = row["response"]["body"]["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == [None, None]
    else:
        assert vectors(row)[0][:2] == [None, None]


# -- delays, death and the end ----------------------------------------------------------------------------------------


class Delays:
    """Stands in for the loop's clock: timers are noted, and fire at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[float] = []
        call_later = asyncio.BaseEventLoop.call_later

        def note(loop: Any, delay: float, callback: Any, *args: Any, **more: Any) -> Any:
            self.noted.append(delay)
            return call_later(loop, 0, callback, *args, **more)

        monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", note)


@pytest.mark.parametrize(
    ("engine", "text", "expected"),
    [
        (EchoEngine(MODEL), chat("a b c"), []),
        (EchoEngine(MODEL, latency_s=2), chat("a b c"), [2]),
        (EchoEngine(MODEL, tokens_per_s=4), chat("a b c", n=2), [1.5]),
        (EchoEngine(MODEL, latency_s=2, tokens_per_s=6), chat("a b c"), [2.5]),
        (EchoEngine(MODEL, latency_s=2, tokens_per_s=6), chat("a b c", echo={"latency_s": 7}), [7]),
        (EchoEngine(MODEL, latency_s=2), chat(echo={"latency_s": 0}), []),
        (EchoEngine(MODEL, latency_s=2), chat(max_tokens=0), []),
        (EchoEngine(MODEL), chat(echo={"latency_s": 3, "status": 503}), [3]),
    ],
)
def test_an_answer_takes_its_time(
    engine: EchoEngine, text: str, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latency and rate add up, a request's own latency replaces both, and refusals are at once."""
    delays = Delays(monkeypatch)
    answer(text, engine=engine)
    assert delays.noted == expected


def test_a_plain_answer_needs_no_turn_of_the_loop() -> None:
    """Queue benchmarks measure the queue: nothing but the answer itself may cost time."""
    steps = EchoEngine(MODEL).run(Request(chat()))
    with pytest.raises(StopIteration) as ended:
        steps.send(None)
    assert isinstance(ended.value.value, Reply)


async def _settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_hanging_request_ends_by_cancellation_only() -> None:
    """And the engine goes on."""

    async def scenario() -> None:
        engine = EchoEngine(MODEL)
        task = asyncio.create_task(engine.run(Request(chat(echo={"hang": True}))))
        await _settle()
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.run(Request(chat()))).failure is None

    asyncio.run(scenario())


def test_a_cancelled_request_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a timer nor a place among those that wait: a worker cancels many in its life."""
    waiters: list[weakref.ref[Any]] = []
    call_later = asyncio.BaseEventLoop.call_later

    def note(loop: Any, delay: float, callback: Any, waiter: Any) -> Any:
        waiters.append(weakref.ref(waiter))
        return call_later(loop, delay, callback, waiter)

    async def scenario() -> None:
        engine = EchoEngine(MODEL, latency_s=3600)
        task = asyncio.create_task(engine.run(Request(chat())))
        await _settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        await _settle()  # The loop itself holds what it calls until its next turn.
        gc.collect()
        assert [waiter() for waiter in waiters] == [None]

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", note)
    asyncio.run(scenario())


def test_a_dying_engine_takes_its_requests_with_it() -> None:
    """Those that hang, those that sleep, the one that killed it, and every later one; health says so too."""

    async def scenario() -> None:
        engine = EchoEngine(MODEL)
        waiting = [
            asyncio.create_task(engine.run(Request(chat(echo=knobs))))
            for knobs in ({"hang": True}, {"latency_s": 3600})
        ]
        await _settle()
        await engine.check_health()
        assert not engine.errored
        with pytest.raises(EngineDeadError):
            await engine.run(Request(chat(echo={"engine_dead": True})))
        assert engine.errored
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDeadError, EngineDeadError]
        with pytest.raises(EngineDeadError):
            await engine.run(Request(chat()))
        with pytest.raises(EngineDeadError):
            await engine.run(Request(chat(max_tokens=0)))
        with pytest.raises(EngineDeadError):
            await engine.check_health()

    asyncio.run(scenario())


def test_stopping_hands_requests_back() -> None:
    """An answer that a stop cut short is no answer, and an engine that was stopped is not a dead one."""

    async def scenario() -> None:
        engine = EchoEngine(MODEL)
        await engine.start()
        task = asyncio.create_task(engine.run(Request(chat(echo={"hang": True}))))
        await _settle()
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineAbortedError):
            await task
        with pytest.raises(EngineAbortedError):
            await engine.run(Request(chat()))
        assert not engine.errored

    asyncio.run(scenario())


# -- flags ------------------------------------------------------------------------------------------------------------


def test_flags_describe_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays, and the names it serves under; the model's own name is the default."""
    assert EchoEngine.from_args(MODEL, []).models == (MODEL,)
    engine = EchoEngine.from_args(
        "path/of/model", ["--latency-s", "1.5", "--tokens-per-s=2", "--served-model-name", "a", "b"]
    )
    assert engine.models == ("a", "b")
    delays = Delays(monkeypatch)
    assert answer(chat("x", model="b"), engine=engine)[1]["response"]["body"]["model"] == "a"
    assert delays.noted == [2.0]
    assert answer(chat(model="path/of/model"), engine=engine)[0].failure is FailureKind.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    "flags",
    [
        ["--gpu-memory-utilization", "0.9"],
        ["--latency", "1"],
        ["--latency-s"],
        ["--latency-s", "soon"],
        ["--latency-s", "-1"],
        ["--tokens-per-s", "nan"],
        ["--served-model-name"],
        ["stray"],
        ["--help"],
    ],
)
def test_flags_that_are_not_echos_are_refused_in_one_sentence(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """No abbreviation, nothing printed, no exit: the command line decides how to end."""
    with pytest.raises(EngineStartError, match="--latency-s X, --tokens-per-s Y and --served-model-name") as caught:
        EchoEngine.from_args(MODEL, flags)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")
