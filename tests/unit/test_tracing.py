"""Spans into an exporter in memory; tests/integration/test_traces.py has whole fleets."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common import tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("opentelemetry.sdk", reason="pip install 'batch-fleet[otel]'")

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ROOT = Path(__file__).parents[2]
PARENT = "00-11112222333344445555666677778888-1234567812345678-01"


class Traced:
    """This process traces, into memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.exporter = InMemorySpanExporter()

    def set(self, **environment: str) -> None:
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)

    def begin(self, exporter: Any = None, *, share: float = 1.0, **environment: str) -> None:
        self.set(**environment)
        tracing.begin(exporter or self.exporter, share=share)

    def spans(self) -> dict[str, Any]:
        """All that was recorded, by name; nothing is recorded any more."""
        tracing.stop()
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    for name in ("TRACEPARENT", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield Traced(monkeypatch)
    tracing.stop()


# -- off --------------------------------------------------------------------------------------------------------------


def test_without_a_word_of_the_environment_everything_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    tracing.start(share=1.0)

    assert tracing.joined("seal", PARENT, shard=1) is tracing.NOTHING
    assert tracing.request(PARENT, 0) is tracing.NOTHING
    assert tracing.child("engine") is tracing.NOTHING
    assert tracing.current() == ""
    with tracing.command("submit") as span:
        span.set(requests=1)
        span.event("begun")
        span.end()
        assert tracing.current() == ""
    tracing.stop()


@pytest.mark.parametrize(
    ("modules", "package"),
    [
        ("common.tracing", "opentelemetry"),
        # redis-py 8 imports the API and the SDK's metrics by itself where they are installed.
        ("producer.cli, producer.api, workers.cli, workers.aggregate, workers.pool", "opentelemetry.sdk.trace"),
        ("producer.cli, producer.api, workers.cli, workers.aggregate, workers.pool", "opentelemetry.exporter"),
    ],
)
def test_opentelemetry_is_not_imported_where_nothing_is_traced(modules: str, package: str) -> None:
    """It takes a fifth of a second, and memory in every worker."""
    program = (
        f"import sys, {modules}\n"
        "from common import tracing\n"
        "tracing.start(share=1.0)\n"
        f"for each in (tracing.command('submit'), tracing.request({PARENT!r}, 0), tracing.child('engine')):\n"
        "    assert each is tracing.NOTHING\n"
        "tracing.stop()\n"
        f"sys.exit({package!r} in sys.modules)"
    )

    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={}, check=True)


def test_without_its_packages_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with caplog.at_level(logging.INFO):
        tracing.start(share=1.0)

    assert tracing.request(PARENT, 0) is tracing.NOTHING
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "batch-fleet[otel]" in caplog.text


def test_what_is_wrong_with_the_set_up_is_one_line_and_no_end(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other people's words may quote a variable that is a secret."""

    def raises(_: object) -> None:
        raise ValueError("secret")

    traced.set(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_PROTOCOL="carrier-pigeon")
    tracing.start(share=1.0)
    monkeypatch.setattr(tracing, "_make_exporter", raises)
    tracing.start(share=1.0)

    assert tracing.request(PARENT, 0) is tracing.NOTHING
    ours, theirs = [record.getMessage() for record in caplog.records]
    assert "carrier-pigeon" in ours
    assert "ValueError" in theirs
    assert "secret" not in caplog.text


def test_a_header_that_cannot_be_read_is_not_quoted(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    """It is where the collector's password stands."""
    traced.set(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_HEADERS="authorization secret")
    tracing.start()

    assert tracing._process.sender is not None
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("environment", "package"),
    [
        ({}, "http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "http"),
    ],
)
def test_the_protocol_is_the_variables(environment: dict[str, str], package: str) -> None:
    """In a process of its own: a channel of gRPC's has threads."""
    pytest.importorskip(f"opentelemetry.exporter.otlp.proto.{package}", reason="the exporter is not installed")
    program = "import os; from common import tracing; print(type(tracing._make_exporter(os.environ)).__module__)"
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}

    told = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**endpoint, **environment}, check=True, capture_output=True
    )

    assert f".proto.{package}." in told.stdout.decode()


def test_what_is_switched_off_costs_next_to_nothing() -> None:
    """All that a request asks for, against what it takes: 220 µs of a worker's CPU (decision 13)."""

    def once() -> None:
        with tracing.request("", 1, batch_id="batch_0", run=1, shard=0) as span:
            span.event("begun")
            span.set(calls=1, strikes=0)
            with tracing.child("engine"):
                pass

    best_s = 1.0
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(1000):
            once()
        best_s = min(best_s, (time.perf_counter() - began) / 1000)

    assert best_s < 10e-6, f"{best_s * 1e6:.1f} µs"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_TRACES_EXPORTER": "", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "false", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_opentelemetrys_variables_decide(environment: dict[str, str], wanted: bool) -> None:
    assert tracing.is_wanted(environment) is wanted


# -- on ---------------------------------------------------------------------------------------------------------------


def test_a_command_begins_a_trace_and_everything_joins_it(traced: Traced) -> None:
    traced.begin()
    with tracing.command("submit", since=1_000) as root:
        traceparent = tracing.current()
        tracing.child("intake", since=1_000, requests=3).end()
        root.set(batch_id="batch_1", requests=3)
        root.end()
        root.set(requests=4)  # too late
        with tracing.child("deliver"):
            pass
    tracing.joined("seal", traceparent, shard=2).end()
    with tracing.request(traceparent, 7, run=1) as span:
        span.set(outcome="completed")
        tracing.child("engine").end()
    tracing.child("outside").end()
    spans = traced.spans()

    top = spans["submit"].get_span_context()
    assert set(spans) == {"submit", "intake", "deliver", "seal", "request", "engine"}
    assert traceparent.startswith(f"00-{top.trace_id:032x}-{top.span_id:016x}-")
    assert int(traceparent[-2:], 16) & 1  # sampled; what else it says is newer
    assert spans["submit"].parent is None
    assert spans["submit"].start_time == spans["intake"].start_time == 1_000
    assert dict(spans["submit"].attributes) == {"fleet.batch_id": "batch_1", "fleet.requests": 3}
    assert {span.get_span_context().trace_id for span in spans.values()} == {top.trace_id}
    assert {spans[name].parent.span_id for name in ("intake", "deliver", "seal", "request")} == {top.span_id}
    assert spans["engine"].parent.span_id == spans["request"].get_span_context().span_id
    assert dict(spans["request"].attributes) == {"fleet.index": 7, "fleet.run": 1, "fleet.outcome": "completed"}


def test_a_batch_that_is_not_sampled_has_nothing_to_join(traced: Traced) -> None:
    traced.begin(OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG="0.0")
    with tracing.command("submit") as root:
        assert root is tracing.NOTHING
        assert tracing.current() == ""
        assert tracing.child("write") is tracing.NOTHING
    # A batch that was made without tracing does not get a trace by a later command.
    assert tracing.command("retry", joins="") is tracing.NOTHING
    assert tracing.joined("seal", "") is tracing.NOTHING
    assert traced.spans() == {}


def test_the_share_of_traced_batches_is_the_samplers(traced: Traced) -> None:
    traced.begin(OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    sampled = sum(tracing.command("submit").recording for _ in range(400))
    # A worker's own sampler does not decide again.
    followed = sum(tracing.joined("seal", PARENT).recording for _ in range(50))

    assert 120 < sampled < 280
    assert followed == 50


def test_requests_are_chosen_by_trace_and_index_alone() -> None:
    def chosen(traceparent: str, share: float) -> set[int]:
        return {index for index in range(100_000) if tracing.is_chosen(traceparent, index, share)}

    found = chosen(PARENT, 0.01)
    assert 850 < len(found) < 1150
    assert found == chosen(PARENT[:36] + "f" * 16 + "-01", 0.01)
    assert found != chosen(PARENT.replace("1111", "9999"), 0.01)
    assert found <= chosen(PARENT, 0.1)
    assert all(tracing.is_chosen(PARENT, index, 1.0) for index in range(1000))
    assert not any(tracing.is_chosen(PARENT, index, 0.0) for index in range(1000))


def test_requests_that_are_not_chosen_have_no_span(traced: Traced) -> None:
    traced.begin(share=0.1)
    seen = {index for index in range(500) if tracing.request(PARENT, index).recording}

    assert seen == {index for index in range(500) if tracing.is_chosen(PARENT, index, 0.1)}


@pytest.mark.parametrize(
    "header", [None, 7, ["x"], "", "x", "00-0-0-00", PARENT[:-3], PARENT.replace("-1234", "-z234")]
)
def test_a_header_that_is_none_is_no_trace(traced: Traced, header: object) -> None:
    """Redis is open to more than the fleet."""
    traced.begin()

    assert tracing.request(header, 0) is tracing.NOTHING


def test_only_what_is_known_to_be_harmless_stands_in_a_span(traced: Traced) -> None:
    traced.begin()
    with suppress(ValueError), tracing.command("submit") as span:
        span.set(batch_id="batch_1", prompt="secret", custom_id="secret")
        raise ValueError("secret")
    found = traced.spans()["submit"]

    assert "secret" not in found.to_json()
    assert dict(found.attributes) == {"fleet.batch_id": "batch_1", "error.type": "ValueError"}
    assert not found.status.is_ok


def test_an_interrupt_is_no_failure(traced: Traced) -> None:
    traced.begin()
    with suppress(KeyboardInterrupt), tracing.command("submit"):
        raise KeyboardInterrupt

    assert traced.spans()["submit"].status.is_unset


def test_the_service_is_called_batch_fleet_unless_somebody_says_otherwise(traced: Traced) -> None:
    traced.begin(OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test,host.name=mine")
    tracing.command("submit").end()
    ours = traced.spans()["submit"].resource.attributes
    traced.begin(OTEL_SERVICE_NAME="nightly")
    tracing.command("retry").end()
    theirs = traced.spans()["retry"].resource.attributes

    assert (ours["service.name"], theirs["service.name"]) == ("batch-fleet", "nightly")
    assert (ours["deployment.environment"], ours["host.name"]) == ("test", "mine")
    assert ours["process.pid"] > 0


# -- sending ----------------------------------------------------------------------------------------------------------


class Broken(SpanExporter):  # type: ignore[misc]
    """Refuses, raises, or hangs until it is let go."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.let_go = threading.Event()
        self.tries = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.tries += 1
        if self.how == "raises":
            raise RuntimeError("secret")
        if self.how == "hangs":
            self.let_go.wait(30)
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("how", ["refuses", "raises"])
def test_what_a_collector_does_not_take_is_counted_and_said_once(
    traced: Traced, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    broken = Broken(how)
    traced.begin(broken, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="1")
    for _ in range(5):
        tracing.command("submit").end()
    tracing.stop()

    assert broken.tries == 5
    assert len(caplog.records) == 1
    assert "1 spans lost" in caplog.text
    assert "secret" not in caplog.text


def test_nobody_waits_for_a_collector_that_hangs(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    """Spans are lost beyond a bound, and the end of the process is not held up."""
    broken = Broken("hangs")
    traced.begin(broken, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="1", OTEL_BSP_MAX_QUEUE_SIZE="10")
    sender = tracing._process.sender
    assert sender is not None
    began = time.monotonic()
    for _ in range(1000):
        tracing.command("submit").end()
    tracing.stop(0.2)
    took_s = time.monotonic() - began
    waiting = len(sender._waiting)
    broken.let_go.set()
    sender._thread.join(10)  # it says what was lost, here and not in the next test

    assert took_s < 5
    assert waiting <= 10
    assert "not sent within" in caplog.text


def test_a_fork_takes_no_thread_along() -> None:
    """Local mode starts processes beside the spans' thread; between fork and exec a thread may not be started."""
    program = (
        "import os, sys, threading\n"
        "from common import tracing\n"
        "from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter\n"
        "tracing.begin(InMemorySpanExporter(), share=1.0)\n"
        "tracing.command('submit').end()\n"
        "assert threading.active_count() == 2, threading.enumerate()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(threading.active_count())\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 1)"
    )

    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True)
