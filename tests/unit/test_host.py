"""What an engine host measures, without Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from common.ledger import Address, Begun, Recorded, Verdict
from workers.engine import Reply, Request
from workers.engine.host import Delivery, EngineHost, _InHand, _whatever_comes
from workers.engine.observer import Unobserved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.ledger import Claim, Ledger, Row
    from workers.engine import Engine

MANY = 200
EACH_S = 0.002


class OneByOne:
    """Takes what comes at once, and ends one every 2 ms."""

    name = "echo"
    models = ("m",)
    errored = False
    default_inflight = MANY

    async def run(self, request: Request) -> Reply:
        asked = json.loads(request.line)
        await asyncio.sleep(EACH_S * (1 + asked["custom_id"]))
        return Reply(b"{}")


class Told(Unobserved):
    """Remembers what it is told of idle engines."""

    def __init__(self) -> None:
        self.backlog: list[bool] = []

    def idle(self, seconds: float, *, backlog: bool) -> None:
        self.backlog.append(backlog)


class Published:
    """A ledger whose queues are empty; only some runs are published in full."""

    def begin(self, claims: Sequence[Claim]) -> list[Begun]:
        return [Begun(Verdict.OURS) for _ in claims]

    def record(self, rows: Sequence[Row]) -> list[Recorded]:
        return [Recorded(Verdict.OURS) for _ in rows]

    def __init__(self, *unpublished: tuple[str, int]) -> None:
        self._unpublished = set(unpublished)

    def backlog(self, _: str, runs: set[tuple[str, int]]) -> tuple[int, set[tuple[str, int]]]:
        return 0, runs & self._unpublished


def request(number: int, url: str = "/v1/embeddings") -> Request:
    return Request(json.dumps({"custom_id": number, "url": url}))


@contextlib.contextmanager
def made(ledger: object, observer: Any = None, *, engine: Any = None, max_inflight: int = 0) -> Iterator[EngineHost]:
    """A host on its loop, which is not started."""
    host = EngineHost(
        cast("Engine", engine or OneByOne()), cast("Ledger", ledger), worker_id="w", queue="gpu",
        max_inflight=max_inflight, on_death=lambda: None, notify=lambda kind, at: None, observer=observer,
    )  # fmt: skip
    try:
        yield host
    finally:
        host.executor.shutdown()
        host.loop.close()


def test_the_last_requests_of_a_batch_do_not_look_slow() -> None:
    """They end alone, but ran beside all others: by it the next batch's messages are packed."""

    async def run(host: EngineHost) -> None:
        await asyncio.gather(*(host._run_on_engine(request(number)) for number in range(MANY)))

    with made(Published()) as host:
        began = time.monotonic()
        host.loop.run_until_complete(run(host))
        took_s = time.monotonic() - began

        # All of them took so long together, however busy the machine was.
        assert EACH_S / 4 < host._pace.request_s < 3 * took_s / MANY


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_run_at_once_than_the_worker_may_though_a_message_brings_more(limit: int) -> None:
    most = 0

    class Watched(OneByOne):
        async def run(self, request: Request) -> Reply:
            nonlocal most
            most = max(most, host.on_engine)
            return await super().run(request)

    async def run(host: EngineHost) -> None:
        delivery = Delivery(host, "tag", chorded=True)
        await asyncio.gather(
            *(host.run_request(Address("batch_a", 1, 0, index), 16, request(0).line, delivery) for index in range(16))
        )

    with made(Published(), engine=Watched(), max_inflight=limit) as host:
        host.loop.run_until_complete(run(host))

    assert most == limit


def test_what_generates_has_no_say_in_how_long_a_short_request_takes() -> None:
    with made(Published()) as host:
        host.loop.run_until_complete(host._run_on_engine(request(1, "/v1/chat/completions")))
        assert host._pace.request_s == 0

        host.loop.run_until_complete(host._run_on_engine(request(1)))
        assert host._pace.request_s > 0


def test_a_run_that_waits_for_its_next_shards_is_not_forgotten_while_another_fills_the_engine() -> None:
    told = Told()
    waiting = ("batch_a", 1)
    with made(Published(waiting), told) as host:
        host._state = "ready"
        host._recent.add(waiting)
        host._in_hand["b", 0] = _InHand(Address("batch_b", 1, 0, 0), cast("Any", SimpleNamespace()))
        host.on_engine = MANY
        host.loop.run_until_complete(host._tell_idle(1.0))
        assert told.backlog == []

        host._in_hand.clear()
        host.on_engine = 0
        host.loop.run_until_complete(host._tell_idle(1.0))

    assert told.backlog == [True]


def test_what_a_cancelled_request_must_do_is_done_though_it_is_cancelled_again() -> None:
    """Its mark is taken back: else whoever runs it next would take this worker for one that it killed."""
    done: list[str] = []

    async def cancelled_twice() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def release() -> None:
            begun.set()
            await may_end.wait()
            done.append("released")

        async def request() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await _whatever_comes(release())
                raise

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        task.cancel()
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled_twice())

    assert done == ["released"]
