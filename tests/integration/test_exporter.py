"""What the exporter shows of a real fleet, and of one whose broker is away."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.pages import get, samples, value
from tests.invariants import chat_line
from tests.servers import BrokerServer, FleetServers, Workplace, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Process

#: What a user of Redis needs who only exports; docs/metrics.md says the same.
READABLE = ["%R~fleet:*", "%R~unacked*", "%R~gpu", "%R~aggregate"]
READER = ["+@connection", "+info", "+time", "+scan", "+llen", "+hlen", "+hgetall", "+zrange", "+zcount", "+mget"]


class Exported(FleetServers):
    """A fleet with an exporter."""

    port = 0

    def export(self, *flags: str, **environment: str) -> Process:
        self.port = free_port()
        process = self.start(
            "exporter",
            *("-m", "workers", "exporter", "--port", str(self.port), *flags),
            **{"FLEET_EXPORTER_INTERVAL_S": "0.2", "FLEET_STORE": "", **environment},
        )
        wait_until(lambda: get(self.port, "/readyz")[0] == 200 or not process.running, 30, "the exporter is ready")
        assert process.running, process.stderr
        return process

    def scale(self, query: str = "") -> dict[str, Any]:
        status, text = get(self.port, f"/scale{query}")
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def submit(self, count: int, **knobs: object) -> str:
        lines = [chat_line(f"r{i}", "one two", echo=knobs) for i in range(count)]
        done = self.producer("submit", str(self.write("in.jsonl", lines)), "--detach", "--new")
        assert done.code == 0, done.stderr
        return done.stdout.decode().strip()


@pytest.fixture
def exported(server: str, tmp_path: Path) -> Iterator[Exported]:
    with closing(Exported(tmp_path)) as fleet:
        yield fleet


def test_a_fleet_at_zero_asks_for_workers_and_tells_when_it_will_be_done(exported: Exported) -> None:
    """A window smaller than the batch: what is not published yet counts as work too."""
    exported.environment.update(FLEET_WINDOW="20", FLEET_SHARD_SIZE="10")
    batch_id = exported.submit(60, latency_s=0.2)
    exporter = exported.export()

    waiting = exported.scale("?target_s=60&rate=0.25")

    assert waiting["queued"] == 20
    assert (waiting["remaining_requests"], waiting["open_batches"]) == (60, 1)
    assert (waiting["leased"], waiting["workers"], waiting["capacity"]) == (0, 0, 0)
    assert waiting["drain_s"] is None
    assert waiting["desired_replicas"] == 4  # 60 requests at 0.25 a second and worker, in a minute
    assert exported.scale()["desired_replicas"] == 1
    assert exported.scale("?min=3")["desired_replicas"] == 3
    assert exported.scale("?target_s=60&rate=0.25&max=2")["desired_replicas"] == 2

    exported.aggregator()
    exported.worker("--max-inflight", "4")
    rates = []
    wait_until(lambda: rates.append(exported.scale()) or rates[-1]["remaining_requests"] < 20, 30, "it gets done")
    busy = rates[-1]
    seen = samples(exported.port)

    assert 5 < busy["requests_per_s"] <= 25  # 4 at once, 0.2 s each: 20 at most
    assert busy["drain_s"] == pytest.approx(busy["remaining_requests"] / busy["requests_per_s"])
    assert busy["leased"] > 0
    assert (busy["workers"], busy["workers_ready"], busy["capacity"]) == (1, 1, 4)
    assert busy["remaining_tokens"] == busy["remaining_requests"] * 4
    assert value(seen, "fleet_up") == 1
    assert value(seen, "fleet_workers", queue="gpu", state="ready") == 1
    assert value(seen, "fleet_workers", queue="aggregate", state="ready") == 1
    assert value(seen, "fleet_overdue_leases") == 0
    assert (value(seen, "fleet_oldest_lease_seconds") or 0.0) < 30
    wait_until(lambda: exported.is_closed(batch_id), 30, "the batch is closed")
    wait_until(lambda: exported.scale()["desired_replicas"] == 0, 10, "nothing is left to do")
    assert exported.scale()["drain_s"] == 0
    assert value(samples(exported.port), "fleet_finished_requests_total", queue="gpu") == 60
    assert exporter.stop().code == 0


def test_an_outage_of_redis_is_no_empty_queue(workplace: Workplace, tmp_path: Path) -> None:
    port = free_port()
    with BrokerServer(tmp_path / "b", workplace.environment) as broker:
        exporter = workplace.start(
            "exporter",
            *("-m", "workers", "exporter", "--port", str(port)),
            FLEET_BROKER_URL=broker.url,
            FLEET_EXPORTER_INTERVAL_S="0.2",
        )
        wait_until(lambda: get(port, "/scale")[0] == 200, 30, "the exporter answers")
        assert json.loads(get(port, "/scale")[1])["desired_replicas"] == 0
    wait_until(lambda: get(port, "/scale")[0] == 503, 20, "the outage is noticed")

    away = samples(port)
    health, ready = get(port, "/healthz")[0], get(port, "/readyz")[0]
    with BrokerServer(tmp_path / "b", workplace.environment):
        wait_until(lambda: get(port, "/scale")[0] == 200, 20, "the exporter answers again")

        assert value(away, "fleet_up") == 0
        assert [name for name, _ in away if name.startswith("fleet_") and name != "fleet_up"] == []
        assert (health, ready) == (200, 503)
        assert exporter.stop().code == 0


def test_a_hanging_redis_is_an_outage_too(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    exported.export()

    exported.client.client_pause(7000)
    try:
        wait_until(lambda: get(exported.port, "/scale")[0] == 503, 6, "the last sample is out of date")
        assert get(exported.port, "/healthz")[0] == 200
    finally:
        exported.client.client_unpause()


def test_a_user_with_read_rights_is_enough(exported: Exported) -> None:
    exported.submit(3)
    exported.worker()  # a heartbeat to read, and an index whose dead a writer would remove
    exported.client.zadd("fleet:workers", {"dead": 1})
    exported.client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", *READABLE, "-@all", *READER)
    url = exported.broker.url.replace("redis+socket://", "redis+socket://reader:secret@")

    port = free_port()
    exporter = exported.start(
        "exporter",
        *("-m", "workers", "exporter", "--port", str(port)),
        FLEET_BROKER_URL=url,
        FLEET_EXPORTER_INTERVAL_S="0.2",
    )
    wait_until(lambda: get(port, "/scale")[0] == 200 or not exporter.running, 15, "the exporter answers")

    assert json.loads(get(port, "/scale")[1])["workers_ready"] == 1
    assert "secret" not in exporter.stderr


@pytest.mark.parametrize("query", ["?target_s=0", "?target_s=soon", "?min=-1", "?rate=nan", "?queue=unheard-of"])
def test_a_senseless_question_is_refused(shared_exporter: Exported, query: str) -> None:
    status, text = get(shared_exporter.port, f"/scale{query}")

    assert status == 400
    assert text


def test_every_series_is_in_the_docs_and_every_one_of_the_docs_is_there(exported: Exported) -> None:
    exported.client.config_set("maxmemory", 500_000_000)
    exported.aggregator()
    worker_port = free_port()
    exported.worker("--metrics-port", str(worker_port))
    exported.export()
    batch_id = exported.submit(3, latency_s=3.0)
    wait_until(lambda: exported.is_closed(batch_id), 30, "the batch is closed")
    wait_until(lambda: exported.scale()["requests_per_s"] is not None, 10, "the rate is measured")

    live = {
        name
        for port in (worker_port, exported.port)
        for name in re.findall(r"^# TYPE (fleet_\w+) ", get(port, "/metrics")[1], re.MULTILINE)
        if not name.endswith("_created")
    }

    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    assert live == set(re.findall(r"^\| `(fleet_\w+)` \|", docs, re.MULTILINE))


@pytest.fixture(scope="module")
def shared_exporter(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    with closing(Exported(tmp_path_factory.mktemp("exported"))) as fleet:
        fleet.export()
        yield fleet
