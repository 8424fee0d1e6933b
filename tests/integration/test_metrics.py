"""What workers and aggregators show of themselves over HTTP."""

from __future__ import annotations

import signal
import time
import urllib.request
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.broker import redis_client
from common.ledger import Ledger
from tests.integration.pages import get, samples, value
from tests.invariants import chat_line
from tests.servers import FleetServers, free_port, wait_until
from workers.engine.echo import EchoEngine
from workers.engine.host import EngineHost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import BrokerServer, Process


class Watched(FleetServers):
    """A fleet with one worker that shows its metrics."""

    port = 0
    serving: Process

    def serve(self, *flags: str, **environment: str) -> Process:
        self.port = free_port()
        self.serving = self.worker("--metrics-port", str(self.port), *flags, **environment)
        return self.serving


@pytest.fixture
def watched(server: str, tmp_path) -> Iterator[Watched]:
    with closing(Watched(tmp_path)) as fleet:
        yield fleet


def test_a_worker_counts_its_rows_tokens_and_seconds_by_model_and_outcome(watched: Watched) -> None:
    watched.serve("--served-model-name", "big", "small", "--max-inflight", "8")
    watched.aggregator()
    lines = [
        chat_line("a", "one two three", model="big"),
        chat_line("b", "one two", model="small", echo={"latency_s": 0.3}),
        chat_line("c", "one", model="unheard-of"),
        chat_line("d", "one", model="small", temperature="hot"),
    ]

    done = watched.producer("submit", str(watched.write("in.jsonl", lines)))

    seen = samples(watched.port)
    assert done.code == 3, done.stderr
    assert value(seen, "fleet_requests_total", model="big", outcome="completed") == 1
    assert value(seen, "fleet_requests_total", model="small", outcome="completed") == 1
    assert value(seen, "fleet_requests_total", model="small", outcome="invalid_request") == 1
    assert value(seen, "fleet_requests_total", model="other", outcome="model_not_found") == 1
    assert value(seen, "fleet_tokens_total", model="big", kind="prompt") == 3
    assert value(seen, "fleet_tokens_total", model="small", kind="completion") == 2
    assert value(seen, "fleet_request_seconds_count", model="small") == 2
    assert value(seen, "fleet_request_seconds_bucket", model="small", le="0.25") in {0, 1}
    assert value(seen, "fleet_request_seconds_bucket", model="small", le="60.0") == 2
    assert value(seen, "fleet_deliveries_total", redelivered="no") == 4
    assert value(seen, "fleet_queue_wait_seconds_count", queue="gpu") == 4
    assert 0 < (value(seen, "fleet_queue_wait_seconds_sum", queue="gpu") or 0.0) < 4 * 60
    assert value(seen, "fleet_engine_capacity_requests") == 8
    assert value(seen, "fleet_inflight_requests") == 0
    assert value(seen, "fleet_worker_state", state="ready") == 1
    assert not any("unheard-of" in str(key) or "batch_" in str(key) for key in seen)


def test_a_draining_worker_says_so_until_it_is_gone(watched: Watched) -> None:
    worker = watched.serve("--max-inflight", "2", FLEET_DRAIN_S="6")
    watched.aggregator()
    lines = [chat_line(f"r{i}", "x", echo={"latency_s": 60}) for i in range(3)]
    batch_id = watched.producer("submit", str(watched.write("in.jsonl", lines)), "--detach").stdout.decode().strip()
    wait_until(lambda: value(samples(watched.port), "fleet_engine_requests") == 2, 20, "two requests run")

    worker.send(signal.SIGTERM)
    wait_until(lambda: get(watched.port, "/readyz")[0] == 503, 10, "it is not ready any more")
    seen, health = samples(watched.port), get(watched.port, "/healthz")

    assert value(seen, "fleet_drains_total", how="signal") == 1
    assert value(seen, "fleet_worker_state", state="draining") == 1
    assert health == (200, "ok\n")
    assert worker.wait(30).code == 0
    watched.serve()
    wait_until(
        lambda: value(samples(watched.port), "fleet_deliveries_total", redelivered="yes") == 2, 20, "both come back"
    )
    again = samples(watched.port)
    assert value(again, "fleet_queue_wait_seconds_count", queue="gpu") == value(
        again, "fleet_deliveries_total", redelivered="no"
    )
    assert watched.producer("cancel", batch_id).code == 0
    wait_until(lambda: watched.is_closed(batch_id), 20, "the batch is closed")


def test_an_idle_engine_is_told_apart_by_whether_its_queue_has_a_backlog(watched: Watched) -> None:
    """Redis forgets the run, and there is no aggregator to restore it: requests wait at the worker, none runs."""
    lines = [chat_line(f"r{i}", "x") for i in range(12)]
    done = watched.producer("submit", str(watched.write("in.jsonl", lines)), "--detach")
    watched.client.delete(f"fleet:{done.stdout.decode().strip()}:1:head")
    watched.serve("--max-inflight", "4")

    def idle(backlog: str) -> float:
        return value(samples(watched.port), "fleet_engine_idle_seconds_total", backlog=backlog) or 0.0

    wait_until(lambda: idle("yes") > 2, 20, "the idle engine is seen to have a backlog")
    with_backlog_before = idle("no")
    assert watched.waiting() > 0
    assert with_backlog_before <= 2.5  # a second or two between its start and its first messages

    watched.client.delete("gpu")
    before = idle("yes")
    wait_until(lambda: idle("no") > with_backlog_before + 1.5, 20, "the idle engine is seen to have none")
    assert idle("yes") <= before + 1.5


def test_an_engine_that_waits_for_the_next_shards_has_a_backlog(watched: Watched) -> None:
    """Nobody feeds: the queue is empty, and the rest of the batch lies in the store."""
    watched.serve("--max-inflight", "2")
    lines = [chat_line(f"r{i}", "x") for i in range(100)]
    small = {"FLEET_WINDOW": "4", "FLEET_SHARD_SIZE": "4"}
    source = str(watched.write("in.jsonl", lines))
    batch_id = watched.producer("submit", source, "--detach", **small).stdout.decode().strip()

    def idle(backlog: str) -> float:
        return value(samples(watched.port), "fleet_engine_idle_seconds_total", backlog=backlog) or 0.0

    wait_until(lambda: watched.waiting() == watched.taken() == 0, 20, "the first shards are done")
    before = idle("yes"), idle("no")
    wait_until(lambda: idle("yes") > before[0] + 2.5, 20, "the engine is seen to wait for more")
    assert idle("no") <= before[1] + 1.5

    watched.aggregator(**small)
    wait_until(lambda: watched.is_closed(batch_id), 30, "the batch is closed")
    after = idle("no")
    wait_until(lambda: idle("no") > after + 1.5, 20, "an idle engine has nothing to do any more")


def test_health_pages_of_a_worker_and_an_aggregator(watched: Watched) -> None:
    port = free_port()
    aggregator = watched.aggregator(FLEET_METRICS_PORT=str(port))
    worker = watched.serve("--enable-metrics", "--port", "1")  # its own port wins

    assert get(port, "/healthz") == get(port, "/readyz") == (200, "ok\n")
    assert get(watched.port, "/healthz") == get(watched.port, "/readyz") == (200, "ok\n")
    assert "process_cpu_seconds_total" in get(port, "/metrics")[1]
    assert get(port, "/secret")[0] == 404
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(asked, timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")
    assert aggregator.stop().code == worker.stop().code == 0


def test_an_address_that_cannot_be_had_is_one_sentence(watched: Watched) -> None:
    watched.serve()

    second = watched.start_worker("--metrics-port", str(watched.port)).wait(30)
    wrong = watched.start_worker("--port", "9000").wait(30)

    assert second.code == wrong.code == 2
    assert (
        f"error: cannot show metrics on 127.0.0.1 port {watched.port}: another process listens there\n" in second.stderr
    )
    assert "Errno" not in second.stderr
    assert "--enable-metrics" in wrong.stderr
    assert "Traceback" not in second.stderr + wrong.stderr


def test_pages_are_shown_while_the_engine_loads(watched: Watched) -> None:
    """`/healthz` is for liveness: a model that loads for minutes is alive and not ready."""
    port = free_port()
    process = watched.start(
        "loading",
        "-c",
        "import workers.engine.echo as echo, asyncio, workers.cli\n"
        "start = echo.EchoEngine.start\n"
        "async def slowly(self):\n    await asyncio.sleep(4)\n    await start(self)\n"
        "echo.EchoEngine.start = slowly\n"
        f"workers.cli.main(['serve', 'm', '--engine', 'echo', '--metrics-port', '{port}'])",
    )

    wait_until(lambda: get(port, "/healthz")[0] == 200, 30, "the pages are there")
    assert get(port, "/readyz")[0] == 503
    assert value(samples(port), "fleet_worker_state", state="loading") == 1
    wait_until(lambda: get(port, "/readyz")[0] == 200, 30, "the worker is ready")
    assert process.stop().code == 0


def test_a_broker_that_hangs_is_no_reason_to_call_a_worker_dead(
    broker_server: BrokerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its questions to Redis wait, with requests in hand; its loop turns, and that is what liveness asks."""
    monkeypatch.setattr("workers.engine.host.STALE_S", 3.5)
    client = redis_client(broker_server.url)
    host = EngineHost(
        EchoEngine.from_args("m", []),
        Ledger(client),
        worker_id="w",
        queue="no-such-queue",
        max_inflight=2,
        on_death=lambda: None,
        notify=lambda kind, at: None,
    )
    host.start().result(10)
    try:
        broker_server.client.client_pause(6500)
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:
            assert host.alive
            time.sleep(0.1)
    finally:
        broker_server.client.client_unpause()
        host.stop()
        host.loop.close()
        client.close()


def test_a_dead_engine_ends_the_health(watched: Watched) -> None:
    watched.serve("--max-inflight", "2")
    watched.aggregator()
    lines = [chat_line("slow", "x", echo={"latency_s": 60}), chat_line("dead", "x", echo={"engine_dead": True})]
    batch_id = watched.producer("submit", str(watched.write("in.jsonl", lines)), "--detach").stdout.decode().strip()

    states = []
    wait_until(
        lambda: states.append(get(watched.port, "/healthz")[0]) or states[-1] != 200, 20, "it is not alive any more"
    )

    assert states[-1] in {503, 0}  # it exits within a moment
    assert watched.serving.wait(20).code == 70
    assert watched.producer("cancel", batch_id).code == 0
    wait_until(lambda: watched.is_closed(batch_id), 20, "the batch is closed")
