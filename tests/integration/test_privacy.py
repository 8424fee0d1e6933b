"""No prompt in anything but messages, rows and the batch directory: a marker is planted and looked for."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from common import broker
from tests.integration.pages import get
from tests.invariants import chat_line, rows_of
from tests.servers import MODEL, FleetServers, free_port, wait_until

if TYPE_CHECKING:
    from pathlib import Path

MARK = "sentinel-4711"

#: One request for each way through the worker: answered, raised, refused, unknown, retried, dead store of JSON.
LINES = [
    chat_line("ok", f"{MARK} is my secret", echo={"latency_s": 4.0}),
    chat_line("raises", f"{MARK} is my secret", echo={"raise": True}),
    chat_line("refused", f"{MARK} is my secret", temperature=MARK),
    chat_line("message", f"{MARK} is my secret", messages=[{"role": "user", "content": {MARK: MARK}}]),
    chat_line("unsupported", f"{MARK} is my secret").replace("/v1/chat/completions", f"/v1/{MARK}"),
    chat_line("retried", f"{MARK} is my secret", echo={"status": 503, "times": 1}),
    chat_line("streamed", f"{MARK} is my secret", stream=True),
    chat_line("long", f"{MARK} " * 9000),
    chat_line("nan", f"{MARK} is my secret", echo={"nan": True}),
]


class Events:
    """Everything that Celery's event stream carries, as Flower sees it."""

    def __init__(self, url: str) -> None:
        self.seen: list[str] = []
        self.ready = threading.Event()
        self._stop = False
        self._app = broker.make_app(url)
        self._thread = threading.Thread(target=self._capture, daemon=True)
        self._thread.start()
        assert self.ready.wait(20)

    def _capture(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self._note})
            with receiver.consumer_context() as (its_own, _, _):
                self.ready.set()
                while not self._stop:
                    try:
                        its_own.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    def _note(self, event: dict[str, Any]) -> None:
        self.seen.append(json.dumps(event, default=str))

    def types(self) -> set[str]:
        return {json.loads(event)["type"] for event in self.seen}

    def inspect(self) -> str:
        """What Celery's remote control tells of running and waiting requests; Flower asks for it too."""
        control = self._app.control.inspect(timeout=1.0)
        return json.dumps([control.active(), control.reserved()], default=str)

    def stop(self) -> None:
        self._stop = True
        self._thread.join(10)
        self._app.pool.force_close_all()
        self._app.close()


def test_nothing_that_people_or_dashboards_look_at_holds_a_prompt(fleet: FleetServers) -> None:
    path: Path = fleet.write("in.jsonl", LINES)
    submitted = fleet.producer("submit", str(path), "--detach")
    assert submitted.code == 0, submitted.stderr
    batch_id = submitted.stdout.decode().strip()

    # The messages, before anybody took one.
    for raw in fleet.client.lrange("gpu", 0, -1):
        message = json.loads(raw)
        body = message.pop("body")
        assert MARK in body or '"line": [0, ' in body  # a large line stays in the batch directory
        assert MARK not in json.dumps(message)

    # One that the worker cannot use; Celery would quote it whole.
    app = broker.make_app(fleet.broker.url)
    app.send_task("fleet.unheard_of", kwargs={"line": MARK}, queue="gpu", ignore_result=True, kwargsrepr="-")
    app.close()
    worker_port, exporter_port = free_port(), free_port()
    pages: list[str] = []

    events = Events(fleet.broker.url)
    try:
        fleet.aggregator("DEBUG")
        fleet.start("exporter", "-m", "workers", "exporter", "--port", str(exporter_port), "--loglevel", "DEBUG")
        fleet.start(
            *("worker", "-m", "celery", "-A", "workers", "worker", "-Q", "gpu", "-E", "--loglevel", "DEBUG"),
            FLEET_ENGINE="echo",
            FLEET_MODEL=MODEL,
            FLEET_METRICS_PORT=str(worker_port),
        )
        wait_until(lambda: fleet.finished(batch_id) == len(LINES) - 1, 60, "only the slow request is running")
        asked = events.inspect()
        pages += [get(worker_port, "/metrics")[1], get(exporter_port, "/metrics")[1], get(exporter_port, "/scale")[1]]
        wait_until(lambda: fleet.is_closed(batch_id), 60, "the batch is closed")
        wait_until(lambda: "task-succeeded" in events.types(), 5, f"events of the requests, not {events.types()}")
    finally:
        events.stop()
    output = fleet.folder / "out.jsonl"
    fetched = fleet.producer("fetch", batch_id, "-o", str(output))

    assert fetched.code == 3, fetched.stderr
    assert len(rows_of(output.read_bytes())) == len(LINES)
    assert [event for event in events.seen if MARK in event] == []
    assert [name for name, text in fleet.logs().items() if MARK.encode() in text] == []
    assert any(b"unregistered task" in text for text in fleet.logs().values())
    assert all(pages)
    assert [page for page in pages if MARK in page] == []
    assert "fleet_requests_total{" in pages[0]
    assert "fleet.run_request" in asked
    assert MARK not in asked


def test_a_refused_file_is_not_quoted(fleet: FleetServers) -> None:
    bad = [
        f'{{"custom_id": "a", "{MARK}',
        f'["{MARK}"]',
        json.dumps({"custom_id": "b", "method": MARK, "url": MARK, "body": MARK}),
        json.dumps({"custom_id": "c", "method": "POST", "url": "u", "body": MARK}),
        json.dumps({"custom_id": "d", "method": "POST", "url": {MARK: 1}, "body": {}}),
        f'{{"custom_id": "e", "method": "POST", "url": "u", "body": {{"x": "{MARK} \\q"}}}}',
    ]

    run = fleet.producer("submit", str(fleet.write("bad.jsonl", bad)))

    assert run.code == 2
    assert len(run.stderr.splitlines()) == len(bad)
    assert MARK not in run.stderr


def test_local_mode_writes_no_prompt_to_its_logs(fleet: FleetServers) -> None:
    """Its logs lie in the user's state folder and stay there when the batch did not complete."""
    path = fleet.write("in.jsonl", [*LINES[1:], chat_line("hangs", MARK, echo={"hang": True})])
    output = fleet.folder / "out.jsonl"
    process = fleet.start_producer(
        "submit", str(path), "--local", "--engine", "echo", "--model", MODEL, "-o", str(output), FLEET_STORE=""
    )
    wait_until(lambda: any(b"engine echo ready" in text for text in fleet.logs().values()), 40, "the worker is ready")
    wait_until(lambda: any(b"raised RuntimeError" in text for text in fleet.logs().values()), 40, "a request raised")

    result = process.stop()

    logs = fleet.logs()
    assert result.code == 143, result.stderr
    assert [name for name in logs if name.endswith("worker-1.log")]
    assert [name for name, text in logs.items() if MARK.encode() in text] == []
