"""Deaths and ends on a real engine: of the worker, of its process group, of the engine by a service manager.

And that a worker which stays up serves one batch after the other.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common import keys
from tests.conftest import CASES
from tests.invariants import input_lines
from tests.rows import parse_row, same_row
from tests.servers import FleetServers, wait_until
from tests.vllm_flags import FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psutil

    from tests.servers import Process

pytestmark = pytest.mark.timeout(500)

LOAD_S = 150.0
REQUESTS = 20
#: Requests that a worker has in hand at once.
INFLIGHT = 16


@pytest.fixture
def fleet(server: str, tmp_path: Path) -> Iterator[FleetServers]:
    with closing(FleetServers(tmp_path, FLEET_LEASE_S="3", FLEET_TEST_SHORT_LEASES="1")) as servers:
        yield servers


def engines(fleet: FleetServers) -> list[psutil.Process]:
    """The processes of engines that are alive."""
    return fleet.alive("Engine")


def worker(fleet: FleetServers, model_folder: str) -> Process:
    flags = ("--max-inflight", str(INFLIGHT), *FLAGS)
    process = fleet.start("worker", "-m", "workers", "serve", model_folder, *flags)
    wait_until(lambda: fleet.is_ready(process) or not process.running, LOAD_S, "the engine is loaded")
    assert process.running, process.stderr
    return process


def submitted(fleet: FleetServers, source: Path) -> str:
    return fleet.producer("submit", str(source), "--new", "--detach").stdout.decode().strip()


def rows(fleet: FleetServers, batch_id: str) -> list[bytes]:
    wait_until(lambda: fleet.is_closed(batch_id), 120, "the batch is complete")
    output = fleet.folder / f"{batch_id}.jsonl"
    assert fleet.producer("fetch", batch_id, "-o", str(output)).code == 0
    return output.read_bytes().splitlines()


def wait_busy(fleet: FleetServers) -> None:
    wait_until(lambda: fleet.taken() == INFLIGHT, 60, "the worker has its hands full")


def assert_handed_back(fleet: FleetServers, batch_id: str) -> None:
    """Nothing is in a hand, and what is not recorded waits.

    Beside it a marker of the watchdog may wait, or one that was recorded in the last moment, to be answered as done.
    """
    assert fleet.taken() == 0
    assert fleet.waiting() >= REQUESTS - fleet.finished(batch_id)


def two_batches_in_sequence(fleet: FleetServers) -> None:
    """E06: on one event loop per call, or per thread, the second batch of a worker would freeze."""
    lines = input_lines(CASES / "base40.jsonl")
    source = fleet.write("base40.jsonl", lines)
    for _ in range(2):
        batch_id, most = submitted(fleet, source), 0
        while not fleet.is_closed(batch_id):
            with fleet.client.pipeline() as together:  # at one moment, while shards' marks come and go
                for shard in range(REQUESTS):  # more than there are
                    together.hlen(keys.marks(batch_id, 1, shard))
                most = max(most, sum(together.execute()))
            time.sleep(0.01)
        found = [parse_row(row) for row in rows(fleet, batch_id)]
        assert [row["custom_id"] for row in found] == [json.loads(line)["custom_id"] for line in lines]
        assert all(row["error"] is None for row in found)
        assert most == INFLIGHT


def test_a_batch_survives_its_worker_and_its_engine(fleet: FleetServers, model_folder: str) -> None:
    """E02: SIGKILL of the worker leaves no engine. E06: a worker that stays up serves one batch after the other.

    E01: SIGTERM of the engine cuts rows short that are never recorded, and its worker takes no more.

    Ctrl-C to the worker's process group ends the worker, and the engine only with it: no row is cut short, what is
    not finished in time is handed back. All batches end with the rows of an undisturbed one (float32, greedy).
    """
    body = {"model": "test-model", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    lines = [
        json.dumps(
            {
                "custom_id": f"d{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {**body, "messages": [{"role": "user", "content": f"Tell me about the number {number}."}]},
            }
        )
        for number in range(REQUESTS)
    ]
    source = fleet.write("in.jsonl", lines)
    fleet.aggregator()

    first = worker(fleet, model_folder)
    killed = submitted(fleet, source)
    wait_busy(fleet)
    first.kill()
    died = time.monotonic()
    wait_until(lambda: not engines(fleet), 10, "the engine is gone")
    print(json.dumps({"engine_gone_after_s": round(time.monotonic() - died, 2)}))

    # Seconds in which some requests end and others do not.
    fleet.environment["FLEET_DRAIN_S"] = "1"
    second = worker(fleet, model_folder)
    after_the_worker = rows(fleet, killed)
    undisturbed = rows(fleet, submitted(fleet, source))
    two_batches_in_sequence(fleet)
    interrupted = submitted(fleet, source)
    wait_busy(fleet)
    os.killpg(second.pid, signal.SIGINT)
    ended = second.wait(60)
    finished = fleet.finished(interrupted)
    print(json.dumps({"ctrl_c": True, "exit": ended.code, "finished": finished, "handed_back": REQUESTS - finished}))
    assert ended.code == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not engines(fleet)
    assert_handed_back(fleet, interrupted)

    third = worker(fleet, model_folder)
    after_ctrl_c = rows(fleet, interrupted)
    cut_short = submitted(fleet, source)
    wait_busy(fleet)
    (core,) = engines(fleet)
    core.send_signal(signal.SIGTERM)
    assert third.wait(60).code == 70
    assert_handed_back(fleet, cut_short)
    worker(fleet, model_folder)
    after_the_engine = rows(fleet, cut_short)

    for disturbed in (after_the_worker, after_ctrl_c, after_the_engine):
        assert all(parse_row(row)["error"] is None for row in disturbed)
        assert [same_row(one, other) for one, other in zip(disturbed, undisturbed, strict=True)] == [True] * REQUESTS
