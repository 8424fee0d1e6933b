"""An OpenTelemetry collector of tests: takes traces over HTTP, and keeps the bytes and what they say.

Owns: `Collector`. Needs the package `opentelemetry-proto`, which the exporter brings.
"""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True)
class Seen:
    """One span as it arrived. Ids are in hex, `parent` is "" of a root; `start` and `end` are nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]
    service: str
    pid: int


class Collector:
    """Takes traces on a free port of the loopback address, or refuses all of them with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.paths.append(self.path)
                if status == 200:
                    collector.bodies.append(body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def spans(self, name: str | None = None) -> list[Seen]:
        """What arrived, by the time of its begin; with `name` only those."""
        found = [span for body in list(self.bodies) for span in _read(body) if name in (None, span.name)]
        return sorted(found, key=lambda span: span.start)

    def names(self) -> Counter[str]:
        """How many spans arrived of each name."""
        return Counter(span.name for span in self.spans())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _read(body: bytes) -> list[Seen]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        Seen(
            name=span.name,
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            failed=span.status.code == 2,
            attributes=_values(span.attributes),
            events=tuple(event.name for event in span.events),
            service=_values(resource.resource.attributes)["service.name"],
            pid=_values(resource.resource.attributes).get("process.pid", 0),
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
