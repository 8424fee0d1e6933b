"""Destinations that are not files of this machine: http(s) PUT and `s3://`.

Owns: `Remote`. Must not know: batches, how an output is made; it is given a whole file.
On failure: `check` raises `DestinationError`; `send` raises `OutputFailedError`, and the batch keeps the rows. Neither
shows a query or a login.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO, TYPE_CHECKING, Protocol, cast

from common.errors import DestinationError, FleetError, OutputFailedError, StoreUnavailableError, UsageError
from producer import web
from producer.sources import is_remote, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.store import ObjectStore

_BLOCK_BYTES = 1024 * 1024


class Remote(Protocol):
    """A destination that takes a whole file at once."""

    shown: str

    def check(self) -> None:
        """Find out whether it may work, leaving nothing there. Raises `DestinationError`."""

    def send(self, file: IO[bytes]) -> None:
        """Send the file, from its beginning. Raises `OutputFailedError`."""


class _Web:
    def __init__(self, name: str) -> None:
        self.shown = shown(name)
        self._url = web.Url.parse(name)

    def check(self) -> None:
        # No more than a connection: a PUT would create, and a signature is for one method.
        try:
            web.check_reachable(self._url)
        except UsageError as exc:
            raise DestinationError(str(exc)) from None

    def send(self, file: IO[bytes]) -> None:
        web.put(self._url, file)


class _S3:
    def __init__(self, name: str, endpoint: str) -> None:
        from common.s3 import S3Bucket, split_uri  # noqa: PLC0415 - a quarter of a second, for those who use it

        self.shown = name
        bucket, self._key = split_uri(name, name)
        if not self._key or self._key.endswith("/"):
            raise DestinationError(f"{name}: names no object")
        self._bucket = S3Bucket(bucket, endpoint)

    def check(self) -> None:
        try:
            self._bucket.check_writable(self._key)
        except FleetError as exc:
            raise DestinationError(f"{self.shown} cannot be written: {exc}") from None

    def send(self, file: IO[bytes]) -> None:
        try:
            self._bucket.put(self._key, file)
        except FleetError as exc:
            raise OutputFailedError(f"{self.shown} was not written: {exc}") from None


def remote(name: str, s3_endpoint: str) -> Remote | None:
    """The destination of this name, or None for a path. Raises `UsageError` for a URL that cannot be one."""
    if not is_remote(name):
        return None
    return _S3(name, s3_endpoint) if name.lower().startswith("s3://") else _Web(name)


@contextlib.contextmanager
def local_copy(store: ObjectStore, name: str) -> Iterator[IO[bytes]]:
    """An object as a file of this machine: where it lies, or a temporary copy. Raises `OutputFailedError`."""
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(store.open(name))
            if store.local_path(name) is not None:
                file = stream
            else:
                file = cast("IO[bytes]", stack.enter_context(tempfile.TemporaryFile(prefix="fleet-output-")))
                while data := stream.read(_BLOCK_BYTES):
                    file.write(data)
                file.flush()
        except StoreUnavailableError as exc:
            raise OutputFailedError(str(exc)) from None
        except OSError as exc:
            raise OutputFailedError(f"no room in {tempfile.gettempdir()} for the output: {exc.strerror}") from None
        yield file
