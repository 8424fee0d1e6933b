"""The object store of the batch directories.

Owns: the `ObjectStore` protocol, `LocalStore` (a folder, shared or not), `open_store`, and the identity of a store.
`common.s3store` has the other implementation; it is imported only where it is used, since boto3 is slow to import.
Must not know: what the objects mean (`common.layout` names them).
On failure: what is not there is `ObjectMissingError`; what cannot be asked is `StoreUnavailableError`. An outage is
never read as absence: a missing root folder (a share that is not mounted) is an outage.

Objects appear whole or not at all, and durable: written under a temporary name, synced, then put in place.
Parts and ends of runs are *created*: the first writer wins and everybody else learns that it lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from common import layout
from common.errors import ObjectMissingError, StoreUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class ObjectWriter(Protocol):
    """An object that is being written. `created` says after the `with` block whether this writer put it in place."""

    created: bool

    def write(self, data: bytes, /) -> None:
        """Append bytes."""


class ObjectStore(Protocol):
    """Named objects, written whole. Names are relative, with `/` between their parts."""

    @property
    def uri(self) -> str:
        """Where the store is, without secrets. Not its identity: two mounts of one share differ; see `store_id`."""

    def writing(self, name: str, *, replace: bool = False) -> AbstractContextManager[ObjectWriter]:
        """Write an object. Without `replace` an existing object stays as it is and `created` is False.

        An exception inside the block leaves nothing behind.
        """

    def open(self, name: str) -> IO[bytes]:
        """The object's bytes as a stream. Raises `ObjectMissingError`."""

    def read(self, name: str) -> bytes:
        """The object's bytes. For small objects. Raises `ObjectMissingError`."""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """`length` bytes (1 at least) of the object, from `offset` on. Raises `ObjectMissingError`.

        An object that ends before is an outage: it is not the one that was measured.
        """

    def exists(self, name: str) -> bool:
        """Whether the object exists."""

    def names(self, folder: str) -> Iterator[str]:
        """The last name parts of what lies directly in `folder`, in no order; nothing when there is no folder."""

    def remove(self, name: str) -> None:
        """Remove an object, or everything in a folder. A folder not at once; what is absent is fine."""

    def local_path(self, name: str) -> str | None:
        """Where the object lies on this machine, if it does: a user's file must not be the same one."""

    def set_up_warnings(self) -> list[str]:
        """What the store does not promise as it should, in sentences for operators; asks the store."""


class FileWriter:
    """An object that is written to a file first. `what` failed when the file cannot be written."""

    def __init__(self, file: IO[bytes], what: str) -> None:
        self._file = file
        self._what = what
        self.created = False

    def write(self, data: bytes, /) -> None:
        """Append bytes."""
        try:
            self._file.write(data)
        except OSError as exc:
            raise StoreUnavailableError(f"{self._what}: {exc.strerror}") from exc


class LocalStore:
    """A store in a folder, on one machine or on a share with POSIX hard links and renames."""

    def __init__(self, root: Path, *, create: bool = True) -> None:
        """Use `root`. With `create` it is made, if its parent exists and it does not."""
        self.root = root
        try:
            if create:
                root.mkdir(exist_ok=True)
        except OSError as exc:
            raise StoreUnavailableError(f"the store's folder {root} cannot be used: {exc.strerror}") from exc
        self._require_root()

    @property
    def uri(self) -> str:
        """`file://` and the folder's real path."""
        return self.root.resolve().as_uri()

    @contextlib.contextmanager
    def writing(self, name: str, *, replace: bool = False) -> Iterator[ObjectWriter]:
        """See `ObjectStore.writing`. A hard link to the final name is what makes creation atomic."""
        target = self.root / name
        with self._outage(name):
            self._require_root()
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=target.parent)
        try:
            file = os.fdopen(descriptor, "wb")
            try:
                writer = FileWriter(file, "the store failed while it wrote")
                yield writer
                with self._outage(name):
                    file.flush()
                    os.fchmod(file.fileno(), 0o644)
                    os.fsync(file.fileno())
            finally:
                # Closing flushes once more what could not be flushed: the first error is the one that tells.
                with contextlib.suppress(OSError):
                    file.close()
            with self._outage(name):
                writer.created = self._put_in_place(temporary, target, replace=replace)
                _sync_folder(target.parent)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    @staticmethod
    def _put_in_place(temporary: str, target: Path, *, replace: bool) -> bool:
        if replace:
            os.replace(temporary, target)
            return True
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        return True

    def open(self, name: str) -> IO[bytes]:
        """See `ObjectStore.open`."""
        with self._outage(name):
            return (self.root / name).open("rb")

    def read(self, name: str) -> bytes:
        """See `ObjectStore.read`."""
        with self.open(name) as file, self._outage(name):
            return file.read()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """See `ObjectStore.read_range`."""
        with self.open(name) as file, self._outage(name):
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:
            raise StoreUnavailableError(f"{name} is shorter than it was")
        return data

    def exists(self, name: str) -> bool:
        """See `ObjectStore.exists`."""
        try:
            with self._outage(name):
                (self.root / name).stat()
        except ObjectMissingError:
            return False
        return True

    def names(self, folder: str) -> Iterator[str]:
        """See `ObjectStore.names`. Temporary files are not objects."""
        try:
            with self._outage(folder):
                found = os.listdir(self.root / folder)
        except ObjectMissingError:
            return
        yield from (name for name in found if not name.startswith(".tmp-"))

    def remove(self, name: str) -> None:
        """See `ObjectStore.remove`."""
        path = self.root / name
        with contextlib.suppress(ObjectMissingError), self._outage(name):
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)

    def local_path(self, name: str) -> str | None:
        """See `ObjectStore.local_path`."""
        return str(self.root / name)

    def set_up_warnings(self) -> list[str]:
        """See `ObjectStore.set_up_warnings`."""
        return []

    def _require_root(self) -> None:
        if not self.root.is_dir():
            raise StoreUnavailableError(f"the store's folder {self.root} is not there")

    @contextlib.contextmanager
    def _outage(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as exc:
            self._require_root()
            raise ObjectMissingError(f"{name} is not in the store") from exc
        except NotADirectoryError as exc:
            raise ObjectMissingError(f"{name} is not in the store") from exc
        except OSError as exc:
            raise StoreUnavailableError(f"the store failed at {name}: {exc.strerror}") from exc


def _sync_folder(folder: Path) -> None:
    """Make a new name durable. A no-op for file systems that cannot sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def store_id(store: ObjectStore) -> str:
    """What tells this store from every other one, however it is reached. The first who asks makes it."""
    try:
        return store.read(layout.STORE_ID).decode()
    except ObjectMissingError:
        with store.writing(layout.STORE_ID) as out:
            out.write(uuid.uuid4().hex.encode())
        return store.read(layout.STORE_ID).decode()


def open_store(uri: str, *, create: bool = True, s3_endpoint: str = "") -> ObjectStore:
    """The store that `uri` names: `s3://bucket/prefix`, `file:///folder`, or an absolute path.

    A folder is made if it is not there yet, a bucket never.
    Without `create` a store that is not there is an outage: whoever only looks has mistyped it.
    """
    parts = urlsplit(uri)
    if parts.scheme == "s3":
        from common.s3store import open_s3_store  # noqa: PLC0415 - a quarter of a second, for those who use it

        return open_s3_store(uri, s3_endpoint, create=create)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise UsageError(f"FLEET_STORE {uri!r}: a file URI has three slashes, file:///folder")
        path = os.fsdecode(unquote_to_bytes(parts.path))
        if "\0" in path:
            raise UsageError("FLEET_STORE holds a NUL byte")
        return LocalStore(Path(path), create=create)
    if not parts.scheme and uri.startswith("/"):
        return LocalStore(Path(uri), create=create)
    raise UsageError("FLEET_STORE must be file:///folder, an absolute path, or s3://bucket/prefix")
