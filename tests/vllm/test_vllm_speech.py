"""Transcription and translation on a real model, beside vLLM's own batch runner on the same lines.

`data/speech.flac` is 2.8 s of a synthesised voice, made for these tests with espeak-ng and free for any use. What the
model hears in it does not matter; that both hear the same does.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.failures import FailureKind
from tests.engines import LoopThread, body_of, differing, failure_of, line, run_batch, served
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

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
SPEECH = Path(__file__).parent / "data" / "speech.flac"
DATA_URL = "data:audio/flac;base64," + base64.b64encode(SPEECH.read_bytes()).decode()

LINES = [
    line(TRANSCRIBE, "plain", file_url=DATA_URL, language="en", temperature=0),
    line(TRANSCRIBE, "verbose", file_url=DATA_URL, language="en", temperature=0, response_format="verbose_json"),
    line(TRANSCRIBE, "prompted", file_url=DATA_URL, language="en", temperature=0, prompt="A call."),
    line(TRANSLATE, "translated", file_url=DATA_URL, language="en", temperature=0),
    line(TRANSLATE, "translated-verbose", file_url=DATA_URL, temperature=0, response_format="verbose_json"),
]


@pytest.fixture(scope="module")
def engine(loop: LoopThread, speech_folder: str) -> Iterator[VllmEngine]:
    """The engine of this module."""
    yield from served(loop, speech_folder, SMALL)


def test_rows_are_those_of_run_batch(
    ask: Callable[[list[str]], list[Reply]], speech_folder: str, tmp_path: Path
) -> None:
    ours = ask(LINES)
    theirs = run_batch(tmp_path, LINES, speech_folder, SMALL)
    assert [reply.failure for reply in ours] == [None] * len(LINES)
    assert differing(ours, theirs, tolerance=1e-4) == []


def test_a_model_of_speech_says_so(engine: VllmEngine) -> None:
    assert engine.endpoints == (TRANSCRIBE, TRANSLATE)


def test_speech_becomes_text(ask: Callable[[list[str]], list[Reply]]) -> None:
    """Its usage is in seconds, and counts no tokens."""
    plain, verbose, *_ = ask(LINES)
    assert body_of(plain)["text"].strip()
    assert body_of(verbose)["segments"]
    assert body_of(plain)["usage"] == {"type": "duration", "seconds": 3}
    assert (plain.prompt_tokens, plain.completion_tokens) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        {"file_url": "data:audio/flac;base64,AAAA"},
        {"file_url": "data:audio/flac,plain"},
        {},
        {"file": "x", "file_url": DATA_URL},
        {"file_url": DATA_URL, "language": "xx"},
        {"file_url": DATA_URL, "response_format": "srt"},
        {"file_url": DATA_URL, "stream": True},
        {"file_url": DATA_URL, "seed": 2**70},
    ],
    ids=["no-audio", "no-base64", "none", "upload", "language", "srt", "stream", "seed"],
)
@pytest.mark.parametrize("url", [TRANSCRIBE, TRANSLATE])
def test_a_bad_request_is_a_400(ask: Callable[[list[str]], list[Reply]], url: str, body: dict[str, Any]) -> None:
    if url == TRANSLATE and "language" in body:
        pytest.skip("a translation's language is a hint, which vLLM does not check")
    bad, after = ask([line(url, "bad", **body), LINES[0]])
    assert (bad.failure, after.failure) == (FailureKind.INVALID_REQUEST, None)
    assert "AAAA" not in failure_of(bad)


@pytest.mark.parametrize("url", [TRANSCRIBE, TRANSLATE])
def test_a_file_of_the_worker_is_not_heard(ask: Callable[[list[str]], list[Reply]], url: str) -> None:
    (reply,) = ask([line(url, file_url="file:///etc/hostname")])
    assert reply.failure is FailureKind.MEDIA_REFUSED


def test_a_chat_on_a_model_of_speech_lists_what_it_serves(ask: Callable[[list[str]], list[Reply]]) -> None:
    (reply,) = ask([line("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])])
    assert reply.failure is FailureKind.UNSUPPORTED_ENDPOINT
    assert failure_of(reply).endswith(f"supported: {TRANSCRIBE}, {TRANSLATE}.")
