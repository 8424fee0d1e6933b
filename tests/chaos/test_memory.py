"""A Redis that runs short of memory: nothing more is published, finished rows move to the store, everything goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.chaosfleet import ChaosFleet, figures
from tests.invariants import chat_line
from tests.servers import wait_until

if TYPE_CHECKING:
    from tests.chaos.chaosfleet import Batch

ROW_BYTES = 200_000
COUNT = 512
#: One of sixteen takes so long that every shard stays open while the others finish.
STRAGGLE_S = 10.0
STUCK_S = 4.0
ROOM_BYTES = 48 * 1024 * 1024

#: `python -c` in place of `-m workers`: without the soft limit, so that nothing is spilled and everything published.
WITHOUT_SOFT_LIMIT = (
    "import sys; import common.dispatch, workers.aggregate; "
    "common.dispatch.SOFT_LIMIT = workers.aggregate.SOFT_LIMIT = 100.0; "
    "from workers.cli import main; main(sys.argv[1:])"
)


def large_rows() -> list[str]:
    """Rows that take more than twice the room together, in shards that a straggler keeps open."""
    return [
        chat_line(f"r{n:04d}", f"text {n}", echo={"result_bytes": ROW_BYTES, "latency_s": STRAGGLE_S * (n % 16 == 7)})
        for n in range(COUNT)
    ]


def leave_room(chaos: ChaosFleet) -> None:
    used = int(chaos.client.info("memory")["used_memory"])
    chaos.client.config_set("maxmemory", used + ROOM_BYTES)
    chaos.client.config_set("maxmemory-policy", "noeviction")


def stuck(chaos: ChaosFleet, batch: Batch) -> bool:
    """Whether nothing is recorded for a while, though workers have finished rows in hand."""
    finished, since = chaos.finished(batch.batch_id), time.monotonic()
    while time.monotonic() - since < STUCK_S:
        if chaos.finished(batch.batch_id) != finished or chaos.is_closed(batch.batch_id):
            return False
        time.sleep(0.05)
    return True


def test_rows_that_do_not_fit_into_redis_move_to_the_store(chaos: ChaosFleet) -> None:
    chaos.aggregator()
    worker = chaos.worker("--max-inflight", "32")
    leave_room(chaos)

    batch = chaos.submit(large_rows())
    wait_until(lambda: list(chaos.store_root.glob("batches/*/runs/1/spills/*/*.jsonl")), 40, "rows were spilled")
    rows = chaos.assert_right(batch, timeout_s=90)

    peak = int(chaos.client.info("memory")["used_memory_peak"])
    refused = worker.stderr.count("OutOfMemory")
    figures(
        "memory", rows=len(rows), rows_mib=COUNT * ROW_BYTES >> 20, room_mib=ROOM_BYTES >> 20, peak_mib=peak >> 20,
        refused=refused,
    )  # fmt: skip
    assert chaos.calls.total(batch.batch_id) == COUNT
    assert not list(chaos.store_root.glob("batches/*/runs/1/spills/*"))


@pytest.mark.chaos_long
def test_without_the_soft_limit_a_full_redis_stays_full(chaos: ChaosFleet) -> None:
    """Rows wait in their workers, and nothing is lost; but nothing goes on either until somebody makes room."""
    chaos.start("aggregate", "-c", WITHOUT_SOFT_LIMIT, "aggregate")
    worker = chaos.worker("--max-inflight", "32")
    leave_room(chaos)

    batch = chaos.submit(large_rows())
    wait_until(lambda: "OutOfMemory" in worker.stderr, 60, "Redis refused rows")
    wait_until(lambda: stuck(chaos, batch), 60, "nothing goes on")
    assert not chaos.is_closed(batch.batch_id)

    chaos.client.config_set("maxmemory", 0)
    chaos.assert_right(batch, timeout_s=90)
