"""Large lines: they reach every worker, and do not travel in messages."""

from __future__ import annotations

import pytest

from tests.invariants import assert_complete, chat_line
from tests.servers import FleetServers, wait_until

LINES = [chat_line(f"c{number}", f"{number} " + "é🙂" * (40_000 if number % 4 == 1 else 1)) for number in range(24)]


@pytest.mark.parametrize("store", ["its own", "none", "another"])
def test_a_large_line_reaches_a_worker(fleet: FleetServers, store: str) -> None:
    """One that has the store reads it there; to one without, or with the wrong one, the aggregator lends it."""
    other = fleet.folder / "other"
    other.mkdir()
    fleet.aggregator()
    worker = fleet.worker(
        **{"its own": {}, "none": {"FLEET_STORE": ""}, "another": {"FLEET_STORE": other.as_uri()}}[store]
    )
    output = fleet.folder / "out.jsonl"

    assert fleet.producer("submit", str(fleet.write("in.jsonl", LINES)), "-o", str(output)).code == 0

    assert_complete(LINES, output.read_bytes())
    assert ("is not read but asked for" in worker.stderr) is (store == "another")
    assert not fleet.client.keys("fleet:line:*")


def test_a_request_whose_line_nobody_has_yet_waits_and_is_drained(fleet: FleetServers) -> None:
    """Without an aggregator and without a store nothing is lost: the delivery is handed back, and runs elsewhere."""
    worker = fleet.worker(FLEET_STORE="", FLEET_DRAIN_S="0")
    producer = fleet.start_producer("submit", str(fleet.write("in.jsonl", LINES)), "-o", str(fleet.folder / "out"))
    wait_until(lambda: fleet.taken() == 6 and not fleet.waiting(), 30, "six large lines wait for a loan")

    assert worker.stop().code == 0

    assert fleet.waiting() == 6
    fleet.worker()
    fleet.aggregator()
    assert producer.wait(60).code == 0
    assert_complete(LINES, (fleet.folder / "out").read_bytes())
