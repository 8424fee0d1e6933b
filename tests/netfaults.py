"""A TCP proxy of tests that cuts answers short.

Owns: `CuttingProxy`. Must not know: what is spoken through it, but that one answer follows one request.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class CuttingProxy:
    """Forwards connections to a port; connection number i is closed once `cuts[i]` bytes of answers went through it.

    Connections beyond `cuts` are left alone. Every cut connection is reset or closed, as a failing network does.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._cuts: list[int] = []
        self.cut = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_next(self, *after_bytes: int) -> None:
        """Cut the next connections after so many bytes of answers each."""
        with self._lock:
            self._cuts = list(after_bytes)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                limit = self._cuts.pop(0) if self._cuts else None
            server = socket.create_connection(self._target)
            self._open += [client, server]
            threading.Thread(target=self._forward, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, limit), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if limit is not None and len(data) >= limit:
                    target.sendall(data[:limit])
                    self.cut += 1
                    break
                target.sendall(data)
                if limit is not None:
                    limit -= len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        for each in self._open:
            each.close()
