"""A byte stream that opens its origin again where it broke off.

Owns: `ResumingStream` and the `Origin` protocol. Must not know: S3, HTTP, what the bytes mean.
On failure: what `Origin.broken` names is tried again from the byte after the last one that came; when that failed
`TRIES` times without one more byte, the origin's own error is raised. Other exceptions of the origin pass through.
"""

from __future__ import annotations

import contextlib
import io
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Attempts without one more byte after which a stream is given up.
TRIES = 5
#: Seconds before the second attempt; each later one waits twice as long.
PAUSE_S = 0.5

#: Bytes that are asked for at once.
BUFFER_BYTES = 1024 * 1024


class Body(Protocol):
    """What an origin answers: the bytes from a position on."""

    def read(self, amount: int, /) -> bytes:
        """At most `amount` bytes; none at the end."""

    def close(self) -> None:
        """Give the connection up."""


class Origin(Protocol):
    """Where the bytes come from."""

    #: Number of all bytes, or None while the origin does not say.
    size: int | None
    #: Exceptions after which it is worth another try.
    broken: tuple[type[Exception], ...]

    def connect(self, position: int) -> Body:
        """The bytes from `position` on, of the same content as before. Raises `broken`, or what is final."""

    def lost(self, exc: Exception) -> Exception:
        """The error for people, once all tries have failed."""


class ResumingStream(io.RawIOBase):
    """A readable, seekable stream over an origin. Wrap it by `buffered`."""

    def __init__(self, origin: Origin, body: Body | None = None, *, pause_s: float = PAUSE_S) -> None:
        """Read from `body`, which the origin answered for position 0; without it, connect at the first read."""
        self._origin = origin
        self._retried: tuple[type[Exception], ...] = (*origin.broken, EOFError)
        self._body = body
        self._position = 0
        self._pause_s = pause_s

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """Seeking costs a new connection at the next read."""
        return True

    def tell(self) -> int:
        """Bytes read so far."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go elsewhere. From the end only where the origin says its size."""
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            if self._origin.size is None:
                raise io.UnsupportedOperation("the size is not known")
            offset += self._origin.size
        if offset != self._position:
            self._disconnect()
            self._position = offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See `io.RawIOBase.readinto`; returns 0 only at the true end."""
        view = memoryview(buffer).cast("B")
        failed = 0
        while True:
            if self._position == self._origin.size:
                return 0
            try:
                if self._body is None:
                    self._body = self._origin.connect(self._position)
                data = self._body.read(len(view))
                if not data and self._origin.size is not None:
                    raise EOFError("the connection ended early")
            except self._retried as exc:
                self._disconnect()
                failed += 1
                if failed >= TRIES:
                    raise self._origin.lost(exc) from exc
                time.sleep(self._pause_s * 2 ** (failed - 1))
                continue
            view[: len(data)] = data
            self._position += len(data)
            return len(data)

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()
        super().close()

    def _disconnect(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            with contextlib.suppress(Exception):
                body.close()


def buffered(stream: ResumingStream) -> io.BufferedReader:
    """The stream for reading lines."""
    return io.BufferedReader(stream, BUFFER_BYTES)
