"""The pages that a process shows to those who watch it: metrics and health, over HTTP.

Owns: `Pages`, a small HTTP server on a thread of its own, and `metrics_page`.
Must not know: what is measured, who asks.
On failure: an address that cannot be bound is a `UsageError` at start; a page that raises is a 500, and the process
goes on.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qs, urlsplit

from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder

from common.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

logger = logging.getLogger("fleet.pages")

#: Seconds after which a client that says nothing is let go.
CLIENT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client wants: the query's parameters, each once, and the formats that it takes."""

    query: Mapping[str, str]
    accept: str


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def health_page(ask: Callable[[], bool]) -> Callable[[Asked], Page]:
    """A page that is 200 while `ask` says so, else 503."""
    return lambda _: Page(200, b"ok\n") if ask() else Page(503, b"no\n")


def metrics_page(registry: CollectorRegistry = REGISTRY) -> Callable[[Asked], Page]:
    """A page with everything in a registry; vLLM's series are in the default one."""

    def page(asked: Asked) -> Page:
        encode, content_type = choose_encoder(asked.accept)
        return Page(200, encode(registry), content_type)

    return page


class Pages:
    """Serves pages until it is closed."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[Asked], Page]]) -> None:
        """Listen. Raises `UsageError` for an address that cannot be had."""

        class Handler(_Handler):
            served: ClassVar = dict(pages)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def server_bind(self) -> None:
                # Not HTTPServer's, which asks the resolver for the host's full name.
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(self.server_address)
                self.server_address = self.socket.getsockname()
                self.server_name, self.server_port = host, self.server_address[1]

            def handle_error(self, *_: object) -> None:
                """A client went away in the middle of its answer. The standard library prints a traceback."""

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as exc:
            raise UsageError(f"cannot show metrics on {host} port {port}: {_reason(exc)}") from exc
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="fleet-pages", daemon=True).start()
        logger.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _reason(error: OSError | OverflowError) -> str:
    """Why an address cannot be had, without Python's numbers."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "another process listens there"
    return getattr(error, "strerror", None) or str(error)


class _Handler(BaseHTTPRequestHandler):
    served: ClassVar[Mapping[str, Callable[[Asked], Page]]] = {}
    timeout = CLIENT_TIMEOUT_S
    server_version = "fleet"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page of this path."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer without the page."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        url = urlsplit(self.path)
        show = self.served.get(url.path)
        if show is None:
            page = Page(404, f"there are {', '.join(self.served)}\n".encode())
        else:
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            try:
                page = show(Asked(query, self.headers.get("Accept") or ""))
            except UsageError as exc:
                page = Page(400, f"{exc}\n".encode())
            except Exception as exc:  # the outermost loop of this thread
                logger.error("a page failed: %s", type(exc).__name__)
                logger.debug("a page failed", exc_info=True)
                page = Page(500, b"error\n")
        self.send_response_only(page.status, HTTPStatus(page.status).phrase)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        """Say nothing: a scrape every few seconds is no event."""
