"""Traces of real fleets, as a collector gets them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common import layout
from common.tracing import FLUSH_S, is_chosen
from tests.invariants import chat_line, chat_lines, rows_of
from tests.servers import MODEL, FleetServers, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

collectors = pytest.importorskip("tests.collector", reason="pip install 'batch-fleet[otel]'")

MARK = "sentinel-4711"
PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
IDS = {"fleet.batch_id", "fleet.run"}


@pytest.fixture
def collector() -> Iterator[collectors.Collector]:
    with collectors.Collector() as started:
        yield started


@pytest.fixture
def traced(server: str, tmp_path: Path, collector: collectors.Collector) -> Iterator[FleetServers]:
    """A fleet whose processes send their traces to the collector, soon."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with closing(FleetServers(tmp_path, **environment)) as fleet:
        yield fleet


def closed(fleet: FleetServers, batch_id: str) -> None:
    wait_until(lambda: fleet.is_closed(batch_id), 60, "the batch is closed")


def _told(name: str) -> set[str]:
    """The attributes that a span has by the page's table."""
    ((cell,),) = [re.findall(r"[^|]+(?= \|$)", line) for line in PAGE.splitlines() if line.startswith(f"| `{name}`")]
    return {*re.findall(r"`((?:fleet|gen_ai)\.[\w.]+)`", cell)} | (IDS if cell.startswith(" ids") else set())


def test_a_batch_is_one_trace_from_its_submit_to_its_output(
    traced: FleetServers, collector: collectors.Collector
) -> None:
    """One id in four processes; requests by their share; nothing of a prompt, an answer or an id of the user's."""
    slow = {"latency_s": 0.1}  # so that both workers get some
    lines = [chat_line(f"{MARK}-{number}", f"{MARK} {number}", echo=slow) for number in range(120)] + [
        chat_line(f"{MARK}-a", f"{MARK} is my secret", temperature=MARK),
        chat_line(f"{MARK}-b", MARK, model=MARK),
        chat_line(f"{MARK}-c", MARK).replace("/v1/chat/completions", f"/v1/{MARK}"),
        chat_line(f"{MARK}-d", MARK, echo={"raise": True}),
    ]
    traced.aggregator()
    traced.worker("--max-inflight", "8", FLEET_TRACE_REQUESTS="0.3")
    traced.worker("--max-inflight", "8", FLEET_TRACE_REQUESTS="0.3")
    path = traced.write(f"{MARK}.jsonl", lines)

    done = traced.producer("submit", str(path), "-o", str(traced.folder / f"{MARK}.out.jsonl"))

    assert done.code == 3, done.stderr
    traced.stop_all()
    (batch_id,) = traced.batch_ids()
    spans = collector.spans()
    (root,) = collector.spans("submit")
    assert {span.trace for span in spans} == {root.trace}
    assert root.parent == ""
    assert root.attributes["fleet.batch_id"] == batch_id
    assert root.attributes["fleet.requests"] == len(lines)
    assert {span.service for span in spans} == {"batch-fleet"}
    names = collector.names()
    assembled = collector.spans("assemble")[0]  # two aggregator threads may do it at once, and one of them wins
    assert assembled.attributes["fleet.status"] == "completed"
    assert assembled.attributes["fleet.failed"] == 4
    assert root.attributes["fleet.shards"] == 8
    assert {span.attributes["fleet.shard"] for span in collector.spans("seal")} == set(range(8))
    assert sum(span.attributes["fleet.shards"] for span in collector.spans("feed")) == 8
    for name in ("intake", "write", "feed", "seal", "request", "assemble", "deliver"):
        assert {span.parent for span in collector.spans(name)} == {root.id}, name
    for name in {*names} - {"request"}:  # what a request says depends on what became of it
        for span in collector.spans(name):
            assert set(span.attributes) - {"error.type"} == _told(name), name
    assert {each for span in collector.spans("request") for each in span.attributes} == _told("request")
    # The command waits for its rows, its span does not.
    assert root.end < assembled.end

    requests = {span.attributes["fleet.index"]: span for span in collector.spans("request")}
    header = f"00-{root.trace}-{root.id}-01"
    assert set(requests) == {index for index in range(len(lines)) if is_chosen(header, index, 0.3)}
    assert {span.parent for span in collector.spans("engine")} <= {span.id for span in requests.values()}
    assert names["engine"] >= names["request"] == len(requests) > 10
    fine = next(span for index, span in requests.items() if index < 120)
    assert fine.attributes["fleet.outcome"] == "completed"
    assert fine.attributes["gen_ai.request.model"] == MODEL
    assert fine.attributes["gen_ai.usage.input_tokens"] > 0
    assert fine.attributes["fleet.url"] == "/v1/chat/completions"
    assert fine.events == ("begun",)
    assert root.start <= fine.start <= fine.end
    assert len({span.pid for span in spans}) == 4
    assert [body for body in collector.bodies if MARK.encode() in body] == []


def test_what_a_user_wrote_is_in_no_span_of_a_request(traced: FleetServers, collector: collectors.Collector) -> None:
    lines = [
        chat_line(f"{MARK}-a", f"{MARK} is my secret", temperature=MARK),
        chat_line(f"{MARK}-b", MARK, model=MARK),
        chat_line(f"{MARK}-c", MARK).replace("/v1/chat/completions", f"/v1/{MARK}"),
        chat_line(f"{MARK}-d", MARK, echo={"raise": True}),
        chat_line(f"{MARK}-e", MARK, echo={"status": 503, "times": 1}),
        chat_line(f"{MARK}-f", MARK),
    ]
    traced.aggregator()
    traced.worker("--served-model-name", MODEL, "second", FLEET_TRACE_REQUESTS="1")

    done = traced.producer("submit", str(traced.write("in.jsonl", lines)))

    assert done.code == 3, done.stderr
    traced.stop_all()
    requests = {span.attributes["fleet.index"]: span.attributes for span in collector.spans("request")}
    outcomes = [requests[index]["fleet.outcome"] for index in range(len(lines))]
    kinds = ["invalid_request", "model_not_found", "unsupported_endpoint", "internal_error", "completed", "completed"]
    assert outcomes == kinds
    assert [requests[index]["gen_ai.request.model"] for index in (1, 5)] == ["other", MODEL]
    assert requests[2]["fleet.url"] == "other"
    assert requests[4]["fleet.calls"] == 2
    raised = [span for span in collector.spans("engine") if span.failed]
    assert [span.attributes for span in raised] == [{"error.type": "RuntimeError"}]
    assert [body for body in collector.bodies if MARK.encode() in body] == []


def test_nothing_is_traced_unless_the_variables_ask(traced: FleetServers, collector: collectors.Collector) -> None:
    """Absent, disabled, another exporter, or sampled away: no span, no header, nothing in the manifest."""
    lines = chat_lines(5)
    variants: list[dict[str, str]] = [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_SAMPLER": "always_off"},
    ]
    for variant in variants:
        submitted = traced.producer(
            "submit", str(traced.write("in.jsonl", lines)), "--detach", "--new", FLEET_TRACE_REQUESTS="1", **variant
        )
        assert submitted.code == 0, submitted.stderr
        manifest = json.loads(traced.store.read(layout.manifest(submitted.stdout.decode().strip())))
        assert manifest["traceparent"] == ""
    assert len(traced.client.lrange("gpu", 0, -1)) == len(variants) * len(lines)
    for raw in traced.client.lrange("gpu", 0, -1):
        assert "traceparent" not in json.loads(raw)["headers"]
    # These trace, and find nothing to join.
    traced.aggregator()
    traced.worker(FLEET_TRACE_REQUESTS="1")
    for batch_id in traced.batch_ids():
        closed(traced, batch_id)
    traced.stop_all()

    assert collector.bodies == []


def test_a_detached_and_retried_batch_goes_on_in_its_trace(
    traced: FleetServers, collector: collectors.Collector
) -> None:
    """Whoever feeds, whatever run: the trace is the batch's."""
    lines = [*chat_lines(3), chat_line("fails", "x", temperature="hot")]
    path = traced.write("in.jsonl", lines)
    batch_id = traced.producer("submit", str(path), "--detach").stdout.decode().strip()
    attached = traced.start_producer("submit", str(path), "-o", str(traced.folder / "out.jsonl"))
    wait_until(lambda: "attached" in attached.stderr, 30, "a second submit attached")
    traced.aggregator()
    traced.worker(FLEET_TRACE_REQUESTS="1")
    assert attached.wait(60).code == 3
    again = traced.producer("retry", batch_id, "-o", str(traced.folder / "out.jsonl"))
    assert again.code == 3, again.stderr
    traced.stop_all()

    first, second = collector.spans("submit")
    (retried,) = collector.spans("retry")
    assert {span.trace for span in collector.spans()} == {first.trace}
    assert first.parent == ""
    assert second.parent == retried.parent == first.id
    assert retried.attributes["fleet.run"] == 2
    runs = [span.attributes["fleet.run"] for span in collector.spans("request")]
    assert sorted(runs) == [1, 1, 1, 1, 2]
    assert {span.attributes["fleet.run"] for span in collector.spans("assemble")} == {1, 2}


def test_requests_that_are_sent_again_join_their_trace(traced: FleetServers, collector: collectors.Collector) -> None:
    """Their first messages got lost; the aggregator that sends others was not there at submit."""
    path = traced.write("in.jsonl", chat_lines(3))
    batch_id = traced.producer("submit", str(path), "--detach").stdout.decode().strip()
    traced.client.delete("gpu")
    short = {"FLEET_LEASE_S": "1", "FLEET_TEST_SHORT_LEASES": "1"}
    traced.worker(FLEET_TRACE_REQUESTS="1", **short)
    traced.aggregator(**short)
    closed(traced, batch_id)
    traced.stop_all()

    (root,) = collector.spans("submit")
    assert {span.trace for span in collector.spans("request")} == {root.trace}
    assert len(collector.spans("request")) == 3


def test_a_command_inside_a_trace_continues_it(traced: FleetServers, collector: collectors.Collector) -> None:
    outer = "00-11112222333344445555666677778888-1234567812345678-01"
    traced.producer("submit", str(traced.write("in.jsonl", chat_lines(1))), "--detach", TRACEPARENT=outer)
    unsampled = outer[:-1] + "0"
    traced.producer("submit", str(traced.write("b.jsonl", chat_lines(2))), "--detach", TRACEPARENT=unsampled)

    (root,) = collector.spans("submit")
    assert (root.trace, root.parent) == (outer[3:35], "1234567812345678")


def test_a_local_batch_is_one_trace_too(workplace, collector: collectors.Collector) -> None:
    path = workplace.write("in.jsonl", chat_lines(4))

    done = workplace.producer(
        *("submit", str(path), "--local", "--engine", "echo", "--model", MODEL),
        OTEL_TRACES_EXPORTER="otlp",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{collector.url}/v1/traces",
        OTEL_SERVICE_NAME="nightly",
        FLEET_TRACE_REQUESTS="1",
    )

    assert done.code == 0, done.stderr
    assert len({span.trace for span in collector.spans()}) == 1
    assert {span.service for span in collector.spans()} == {"nightly"}
    assert collector.names()["request"] == 4
    assert {"submit", "seal", "assemble", "deliver"} <= set(collector.names())


PROGRAM = """
import json, sys
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from producer import submit
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
with trace.get_tracer("program").start_as_current_span("nightly"):
    with submit(open(sys.argv[1])) as batch:
        print(batch.id)
"""


def test_a_program_that_traces_has_its_batches_in_its_trace(
    traced: FleetServers, collector: collectors.Collector
) -> None:
    """By what it has set up itself, as from any library."""
    path = traced.write("in.jsonl", chat_lines(3))
    ran = traced.start("program", "-c", PROGRAM, str(path)).wait(40)
    assert ran.code == 0, ran.stderr
    traced.aggregator()
    traced.worker(FLEET_TRACE_REQUESTS="1")
    closed(traced, ran.stdout.decode().strip())
    traced.stop_all()

    (outer,), (root,) = collector.spans("nightly"), collector.spans("submit")
    assert root.parent == outer.id
    assert {span.trace for span in collector.spans()} == {outer.trace}
    assert {span.parent for name in ("intake", "write", "feed", "seal") for span in collector.spans(name)} == {root.id}
    assert collector.names()["request"] == 3


class Silent:
    """A collector that takes connections, and never answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("how", ["silent", "refused", "broken"])
def test_a_collector_that_fails_harms_no_batch(server: str, tmp_path: Path, how: str) -> None:
    """Nothing listens, nothing answers, or all is refused: the rows come, and processes end soon."""
    silent, broken = Silent(), collectors.Collector(status=503)
    urls = {"silent": silent.url, "broken": broken.url, "refused": "http://127.0.0.1:9"}
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": urls[how], "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with closing(silent), broken, closing(FleetServers(tmp_path, **environment)) as fleet:
        aggregator = fleet.aggregator()
        worker = fleet.worker(FLEET_TRACE_REQUESTS="1")
        done = fleet.producer("submit", str(fleet.write("in.jsonl", chat_lines(300))), timeout_s=40)
        began = time.monotonic()
        assert aggregator.stop().code == worker.stop().code == 0
        took_s = time.monotonic() - began

        assert done.code == 0, done.stderr
        assert len(rows_of((fleet.folder / "in.out.jsonl").read_bytes())) == 300
        assert took_s < 2 * FLUSH_S + 6
        assert done.stderr.count("traces:") <= 2, done.stderr
        assert "Traceback" not in done.stderr + worker.stderr + aggregator.stderr
        assert not [line for line in worker.stderr.splitlines() if '"opentelemetry' in line]


def test_a_worker_that_is_killed_has_no_part_in_the_end_of_its_trace(
    traced: FleetServers, collector: collectors.Collector
) -> None:
    """What it had not sent is lost; the request runs elsewhere, in the same trace."""
    short = {"FLEET_LEASE_S": "1", "FLEET_TEST_SHORT_LEASES": "1", "FLEET_TRACE_REQUESTS": "1"}
    traced.aggregator(**short)
    first = traced.worker(**short)
    path = traced.write("in.jsonl", [chat_line("slow", "x", echo={"latency_s": 3})])
    batch_id = traced.producer("submit", str(path), "--detach").stdout.decode().strip()
    wait_until(lambda: traced.taken() == 1, 20, "the request runs")
    os.kill(first.pid, signal.SIGKILL)
    first.wait(10)
    traced.worker(**short)
    closed(traced, batch_id)
    traced.stop_all()

    (root,) = collector.spans("submit")
    (request,) = collector.spans("request")
    assert request.trace == root.trace
    assert request.attributes["fleet.strikes"] == 1


def test_a_delivery_that_brings_no_row_says_why(traced: FleetServers, collector: collectors.Collector) -> None:
    """One is handed back by a drain; the next one is stopped because the batch is cancelled."""
    slow = {"FLEET_TRACE_REQUESTS": "1", "FLEET_DRAIN_S": "0.1"}
    traced.aggregator()
    first = traced.worker(**slow)
    path = traced.write("in.jsonl", [chat_line("slow", "x", echo={"latency_s": 60})])
    batch_id = traced.producer("submit", str(path), "--detach").stdout.decode().strip()
    wait_until(lambda: traced.taken() == 1, 20, "the request runs")
    first.stop()
    traced.worker(**slow)
    wait_until(lambda: traced.taken() == 1, 20, "the request runs again")
    assert traced.producer("cancel", batch_id).code == 0
    closed(traced, batch_id)
    wait_until(lambda: traced.taken() == 0, 20, "it was stopped")
    traced.stop_all()

    deliveries = collector.spans("request")
    assert [span.attributes["fleet.outcome"] for span in deliveries] == ["handed_back", "ended"]
    assert not any(span.failed for span in deliveries)
    assert len({span.trace for span in collector.spans()}) == 1
    assert {span.attributes["fleet.status"] for span in collector.spans("assemble")} == {"cancelled"}
