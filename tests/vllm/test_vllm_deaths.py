"""Deaths on a real engine: of the worker, and of the engine by the signal that a service manager sends to everybody."""

from __future__ import annotations

import json
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

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
REQUESTS = 24


@pytest.fixture
def fleet(server: str, tmp_path: Path) -> Iterator[FleetServers]:
    with closing(FleetServers(tmp_path, FLEET_LEASE_S="3", FLEET_TEST_SHORT_LEASES="1")) as servers:
        yield servers


def engines(fleet: FleetServers) -> list[psutil.Process]:
    """The processes of engines that are alive."""
    return [process for process in fleet.alive() if "Engine" in process.name()]


def worker(fleet: FleetServers, model_folder: str) -> Process:
    process = fleet.start("worker", "-m", "workers", "serve", model_folder, *FLAGS)
    wait_until(lambda: fleet.is_ready(process) or not process.running, LOAD_S, "the engine is loaded")
    assert process.running, process.stderr
    return process


def test_a_batch_survives_its_worker_and_its_engine(fleet: FleetServers, model_folder: str) -> None:
    """SIGKILL of the worker leaves no engine; SIGTERM of the engine cuts rows short that are never recorded.

    Both batches end with the rows of an undisturbed one (float32, greedy).
    """
    body = {"model": "test-model", "max_tokens": 96, "temperature": 0, "ignore_eos": True}
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

    def submitted() -> str:
        return fleet.producer("submit", str(source), "--new", "--detach").stdout.decode().strip()

    def rows(batch_id: str) -> list[bytes]:
        wait_until(lambda: fleet.is_closed(batch_id), 120, "the batch is complete")
        output = fleet.folder / f"{batch_id}.jsonl"
        assert fleet.producer("fetch", batch_id, "-o", str(output)).code == 0
        return output.read_bytes().splitlines()

    first = worker(fleet, model_folder)
    killed = submitted()
    wait_until(lambda: fleet.taken() == REQUESTS, 60, "the worker has everything in hand")
    first.kill()
    died = time.monotonic()
    wait_until(lambda: not engines(fleet), 10, "the engine is gone")
    print(json.dumps({"engine_gone_after_s": round(time.monotonic() - died, 2)}))

    second = worker(fleet, model_folder)
    after_the_worker = rows(killed)
    undisturbed = rows(submitted())

    cut_short = submitted()
    wait_until(lambda: fleet.taken() == REQUESTS, 60, "the worker has everything in hand")
    (core,) = engines(fleet)
    core.send_signal(signal.SIGTERM)
    assert second.wait(60).code == 70
    assert (fleet.taken(), fleet.waiting()) == (0, REQUESTS - fleet.finished(cut_short))
    worker(fleet, model_folder)
    after_the_engine = rows(cut_short)

    for disturbed in (after_the_worker, after_the_engine):
        assert all(parse_row(row)["error"] is None for row in disturbed)
        assert [same_row(one, other) for one, other in zip(disturbed, undisturbed, strict=True)] == [True] * REQUESTS
