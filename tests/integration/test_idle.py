"""Engines do not wait while there is backlog, by their own figures; and what it looks like when they must."""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.integration.pages import samples, value
from tests.invariants import chat_line
from tests.servers import FleetServers, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

INFLIGHT = 64

#: Just what two fillings of the engine take: the feed has to keep up.
SMALL = {"FLEET_WINDOW": str(2 * INFLIGHT), "FLEET_SHARD_SIZE": "32"}

#: One message at a time in a worker's hand, however much its engine wants.
PREFETCH_OF_ONE = """
from workers.pool import EngineCapacity
start = EngineCapacity.start
def starved(self, parent):
    start(self, parent)
    parent.concurrency = parent.consumer.initial_prefetch_count = 1
EngineCapacity.start = starved
"""

#: A window that does not look at what the workers take at once.
WINDOW_OF_EIGHT = """
from common import dispatch
made = dispatch.Window.__init__
def small(self, *args):
    made(self, *args)
    self._requests = self._most = 8
dispatch.Window.__init__ = small
"""

MAIN = "import sys; from {0} import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def fleet(server: str, tmp_path) -> Iterator[FleetServers]:
    with closing(FleetServers(tmp_path, **SMALL)) as servers:
        yield servers


def idle_share(fleet: FleetServers, requests: int, *, of_worker: str = "", of_feeders: str = "") -> float:
    """The share of the capacity that went unused, with backlog, from the first row to 95 % of them.

    `of_worker` and `of_feeders` is code that takes a safeguard out of the worker, or of producer and aggregator.
    """
    port = free_port()
    serve = ("serve", "test-model", "--engine", "echo", "--max-inflight", str(INFLIGHT), "--metrics-port", str(port))
    worker = fleet.start("worker", "-c", of_worker + MAIN.format("workers.cli"), *serve)
    wait_until(lambda: fleet.is_ready(worker) or not worker.running, 60, "the worker is ready")
    assert worker.running, worker.stderr
    fleet.start("aggregate", "-c", of_feeders + MAIN.format("workers.cli"), "aggregate")
    # Of many lengths, or all would begin and end together, in step with the looks.
    latency_s = random.Random(7)
    lines = [chat_line(f"r{i}", "x", echo={"latency_s": latency_s.uniform(0.25, 0.5)}) for i in range(requests)]
    source = fleet.write("in.jsonl", lines)
    producer = fleet.start("submit", "-c", of_feeders + MAIN.format("producer.cli"), "submit", str(source))
    wait_until(fleet.batch_ids, 60, "the batch is there")
    (batch_id,) = fleet.batch_ids()

    def reach(rows: float) -> tuple[float, float]:
        wait_until(lambda: fleet.finished(batch_id) >= rows or not producer.running, 90, f"{rows:.0f} rows")
        told = value(samples(port), "fleet_engine_idle_seconds_total", backlog="yes")
        assert told is not None
        return time.monotonic(), told

    began, before = reach(1)
    ended, after = reach(0.95 * requests)
    assert producer.wait(60).code == 0, producer.stderr
    return (after - before) / (ended - began)


def test_an_engine_does_not_wait_while_there_is_backlog(fleet: FleetServers) -> None:
    assert idle_share(fleet, 2000) < 0.3


@pytest.mark.parametrize(
    ("requests", "safeguard"), [(24, {"of_worker": PREFETCH_OF_ONE}), (300, {"of_feeders": WINDOW_OF_EIGHT})]
)
def test_an_engine_that_is_starved_is_seen_to_wait(
    fleet: FleetServers, requests: int, safeguard: dict[str, str]
) -> None:
    """Or the test above would show nothing. The true shares are 0.98 and 0.8; a look a second makes them inexact."""
    assert idle_share(fleet, requests, **safeguard) > 0.45
