"""Traces of batches, by OpenTelemetry: the only module that imports it, and only in a process that is told to trace.

Owns: spans, what may stand in them, which requests get one, and sending them.
Must not know: what is traced. Callers name a span and its attributes; names that are not in `_ATTRIBUTES` are dropped,
so that no prompt, no answer and no id of a user's can get into a span.
On failure: nothing here raises, and nothing waits but `stop`, for a bounded time. Spans that a collector does not take
are lost, and a line of the log counts them.

    submit ─▶ intake, write, feed              producer
       ├─ feed, seal, assemble                 aggregator: finds the root in the manifest, as later runs do
       ├─ request ─▶ engine                    worker: finds it in a header of the request's message
       └─ deliver                              producer, if it waits

One trace is one batch, from its submit on; its root is kept as W3C `traceparent` in the manifest. The root is sampled
as OpenTelemetry's own variables say. A batch that was not sampled has no `traceparent`, and all that comes after finds
nothing to join: only `command` ever begins a trace.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, Self

from common.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextvars import Token

logger = logging.getLogger("fleet.tracing")

#: The header of messages, and its variable for commands that are run inside a trace (W3C Trace Context).
TRACEPARENT = "traceparent"

#: Where vLLM's own processes look for a collector, without being asked to trace (vLLM 0.32, tracing/otel.py).
ENGINE_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"

SERVICE_NAME = "batch-fleet"

#: Seconds that the end of a process waits for its last spans to be sent.
FLUSH_S = 3.0
#: Seconds between two lines of the log about spans that were lost.
COMPLAIN_S = 60.0

#: All that a span may say, by the names of the log; what has a name in OpenTelemetry's conventions has that.
_ATTRIBUTES = {
    **{name: f"fleet.{name}" for name in ("batch_id", "run", "shard", "index", "shards", "requests", "failed")},
    "outcome": "fleet.outcome",
    "status": "fleet.status",
    "calls": "fleet.calls",
    "strikes": "fleet.strikes",
    "url": "fleet.url",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}


class Span(Protocol):
    """A span, or nothing. As a context manager it is the parent of what is begun in its context meanwhile."""

    recording: bool

    def set(self, **attributes: str | float) -> None:
        """Say something of `_ATTRIBUTES`."""

    def event(self, name: str) -> None:
        """Note that something happened now."""

    def end(self) -> None:
        """End it now, and not when its block is left; what comes later is no part of it."""

    def __enter__(self) -> Self:
        """Begin to be the parent."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End, if it has not ended; of an exception its type is noted, never its words."""


class _Nothing:
    """A span that is not recorded; there is one for all."""

    recording = False

    def set(self, **attributes: str | float) -> None:
        pass

    def event(self, name: str) -> None:
        pass

    def end(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass


NOTHING: Span = _Nothing()


class _Recorded:
    """A span that is recorded by OpenTelemetry."""

    recording = True

    def __init__(self, tracer: Any, span: Any) -> None:
        self.tracer = tracer
        self.span = span
        self._ended = False
        self._before: Token[_Recorded | None] | None = None

    def set(self, **attributes: str | float) -> None:
        if not self._ended:
            self.span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        if not self._ended:
            self.span.add_event(name)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.span.end()

    def __enter__(self) -> Self:
        self._before = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            _current.reset(self._before)
        if kind is not None and issubclass(kind, Exception) and not self._ended:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415 - there is a span, so it is imported

            self.span.set_attribute("error.type", kind.__name__)
            self.span.set_status(StatusCode.ERROR)
        self.end()


#: Not OpenTelemetry's own notion of it: looking there would cost an import where nothing is traced, and spans of
#: others who share the process (vLLM's) are none of ours.
_current: ContextVar[_Recorded | None] = ContextVar("fleet_span", default=None)


class _Process:
    """What this process traces with. Like a metric it is the process' own, and everybody reaches it from anywhere."""

    tracer: Any = None
    sender: _Sender | None = None
    #: The share of requests that get a span.
    share = 0.0


_process = _Process()


# -- life -------------------------------------------------------------------------------------------------------------


def start(*, share: float = 0.0) -> None:
    """Trace from now on, if OpenTelemetry's variables ask for it. `share` of all requests get a span, 0 to 1.

    May be called twice. Without OpenTelemetry's packages nothing is traced.
    """
    if _process.tracer is not None or not is_wanted(os.environ):
        return
    # An exporter says at length of each try what went wrong, where the sender says it once a minute; and a header that
    # cannot be read is quoted with its secret (API 1.45, util/re.py).
    for name in ("opentelemetry.exporter", "opentelemetry.util"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        begin(_make_exporter(os.environ), share=share)
    except ImportError as exc:
        logger.info("not traced: %s is not installed; pip install 'batch-fleet[otel]'", exc.name)
    except UsageError as exc:
        logger.warning("not traced: %s", exc)
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with the set-up of tracing, work goes on
        # Only the type: variables hold secrets, and a message may quote them.
        logger.warning("not traced: OpenTelemetry's variables cannot be used (%s)", type(exc).__name__)


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for traces: by an exporter that is named, else by an endpoint."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if exporters := environ.get("OTEL_TRACES_EXPORTER", "").strip():
        return "otlp" in [name.strip() for name in exporters.split(",")]
    return any(environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", ENGINE_ENDPOINT))


def _make_exporter(environ: Mapping[str, str]) -> Any:
    """The exporter of the protocol that the variables name; it reads the others by itself."""
    named = (environ.get(f"OTEL_EXPORTER_OTLP_{each}") for each in ("TRACES_PROTOCOL", "PROTOCOL"))
    protocol = next((name for name in named if name), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Exporter  # noqa: PLC0415
    elif protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Exporter  # noqa: PLC0415
    else:
        raise UsageError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; there are http/protobuf and grpc")
    return Exporter()


def begin(exporter: Any, *, share: float) -> None:
    """Trace from now on into an exporter of OpenTelemetry's; the sampler is the environment's."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - 0.2 s, for those who trace
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider  # noqa: PLC0415

    sender = _Sender(exporter, os.environ)

    class Hand(SpanProcessor):  # type: ignore[misc]  # no types without its packages
        def on_end(self, span: Any) -> None:
            sender.take(span)

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
    ours = Resource({"host.name": socket.gethostname(), "process.pid": os.getpid()})
    # Not the global provider: vLLM sets that one, and writes spans of its own into it. Nor ended by the SDK's handler
    # at the exit, which waits for half a minute.
    provider = TracerProvider(resource=ours.merge(resource), shutdown_on_exit=False)
    provider.add_span_processor(Hand())
    _process.tracer, _process.sender, _process.share = provider.get_tracer(SERVICE_NAME), sender, share


def stop(timeout_s: float = FLUSH_S) -> None:
    """Send what is left, for so many seconds at most, and trace no more. May be called in any state."""
    sender, _process.tracer, _process.sender = _process.sender, None, None
    if sender is not None:
        sender.stop(timeout_s)


# -- spans ------------------------------------------------------------------------------------------------------------


def now() -> int:
    """The time as spans have it: nanoseconds of the Unix clock."""
    return time.time_ns()


def command(name: str, *, joins: str | None = None, since: int | None = None) -> Span:
    """A span of a producer's command, from `since` on.

    `joins` is the `traceparent` of the batch that it is about; with None it makes one, so it begins a trace, inside the
    one that it is called in, if any: the TRACEPARENT of its environment, or of a program its current span.
    """
    tracer, context = _process.tracer, None
    if tracer is not None:
        context = _context(joins if joins is not None else os.environ.get(TRACEPARENT.upper(), ""))
    elif "opentelemetry.trace" in sys.modules:
        # A program that calls us and traces: as any library, by what the program has set up.
        from opentelemetry import trace  # noqa: PLC0415 - it is imported

        tracer, context = trace.get_tracer(SERVICE_NAME), _context(joins) if joins else None
    if tracer is None or joins == "":
        return NOTHING
    return _recorded(tracer, name, context, since, {})


def joined(name: str, traceparent: str, *, since: int | None = None, **attributes: str | float) -> Span:
    """A span of a batch, whose `traceparent` it is, from `since` on. Without one nothing."""
    parent = _current.get()
    tracer = _process.tracer or (parent.tracer if parent is not None else None)
    if tracer is None or not traceparent:
        return NOTHING
    context = _context(traceparent)
    # What is no `traceparent` (Redis is open to more than us) is no parent, and begins no trace.
    return _recorded(tracer, name, context, since, attributes) if context else NOTHING


def child(name: str, *, since: int | None = None, **attributes: str | float) -> Span:
    """A part of the span whose block this is, from `since` on. Outside of one nothing."""
    parent = _current.get()
    if parent is None:
        return NOTHING
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 - there is a span, so it is imported

    return _recorded(parent.tracer, name, set_span_in_context(parent.span), since, attributes)


def request(traceparent: object, index: int, **attributes: str | float) -> Span:
    """A span of a request, if its batch is traced and it is among those that are.

    Chosen by trace and index alone, so that all deliveries of a request are traced, or none.
    """
    if _process.tracer is None or not traceparent or not isinstance(traceparent, str):
        return NOTHING
    if not is_chosen(traceparent, index, _process.share):
        return NOTHING
    return joined("request", traceparent, since=None, index=index, **attributes)


def is_chosen(traceparent: str, index: int, share: float) -> bool:
    """Whether the request of this index is among the share of the trace's requests that get a span."""
    trace_id = traceparent[3:35]
    digest = hashlib.blake2b(f"{trace_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def current() -> str:
    """The `traceparent` of the span whose block this is; "" outside of one."""
    parent = _current.get()
    if parent is None:
        return ""
    at = parent.span.get_span_context()
    return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"


def _context(traceparent: str) -> Any:
    """OpenTelemetry's context of a `traceparent`; an empty one where it is none."""
    from opentelemetry.context import Context  # noqa: PLC0415
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, Context())


def _recorded(tracer: Any, name: str, context: Any, since: int | None, attributes: dict[str, str | float]) -> Span:
    span = tracer.start_span(name, context, attributes=_named(attributes), start_time=since)
    return _Recorded(tracer, span) if span.is_recording() else NOTHING


def _named(attributes: dict[str, str | float]) -> dict[str, str | float]:
    return {_ATTRIBUTES[name]: value for name, value in attributes.items() if name in _ATTRIBUTES}


# -- sending ----------------------------------------------------------------------------------------------------------


class _Sender:
    """Sends finished spans from a thread of its own, which is started with the first one.

    OpenTelemetry's own batch processor starts its thread again after every fork, in the children too, where between
    fork and exec no thread may be started (`producer.local`); and its end cannot be bounded (SDK 1.45).
    """

    def __init__(self, exporter: Any, environ: Mapping[str, str]) -> None:
        self._exporter = exporter
        self._delay_s = _number(environ, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1000
        self._most = _number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._batch = min(self._most, _number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512))
        self._waiting: deque[Any] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._lost = 0
        self._complained = -COMPLAIN_S

    def take(self, span: Any) -> None:
        """Take a finished span, from any thread. Waits for nobody: where there are too many it is lost."""
        if len(self._waiting) >= self._most or self._stopping:
            self._lost += 1
            return
        self._waiting.append(span)
        if self._thread is None:
            self._start()
        if len(self._waiting) >= self._batch:
            self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Send what waits, for so many seconds at most. The thread is then left to the process' end."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("traces: the last spans were not sent within %g s", timeout_s)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="fleet-traces", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            stopping = self._stopping
            while self._waiting:
                self._send([self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))])
            if stopping:
                return

    def _send(self, spans: list[Any]) -> None:
        why = ""
        try:
            if self._exporter.export(spans).name == "SUCCESS":
                return
        except Exception as exc:  # noqa: BLE001 - the outermost loop of the thread
            why = f" ({type(exc).__name__})"
        self._lost += len(spans)
        if time.monotonic() - self._complained >= COMPLAIN_S:
            self._complained = time.monotonic()
            logger.warning("traces: the collector does not take them%s; %d spans lost so far", why, self._lost)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """A positive number of the environment."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else default
