"""Embeddings, score and rerank on a real model, beside vLLM's own batch runner on the same lines."""

from __future__ import annotations

import base64
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.failures import FailureKind
from tests.engines import LoopThread, body_of, case_lines, differing, expect_case, failure_of, line, run_batch, served
from tests.vllm_flags import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.engine import Reply
    from workers.engine.vllm import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    # vLLM, torch and transformers warn of each other's deprecations.
    pytest.mark.filterwarnings("default"),
]

CASES = Path(__file__).resolve().parents[1] / "cases"
URL = "/v1/embeddings"
PAIR = {"text_1": "a cat", "text_2": ["a dog", "a kitten"]}
RANKED = {"query": "a cat", "documents": ["a stone", "a kitten", "a dog"]}

LINES = [
    line(URL, "text", input="blue"),
    line(URL, "texts", input=["a", "b", ""]),
    line(URL, "tokens", input=[101, 2630, 102]),
    line(URL, "token-lists", input=[[101, 2630, 102], [101, 102]]),
    line(URL, "base64", input="blue", encoding_format="base64"),
    line(URL, "float", input="blue", encoding_format="float"),
    line("/score", "score", **PAIR),
    line("/v1/score", "score-v1", **PAIR),
    line("/v2/score", "score-v2", **PAIR),
    line("/v1/score", "score-queries", queries=["a cat", "a dog"], documents=["a kitten", "a puppy"]),
    line("/rerank", "rerank", **RANKED),
    line("/v1/rerank", "rerank-v1", **RANKED, top_n=2),
    line("/v2/rerank", "rerank-v2", **RANKED),
]


@pytest.fixture(scope="module")
def engine(loop: LoopThread, embedding_folder: str) -> Iterator[VllmEngine]:
    """The engine of this module."""
    yield from served(loop, embedding_folder, SMALL)


def vector(reply: Reply) -> list[float]:
    (datum,) = body_of(reply)["data"]
    return list(datum["embedding"])


def test_rows_are_those_of_run_batch(
    ask: Callable[[list[str]], list[Reply]], embedding_folder: str, tmp_path: Path
) -> None:
    """Also with the others in the batch, which this engine has in another order."""
    ours = ask(list(reversed(LINES)))[::-1]
    theirs = run_batch(tmp_path, LINES, embedding_folder, SMALL)
    assert [reply.failure for reply in ours] == [None] * len(LINES)
    assert differing(ours, theirs, tolerance=1e-4) == []


def test_a_model_that_embeds_says_so(engine: VllmEngine) -> None:
    assert engine.endpoints == (URL, "/v1/score", "/v1/rerank")


def test_one_row_for_all_inputs_of_a_request(ask: Callable[[list[str]], list[Reply]]) -> None:
    texts, lists, one = ask([LINES[1], LINES[3], LINES[0]])
    assert [datum["index"] for datum in body_of(texts)["data"]] == [0, 1, 2]
    assert [datum["index"] for datum in body_of(lists)["data"]] == [0, 1]
    assert len(vector(one)) == 384


def test_tokens_embed_as_their_text(ask: Callable[[list[str]], list[Reply]]) -> None:
    text, tokens = map(vector, ask([LINES[0], LINES[2]]))
    assert sum(a * b for a, b in zip(text, tokens, strict=True)) == pytest.approx(1, abs=1e-5)
    assert math.hypot(*text) == pytest.approx(1, abs=1e-5)


def test_base64_is_the_same_vector(ask: Callable[[list[str]], list[Reply]]) -> None:
    text, coded = ask([LINES[0], LINES[4]])
    raw = base64.b64decode(body_of(coded)["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(vector(text), abs=1e-6)


def test_the_nearest_document_ranks_first(ask: Callable[[list[str]], list[Reply]]) -> None:
    scored, ranked, cut = map(body_of, ask([LINES[7], LINES[10], LINES[11]]))
    assert scored["data"][1]["score"] > scored["data"][0]["score"]
    assert [result["index"] for result in ranked["results"]] == [1, 2, 0]
    assert [result["index"] for result in cut["results"]] == [1, 2]


def test_every_endpoint_counts_its_tokens(ask: Callable[[list[str]], list[Reply]]) -> None:
    replies = ask(LINES)
    counted = [body_of(reply)["usage"]["prompt_tokens"] for reply in replies]
    assert [reply.prompt_tokens for reply in replies] == counted
    assert min(counted) > 0
    assert [reply.completion_tokens for reply in replies] == [0] * len(LINES)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (URL, {"input": "x", "dimensions": 3}),
        (URL, {"input": []}),
        (URL, {}),
        (URL, {"input": "word " * 2000}),
        (URL, {"input": [999_999]}),
        (URL, {"input": "x", "encoding_format": "hex"}),
        ("/v1/score", {"text_1": "x"}),
        ("/rerank", {"query": "x"}),
    ],
    ids=["dimensions", "empty", "none", "long", "unknown-token", "format", "score", "rerank"],
)
def test_a_bad_request_is_a_400(ask: Callable[[list[str]], list[Reply]], url: str, body: dict[str, Any]) -> None:
    """And harms no neighbour. MiniLM has one number of dimensions: it is no Matryoshka model."""
    before, bad, after = ask([LINES[0], line(url, "bad", **body), LINES[0]])
    assert (before.failure, bad.failure, after.failure) == (None, FailureKind.INVALID_REQUEST, None)


def test_another_model_is_a_404(ask: Callable[[list[str]], list[Reply]]) -> None:
    (reply,) = ask([line(URL, model="another", input="x")])
    assert reply.failure is FailureKind.MODEL_NOT_FOUND


def test_a_chat_on_a_model_that_embeds_lists_what_it_serves(ask: Callable[[list[str]], list[Reply]]) -> None:
    """vllm-project/vllm#6174."""
    replies = ask(case_lines(CASES, "I25"))
    expect_case(CASES, "I25", replies)
    assert failure_of(replies[-1]) == (
        "The model does not support this endpoint; supported: /v1/embeddings, /v1/score, /v1/rerank."
    )
