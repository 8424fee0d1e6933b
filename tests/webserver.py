"""An HTTP server of tests that shows requests byte for byte and misbehaves on request.

Owns: `RawServer`, and the answers that tests script for it, one per connection.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from types import TracebackType


@dataclass
class Exchange:
    """One connection with its request: the head as it came, the body not read yet."""

    connection: socket.socket
    head: bytes
    _rest: bytes = field(default=b"", repr=False)

    @property
    def request(self) -> str:
        """The request line, without the version."""
        return self.head.split(b"\r\n")[0].decode("latin-1").rpartition(" ")[0]

    @property
    def target(self) -> str:
        """What was asked for, byte for byte."""
        return self.request.partition(" ")[2]

    @property
    def headers(self) -> dict[str, str]:
        """The headers, names in lower case."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    def read(self, amount: int) -> bytes:
        """So many bytes of the body, or fewer at its end."""
        data = self._rest[:amount]
        self._rest = self._rest[amount:]
        while len(data) < amount and (more := self.connection.recv(min(65536, amount - len(data)))):
            data += more
        return data

    def body(self) -> bytes:
        """The whole body, as Content-Length says."""
        return self.read(int(self.headers.get("content-length", "0")))

    def answer(self, status: int, *headers: str, body: bytes = b"", length: int | None = None) -> None:
        """Answer; a `length` larger than the body's promises more than comes."""
        lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body) if length is None else length}", *headers]
        self.connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)

    def reset(self) -> None:
        """Close with a reset, as a crashed server does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class RawServer:
    """Answers the n-th connection with the n-th of `answers`, and all later ones with the last."""

    def __init__(self, *answers: Callable[[Exchange], None], tls: ssl.SSLContext | None = None) -> None:
        self._answers = answers
        self._tls = tls
        self.seen: list[Exchange] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with suppress(OSError), connection:
                connection.settimeout(20)
                if self._tls is None:
                    self._exchange(connection)
                else:
                    with self._tls.wrap_socket(connection, server_side=True) as wrapped:
                        self._exchange(wrapped)

    def _exchange(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            more = connection.recv(65536)
            if not more:
                return  # it only looked whether we are there
            head += more
        head, _, rest = head.partition(b"\r\n\r\n")
        exchange = Exchange(connection, head, rest)
        self.seen.append(exchange)
        self._answers[min(len(self.seen), len(self._answers)) - 1](exchange)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # `close` alone does not wake a thread that waits in `accept`.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)


class Uploads:
    """A place that takes PUTs as a presigned URL of S3: nothing chunked, a length, no header that is not signed."""

    SIGNED = frozenset({"host", "user-agent", "content-length", "connection"})

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.stored: list[tuple[str, bytes]] = []

    def __call__(self, exchange: Exchange) -> None:
        headers = exchange.headers
        if "transfer-encoding" in headers:
            exchange.answer(501)
        elif "content-length" not in headers:
            exchange.answer(411)
        elif set(headers) - self.SIGNED:
            exchange.answer(403)
        else:
            body = exchange.body()
            assert len(body) == int(headers["content-length"])
            self.stored.append((exchange.target, body))
            exchange.answer(self.status)
