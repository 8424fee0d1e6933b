"""A store under a prefix of an S3 bucket.

Owns: `S3Store`. Must not know: boto3 (`common.s3`), what the objects mean.
On failure: as `common.store` says.

An object is collected in memory, a large one in a temporary file of this machine (`TMPDIR`), and uploaded whole.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import IO, TYPE_CHECKING, cast

from common import layout
from common.errors import StoreUnavailableError
from common.s3 import S3Bucket, split_uri
from common.store import FileWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.store import ObjectWriter

#: Of an object that is being written, so much is kept in memory before it goes to a temporary file.
_MEMORY_BYTES = 1024 * 1024


class S3Store:
    """A store under a prefix of a bucket; see `common.store.ObjectStore` for what the methods promise."""

    def __init__(self, bucket: str, prefix: str, endpoint: str = "", *, create: bool = True) -> None:
        """Use what lies under `prefix`. Without `create` a prefix with nothing under it is an outage."""
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._bucket = S3Bucket(bucket, endpoint, probe_key=self._key(layout.PROBE))
        # Also finds out now, not in the middle of a batch, that the bucket or the credentials are wrong.
        found = next(self._bucket.keys(self._prefix, at_most=1), None)
        if found is None and not create:
            raise StoreUnavailableError(f"there is nothing in {self.uri}")

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return self._bucket.uri(self._prefix).rstrip("/")

    def _key(self, name: str) -> str:
        return self._prefix + name

    @contextlib.contextmanager
    def writing(self, name: str, *, replace: bool = False) -> Iterator[ObjectWriter]:
        """See `ObjectStore.writing`."""
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES, prefix="fleet-upload-") as file:
            writer = FileWriter(cast("IO[bytes]", file), "the temporary file of an upload failed")
            yield writer
            try:
                file.flush()
            except OSError as exc:
                raise StoreUnavailableError(f"the temporary file of an upload failed: {exc.strerror}") from exc
            writer.created = self._bucket.put(self._key(name), cast("IO[bytes]", file), only_new=not replace)

    def open(self, name: str) -> IO[bytes]:
        """See `ObjectStore.open`."""
        return self._bucket.open(self._key(name))

    def read(self, name: str) -> bytes:
        """See `ObjectStore.read`."""
        with self.open(name) as file:
            return file.read()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        return self._bucket.read_range(self._key(name), offset, length)

    def exists(self, name: str) -> bool:
        """See `ObjectStore.exists`."""
        return self._bucket.exists(self._key(name))

    def names(self, folder: str) -> Iterator[str]:
        """See `ObjectStore.names`."""
        prefix = self._key(folder) + "/"
        for key in self._bucket.keys(prefix, folders=True):
            name = key.removeprefix(prefix).rstrip("/")
            if name:  # some tools make an empty object to stand for the folder itself
                yield name

    def remove(self, name: str) -> None:
        """See `ObjectStore.remove`. S3 has no folders: a key is removed, and all that begin with it and a slash."""
        self._bucket.remove(self._key(name))

    def local_path(self, name: str) -> str | None:  # noqa: ARG002 - the protocol's
        """Nothing of it lies on this machine."""
        return None

    def set_up_warnings(self) -> list[str]:
        """See `ObjectStore.set_up_warnings`."""
        if self._bucket.conditional:
            return []
        limit = "does not keep to If-None-Match, so objects are created once by one process only: run one aggregator"
        return [f"{self.uri} {limit}, and submit a file from one producer at a time"]


def open_s3_store(uri: str, endpoint: str, *, create: bool) -> S3Store:
    """The store that `FLEET_STORE=s3://bucket/prefix` names."""
    bucket, prefix = split_uri(uri, "FLEET_STORE")
    return S3Store(bucket, prefix, endpoint, create=create)
