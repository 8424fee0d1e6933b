"""A real Flower beside a real worker: it shows what runs, and no prompt."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from common import broker
from tests.invariants import chat_line
from tests.servers import FleetServers, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Process

MARK = "sentinel-4712"
LOGIN = "operator:let-me-in"


class Flower:
    """A Flower that was started, and its pages."""

    def __init__(self, fleet: FleetServers, *command: str, **environment: str) -> None:
        self.port = free_port()
        self.process: Process = fleet.start("flower", *command, f"--port={self.port}", **environment)
        wait_until(lambda: self.get("/healthcheck")[0] == 200 or not self.process.running, 60, "Flower answers")
        assert self.process.running, self.process.stderr

    def get(self, path: str, *, login: str = LOGIN, data: bytes | None = None) -> tuple[int, str]:
        token = base64.b64encode(login.encode()).decode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            headers={"Authorization": f"Basic {token}"} if login else {},
        )
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()
        except OSError:
            return 0, ""

    def wait_for(self, *workers: Process) -> None:
        """Flower turns events on in the workers every 5 s, and asks them about themselves when it is told to."""
        wait_until(lambda: all("{task} enabled" in each.stderr for each in workers), 30, "events are turned on")
        wait_until(lambda: len(self.json("/api/workers?refresh=1")) == len(workers), 30, "Flower knows the workers")

    def json(self, path: str) -> Any:
        status, text = self.get(path)
        return json.loads(text) if status == 200 else {}

    def tasks(self, **query: str) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.json(f"/api/tasks?{urllib.parse.urlencode(query)}")
        return found


@pytest.fixture
def locked(server: str, tmp_path: Path) -> Iterator[FleetServers]:
    with closing(FleetServers(tmp_path, port=free_port(), password="pass-to-redis")) as fleet:
        yield fleet


def test_flower_shows_states_and_runtimes_and_no_prompt(locked: FleetServers) -> None:
    """By Celery's own command, with a broker that has a password."""
    aggregator, worker = locked.aggregator(), locked.worker()
    flower = Flower(
        locked, *("-m", "celery", "-A", "workers", "flower", "--address=127.0.0.1"), FLOWER_BASIC_AUTH=LOGIN
    )
    flower.wait_for(aggregator, worker)
    lines = [
        chat_line("ok", f"{MARK} is my secret", echo={"latency_s": 0.5}),
        chat_line("raises", f"{MARK} is my secret", echo={"raise": True}),
        chat_line("retried", f"{MARK} is my secret", echo={"status": 503, "times": 1}),
        chat_line("refused", f"{MARK} is my secret", temperature=MARK),
    ]
    # A task of the aggregator that is tried again: the store does not know this batch.
    app = broker.make_app(locked.broker.url)
    app.send_task(broker.FEED, kwargs={"batch_id": f"batch_{0:024x}", "run": 1}, queue="aggregate", ignore_result=True)
    app.close()

    done = locked.producer("submit", str(locked.write("in.jsonl", lines)))
    wait_until(
        lambda: len(flower.tasks(taskname=broker.RUN_REQUEST, state="SUCCESS")) == len(lines),
        30,
        "all requests are seen",
    )
    wait_until(lambda: flower.tasks(taskname=broker.SEAL_SHARD, state="SUCCESS"), 30, "the chord's body is seen")
    # Its state is RETRY for a moment only: the message that waits for its time has been received already.
    wait_until(
        lambda: any(task["retried"] for task in flower.tasks(taskname=broker.FEED).values()), 30, "the retry is seen"
    )

    requests = flower.tasks(taskname=broker.RUN_REQUEST)
    (sealed,) = flower.tasks(taskname=broker.SEAL_SHARD).values()
    pages = [
        *("/", "/tasks", "/broker", "/workers", "/api/tasks", "/metrics", "/api/queues/length"),
        *(f"/task/{uuid}" for uuid in [*requests, sealed["uuid"]]),
        *(f"/api/task/info/{uuid}" for uuid in [*requests, sealed["uuid"]]),
        *(f"/worker/{urllib.parse.quote(name)}" for name in flower.json("/api/workers")),
    ]
    seen = {page: flower.get(page) for page in pages}
    assert done.code == 3, done.stderr
    assert {status for status, _ in seen.values()} == {200}
    assert [page for page, (_, text) in seen.items() if MARK in text or "pass-to-redis" in text] == []
    assert {task["name"] for task in requests.values()} == {broker.RUN_REQUEST}  # a constant, not an id
    assert all(task["args"] == "-" and task["kwargs"].startswith("batch_") for task in requests.values())
    assert all(task["runtime"] is not None and task["result"] in {None, 1, "1", "None"} for task in requests.values())
    assert max(task["runtime"] for task in requests.values()) >= 0.5
    assert sealed["args"] == "-"
    assert {queue["name"] for queue in flower.json("/api/queues/length")["active_queues"]} == {"gpu", "aggregate"}
    assert "redis://" in seen["/broker"][1]
    assert "fleet://" not in seen["/broker"][1]
    assert "pass-to-redis" not in flower.process.stderr
    assert flower.get("/tasks", login="")[0] == 401
    for process in (flower.process, aggregator, worker):
        assert process.stop().code == 0


def test_the_flower_of_the_fleet_only_looks_and_keeps_little(fleet: FleetServers) -> None:
    worker = fleet.worker()
    flower = Flower(fleet, "-m", "workers", "flower", "--max-tasks=5", FLOWER_BASIC_AUTH=LOGIN)
    aggregator = fleet.aggregator()
    flower.wait_for(worker, aggregator)
    name = next(name for name in flower.json("/api/workers") if name.startswith("serve"))

    refused = flower.get(f"/api/worker/shutdown/{urllib.parse.quote(name)}", data=b"")[0]
    done = fleet.producer("submit", str(fleet.write("in.jsonl", [chat_line(f"r{i}", "x") for i in range(30)])))
    wait_until(lambda: len(flower.tasks()) == 5, 30, "the last tasks are kept")

    assert refused == 403
    assert done.code == 0
    assert worker.running
    for process in (flower.process, aggregator, worker):
        assert process.stop().code == 0


def test_a_bad_setting_of_the_workers_is_one_sentence(fleet: FleetServers) -> None:
    """Flower loads their app."""
    refused = fleet.start("flower", "-m", "workers", "flower", FLOWER_BASIC_AUTH=LOGIN, FLEET_DRAIN_S="soon").wait(30)

    assert refused.code == 2
    assert "FLEET_DRAIN_S" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_flower_for_everybody_is_refused(fleet: FleetServers) -> None:
    refused = fleet.start("flower", "-m", "workers", "flower", FLOWER_BASIC_AUTH="").wait(30)

    assert refused.code == 2
    assert "FLOWER_BASIC_AUTH" in refused.stderr
    assert "Traceback" not in refused.stderr
