"""Which requests share a message, and how many."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from common.ledger import WorkerBeat
from common.messages import indexes_repr, read_indexes
from common.packs import PACK_BYTES, PACK_S, may_be_short, pack, pack_sizes
from common.settings import MAX_PACK_SIZE
from workers.engine.pace import Pace

if TYPE_CHECKING:
    from common.packs import Claim

SIZES = {"gpu": 4}


def line(url: str = "/v1/embeddings", text: str = "x") -> str:
    return json.dumps({"custom_id": "r", "method": "POST", "url": url, "body": {"input": text}})


def packed(*requests: tuple[str, int, Claim], sizes: dict[str, int] = SIZES) -> list[tuple[str, int, int]]:
    """Queue, first index and number of requests of each message."""
    return [(queue, first, len(claims)) for queue, first, claims in pack(requests, sizes)]


def beat(request_s: float, *, queue: str = "gpu", inflight: int = 256, state: str = "ready") -> WorkerBeat:
    return WorkerBeat(f"w{request_s}{queue}{inflight}", state, "echo", ("m",), queue, inflight, request_s=request_s)


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank"])
def test_neighbours_that_do_not_generate_share_a_message(url: str) -> None:
    assert packed(*(("gpu", n, line(url)) for n in range(10))) == [("gpu", 0, 4), ("gpu", 4, 4), ("gpu", 8, 2)]


def test_every_request_travels_once_and_in_order() -> None:
    lines = [line(text=str(n)) for n in range(10)]

    messages = pack((("gpu", n, each) for n, each in enumerate(lines)), SIZES)

    assert [claim for _, _, claims in messages for claim in claims] == lines


@pytest.mark.parametrize(
    "alone",
    [
        line("/v1/chat/completions"),
        line("/v1/completions"),
        line("/v1/responses"),
        line("/v1/audio/transcriptions"),
        line("/v1/chat/completions", '"url": "/v1/embeddings"'),
        '{"url": 1}',
        "no json",
        "[]",
        (0, 0, 5),
        line(text="x" * PACK_BYTES),
    ],
)
def test_what_generates_or_is_large_or_strange_travels_alone(alone: Claim) -> None:
    requests = [("gpu", n, line()) for n in range(3)]

    assert packed(*requests, ("gpu", 3, alone), ("gpu", 4, alone), ("gpu", 5, line()), ("gpu", 6, line())) == [
        ("gpu", 0, 3),
        ("gpu", 3, 1),
        ("gpu", 4, 1),
        ("gpu", 5, 2),
    ]


def test_only_neighbours_of_one_queue_share_a_message() -> None:
    """A later run has gaps between its indexes, and models may have queues of their own."""
    requests = [("gpu", 0, line()), ("gpu", 2, line()), ("gpu", 3, line()), ("other", 4, line()), ("gpu", 5, line())]

    assert packed(*requests, sizes={"gpu": 4, "other": 4}) == [
        ("gpu", 0, 1),
        ("gpu", 2, 2),
        ("other", 4, 1),
        ("gpu", 5, 1),
    ]


def test_a_queue_that_is_not_named_gets_a_message_for_each() -> None:
    assert packed(("other", 0, line()), ("other", 1, line())) == [("other", 0, 1), ("other", 1, 1)]


def test_a_packs_bytes_are_limited() -> None:
    for text in ("x" * (PACK_BYTES // 3), "\u8a9e" * (PACK_BYTES // 9)):
        each = json.dumps({"url": "/v1/embeddings", "body": {"input": text}}, ensure_ascii=False)
        assert [count for _, _, count in packed(*(("gpu", n, each) for n in range(4)))] == [2, 2]


def test_a_pack_takes_no_more_than_its_time() -> None:
    assert pack_sizes([beat(PACK_S / 7)], 16) == {"gpu": 7}
    assert pack_sizes([beat(PACK_S / 100)], 16) == {"gpu": 16}
    assert pack_sizes([beat(10 * PACK_S)], 16) == {"gpu": 1}


def test_the_slowest_worker_of_a_queue_decides() -> None:
    workers = [beat(PACK_S / 8), beat(PACK_S / 3), beat(PACK_S / 5, queue="other")]

    assert pack_sizes(workers, 16) == {"gpu": 3, "other": 5}


def test_nothing_is_packed_before_anything_was_measured() -> None:
    """One that says nothing may be slow, or older than packs."""
    assert pack_sizes([beat(0.0), beat(0.001, state="loading")], 16) == {"gpu": 1}
    assert pack_sizes([beat(0.0), beat(0.001)], 16) == {"gpu": 1}
    assert pack_sizes([], 16) == {}


def test_a_pack_leaves_most_of_a_workers_slots_to_others() -> None:
    assert pack_sizes([beat(0.0001, inflight=8)], 16) == {"gpu": 2}
    assert pack_sizes([beat(0.0001, inflight=1)], 16) == {"gpu": 1}


@pytest.mark.parametrize(("first", "count", "shown"), [(7, 1, "7"), (7, 3, "7-9")])
def test_a_messages_requests_are_shown_by_their_indexes(first: int, count: int, shown: str) -> None:
    assert indexes_repr(first, count) == shown
    assert list(read_indexes(shown)) == list(range(first, first + count))


def test_no_message_names_more_requests_than_it_may_carry() -> None:
    assert len(read_indexes("0-99999999999")) == MAX_PACK_SIZE


def test_a_pace_is_what_one_request_takes_of_the_engine() -> None:
    """Ten at once for a second each are ten a second."""
    pace = Pace()
    for _ in range(1000):
        pace.note(1.0, beside=10)
    assert pace.request_s == pytest.approx(0.1)

    for _ in range(1000):
        pace.note(0.1, beside=10)
    assert pace.request_s == pytest.approx(0.01, rel=0.01)


def test_only_what_fits_a_pack_says_how_long_a_short_request_takes() -> None:
    line = json.dumps({"url": "/v1/embeddings", "body": {"input": "x" * 100}})
    assert may_be_short(line)
    assert not may_be_short(line.replace("embeddings", "chat/completions"))
    assert not may_be_short(line.replace("xx", "x" * PACK_BYTES))


def test_an_engines_first_request_does_not_set_its_pace() -> None:
    """It may have to load what the others find."""
    pace = Pace()
    pace.note(2.0, beside=1)
    for _ in range(49):
        pace.note(0.05, beside=10)
    assert pace.request_s == pytest.approx((2.0 + 49 * 0.005) / 50)
