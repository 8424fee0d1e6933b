"""Several models in one file: each request goes to its model's workers, and one ordered output comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.invariants import assert_complete, chat_line
from tests.servers import FleetServers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = 32


@pytest.fixture
def fleet(server: str, tmp_path: Path) -> Iterator[FleetServers]:
    """An aggregator that knows of a queue for one model, and no worker yet."""
    servers = FleetServers(
        tmp_path,
        FLEET_ROUTES="big=gpu-big",
        FLEET_SHARD_SIZE="16",
        FLEET_WINDOW=str(WINDOW),
        FLEET_DRAIN_S="0",
        FLEET_LEASE_S="3",
        FLEET_TEST_SHORT_LEASES="1",
    )
    try:
        servers.aggregator()
        yield servers
    finally:
        servers.close()


def lines_for(*models: str, count: int = 60) -> list[str]:
    """Lines that name these models in turn."""
    return [chat_line(f"r{n:03d}", f"text {n}", model=models[n % len(models)]) for n in range(count)]


def test_each_model_has_its_own_workers_and_the_output_is_in_order(fleet: FleetServers) -> None:
    """A model that no route names goes to the default queue, whose engine does not know it."""
    fleet.worker("--queue", "gpu-big", model="big")
    fleet.worker(model="small")
    lines = lines_for("big", "small", "nobody's")
    path = fleet.write("in.jsonl", lines)

    run = fleet.producer("submit", str(path))

    assert run.code == 3, run.stderr
    wanted = {f"r{n:03d}": "err" if n % 3 == 2 else "ok" for n in range(60)}
    rows = assert_complete(lines, (fleet.folder / "in.out.jsonl").read_bytes(), wanted)
    assert {row["error"]["code"] for row in rows if row["error"]} == {"model_not_found"}
    assert "big: " in run.stderr
    assert "small: " in run.stderr


def test_a_submit_says_which_model_has_no_worker_and_goes_on_waiting(fleet: FleetServers) -> None:
    fleet.worker(model="small")
    lines = lines_for("big", "small")
    producer = fleet.start_producer("submit", str(fleet.write("in.jsonl", lines)))

    wait_until(lambda: "none serves the queue 'gpu-big' (of big)" in producer.stderr, 30, "it says what is missing")
    wait_until(lambda: fleet.waiting("gpu") == 0, 30, "the others are not held up")
    status = fleet.producer("status").stdout.decode()
    assert (
        "queue gpu-big  for big: 30 messages waiting, 30 requests published and not finished, 0 workers ready" in status
    )
    assert (
        "queue gpu  for every other model: 0 messages waiting, 0 requests published and not finished, 1 workers ready"
        in status
    )

    fleet.worker("--queue", "gpu-big", model="big")
    assert producer.wait(60).code == 0
    assert_complete(lines, (fleet.folder / "in.out.jsonl").read_bytes())


def test_a_model_without_workers_does_not_starve_the_others(fleet: FleetServers) -> None:
    """Its window fills up; theirs are their own. (Off: one window for both, by a default route.)"""
    fleet.worker("--max-inflight", "4", model="small")
    lines = lines_for("big", "small", count=4 * WINDOW)
    producer = fleet.start_producer("submit", str(fleet.write("in.jsonl", lines)))
    wait_until(fleet.batch_ids, 30, "it is submitted")
    (batch_id,) = fleet.batch_ids()

    # Of the model without workers at most a window of 32 waits, so more of the other one are done than fit beside it.
    wait_until(lambda: fleet.finished(batch_id) > WINDOW, 30, "the other model's requests go on")
    assert fleet.waiting("gpu-big") <= 2 * WINDOW

    fleet.worker("--queue", "gpu-big", model="big")
    assert producer.wait(60).code == 0
    assert_complete(lines, (fleet.folder / "in.out.jsonl").read_bytes())


def test_lost_requests_go_back_to_their_own_queue(fleet: FleetServers) -> None:
    """The watchdog looks at each queue by itself: one without workers is no loss."""
    fleet.worker(model="small")
    lines = lines_for("big", "small", count=16)
    producer = fleet.start_producer("submit", str(fleet.write("in.jsonl", lines)))
    wait_until(lambda: fleet.waiting("gpu-big") == 8, 30, "requests wait for the model's workers")
    fleet.client.delete("gpu-big")

    fleet.worker("--queue", "gpu-big", model="big")

    assert producer.wait(90).code == 0
    assert_complete(lines, (fleet.folder / "in.out.jsonl").read_bytes())
