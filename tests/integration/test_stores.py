"""Producers and aggregators share one store: one that differs is found out, and S3 is as good as a folder."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.invariants import assert_complete, chat_lines
from tests.servers import START_S, wait_until

if TYPE_CHECKING:
    from tests.servers import FleetServers


def test_a_submit_to_a_fleet_of_another_store_is_refused(fleet: FleetServers) -> None:
    """The aggregator would never find the batch, and the producer would wait for ever."""
    other = (fleet.folder / "other").as_uri()
    aggregator = fleet.aggregator(FLEET_STORE=other)
    wait_until(lambda: fleet.beats(aggregator), START_S, "the aggregator's heartbeat")
    source = fleet.write("in.jsonl", chat_lines(1))

    for options in ((), ("--detach",)):
        run = fleet.producer("submit", str(source), *options)
        assert run.code == 2, run.stderr
        assert fleet.store.uri in run.stderr
        assert other in run.stderr
        assert fleet.batch_ids() == set()
        assert not fleet.client.exists("gpu")


def test_another_way_to_the_same_store_is_the_same_store(fleet: FleetServers) -> None:
    """Two mounts of one share have different paths."""
    fleet.aggregator()
    fleet.worker()
    moved = fleet.folder / "mount"
    lines = chat_lines(3)
    source = fleet.write("in.jsonl", lines)
    # As good as a second mount: the same files under another root.
    moved.mkdir()
    for name in ("batches", "pointers"):
        (fleet.store_root / name).mkdir(exist_ok=True)
        (moved / name).symlink_to(fleet.store_root / name)
    (moved / "store-id").symlink_to(fleet.store_root / "store-id")

    run = fleet.producer("submit", str(source), FLEET_STORE=moved.as_uri())

    assert run.code == 0, run.stderr
    assert_complete(lines, (fleet.folder / "in.out.jsonl").read_bytes())


def test_a_waiting_producer_says_that_a_late_aggregator_works_on_another_store(fleet: FleetServers) -> None:
    source = fleet.write("in.jsonl", chat_lines(1))
    producer = fleet.start_producer("submit", str(source))
    wait_until(fleet.batch_ids, START_S, "the batch is durable")
    other = (fleet.folder / "other").as_uri()
    fleet.aggregator(FLEET_STORE=other)

    wait_until(
        lambda: f"works on {other}, not on {fleet.store.uri}" in producer.stderr, START_S, "the producer says so"
    )
    producer.send(signal.SIGINT)
    assert producer.wait(START_S).code == 130
