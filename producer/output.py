"""The user's output file: checked before anything is queued, grown part by part, a valid prefix at every moment.

Owns: `Destination` and `OutputFile`. Must not know: Redis, Celery, how an upload is made (`producer.delivery`).
On failure: a destination that cannot be written, is the input, or is being written by another producer raises
`DestinationError` before anything is queued, with the existing file untouched. One that fails later (a full disk)
raises `OutputFailedError`: the batch is not touched by it, and its rows can be fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from common import layout
from common.batch import row_failed
from common.errors import DestinationError, OutputFailedError
from producer.delivery import Remote, local_copy, remote
from producer.sources import is_remote, plain_name, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.batch import Run
    from common.store import ObjectStore

#: Names of the standard output, whatever it leads to.
STDOUT = frozenset({"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"})

#: Bytes of whole rows that are written at once.
_BLOCK_BYTES = 1024 * 1024


def default_output(input_name: str) -> str:
    """The output's name when nobody says: the input's with `.out.jsonl`."""
    if input_name == "-" or input_name.startswith("/dev/"):
        raise DestinationError("the input is a pipe: name the output with -o")
    path = Path(plain_name(input_name))
    if not path.name:
        what = "names no file: name the output with -o" if is_remote(input_name) else "is a directory"
        raise DestinationError(f"{shown(input_name)}: {what}")
    return str(path.with_name(path.name.removesuffix(".jsonl") + ".out.jsonl"))


def check_destinations(
    input_path: str | None, *names: str | None, streams: bool = False, s3_endpoint: str = ""
) -> None:
    """Refuse destinations that cannot work. Writes nothing that stays. Raises `DestinationError`.

    With `streams` they may be the standard output, a pipe or a character device: for rows that are all there. What
    grows with its batch must be a file, since it is written again from its beginning by whoever attaches to the batch.
    The remote ones come last: they take time, and a network.
    """
    remotes: list[Remote] = []
    # Here `-` is the standard input; as a destination it is the standard output.
    seen = [] if input_path is None else [("/dev/stdin" if input_path == "-" else input_path, "the input")]
    for name in names:
        if name is None:
            continue
        for other, what in seen:
            if _same_file(name, other):
                raise DestinationError(f"{shown(name)} is {what}")
        seen.append((name, "also the output"))
        found = remote(name, s3_endpoint)
        if found is not None:
            remotes.append(found)
        elif not _is_stream(name):
            _check_writable(name)
        elif not streams:
            raise DestinationError(f"{name} is not a file; producer fetch BATCH -o {name} writes to it later")
    for each in remotes:
        each.check()


def _is_stdout(name: str) -> bool:
    """Whether the name is one of the standard output, which is written where it stands, also if it is a file.

    Opened anew, as `/dev/fd/1` and others of /dev and /proc would be, a file would be replaced and not appended to.
    """
    if name in STDOUT:
        return True
    if sys.__stdout__ is None:
        return False  # it was closed: /dev/null stands in for it, and may be named itself
    try:
        return name.startswith(("/dev/", "/proc/")) and os.path.samestat(os.stat(name), _status("-"))
    except OSError:
        return False


def _is_stream(name: str) -> bool:
    """Whether the name leads to the standard output, a pipe or a character device."""
    if _is_stdout(name):
        return True
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _status(name: str) -> os.stat_result:
    """What a destination's name leads to. Raises `OSError`."""
    return os.fstat(sys.stdout.fileno()) if name in STDOUT else os.stat(name)


def _same_file(one: str, other: str) -> bool:
    """Whether two names lead to one file: by path, by link, by hard link, or as the standard output."""
    if is_remote(one) or is_remote(other) or one == other:
        return one == other
    try:
        if "-" not in (one, other) and os.path.realpath(one) == os.path.realpath(other):
            return True
        return os.path.samestat(_status(one), _status(other))
    except OSError:
        return False


def _check_writable(name: str) -> None:
    path = Path(name)
    try:
        if path.is_dir():
            raise DestinationError(f"{name} is a directory")
        if path.exists() and not path.is_file():
            raise DestinationError(f"{name} is not a file")
        folder = Path(os.path.realpath(name)).parent
        if not folder.is_dir():
            raise DestinationError(f"{name}: there is no directory {folder}")
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
        else:
            # The only sure test for a folder: root passes every look at permissions, a full disk passes none.
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as exc:
        raise DestinationError(f"{name} cannot be written: {exc.strerror}") from None


class OutputFile:
    """One open output file. It is locked, so that two producers never mix their rows in it."""

    def __init__(self, name: str) -> None:
        """Open and lock the file; it is not touched before `begin`. Raises `DestinationError`."""
        self.name = name
        #: Whether the file is ours to remove: made here, and nothing was promised to be in it yet.
        self._unused = not os.path.lexists(name)
        try:
            self._descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            raise DestinationError(f"{name} cannot be written: {exc.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._descriptor)
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                raise DestinationError(f"another producer is writing {name}") from None
            raise DestinationError(f"{name} cannot be locked: {exc.strerror}") from None
        self.rows = 0
        self._size = 0

    def begin(self) -> None:
        """Empty the file: from now on it holds a prefix of the output."""
        self._unused = False
        self.rows = 0
        self._write(b"", truncate=True)

    def append(self, rows: IO[bytes], *, failed_only: bool = False) -> None:
        """Append rows (lines with LF), only whole ones at a time."""
        for block, count in _blocks(rows, failed_only=failed_only):
            self._write(block)
            self.rows += count

    def mark(self) -> tuple[int, int]:
        """Where the file ends now, for `rewind`."""
        return self._size, self.rows

    def rewind(self, mark: tuple[int, int]) -> None:
        """Take back what was appended since `mark`."""
        if self._descriptor < 0:
            return
        self._size, self.rows = mark
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)

    def _write(self, block: bytes, *, truncate: bool = False) -> None:
        try:
            if truncate:
                os.ftruncate(self._descriptor, 0)
                os.lseek(self._descriptor, 0, os.SEEK_SET)
                self._size = 0
            view = memoryview(block)
            while view:
                view = view[os.write(self._descriptor, view) :]
            self._size += len(block)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)  # no half row stays
            raise OutputFailedError(f"{self.name} cannot be written: {exc.strerror}") from None

    def close(self, *, durable: bool = False) -> None:
        """Close and unlock the file; `durable` waits until it is on disk. May be called twice.

        A file that was made here and never begun is removed.
        """
        if self._descriptor < 0:
            return
        if self._unused:
            with contextlib.suppress(OSError):
                os.unlink(self.name)
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if durable:
                self._make_sure(descriptor)
        finally:
            os.close(descriptor)

    def _make_sure(self, descriptor: int) -> None:
        """Wait until the file is on disk, and see that it is still the one that its name leads to."""
        try:
            os.fsync(descriptor)
            there = os.path.samestat(os.fstat(descriptor), os.stat(self.name))
        except FileNotFoundError:
            there = False
        except OSError as exc:
            raise OutputFailedError(f"{self.name} cannot be written: {exc.strerror}") from None
        if not there:
            raise OutputFailedError(f"{self.name} was removed or replaced while it was being written")


class ReplacingFile(OutputFile):
    """An output that takes the place of the file as a whole, when it is closed as durable; until then nobody sees it.

    For what is not a prefix at every moment: the output of a later run, and what is fetched. Two of them leave one
    whole file. The temporary file beside the output is made with the first row, so that a producer that is killed
    while it waits leaves nothing.
    """

    def __init__(self, name: str) -> None:
        """See that the output can be replaced, and that nobody writes it. Raises `DestinationError`."""
        self.name = name
        self.rows = 0
        self._size = 0
        self._unused = False
        self._begun = False
        self._descriptor = -1
        self._temporary = ""
        self._target = Path(os.path.realpath(name))
        try:
            with tempfile.TemporaryFile(dir=self._target.parent):
                pass
            self._refuse_locked()
        except OSError as exc:
            folder = self._target.parent
            raise DestinationError(f"{name} cannot be written: no new file in {folder}: {exc.strerror}") from None

    def _refuse_locked(self) -> None:
        """Refuse a file that grows under another producer: it would go on writing into what nobody can see."""
        with contextlib.suppress(FileNotFoundError), self._target.open("rb") as there:
            try:
                fcntl.flock(there, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DestinationError(f"another producer is writing {self.name}") from None

    def begin(self) -> None:
        """From now on there is an output, even one without rows."""
        self._begun = True
        super().begin()

    def _write(self, block: bytes, *, truncate: bool = False) -> None:
        if self._descriptor < 0:
            if truncate:
                return  # there is nothing yet
            self._make()
        super()._write(block, truncate=truncate)

    def _make(self) -> None:
        try:
            self._descriptor, self._temporary = tempfile.mkstemp(
                prefix=f".{self._target.name}.", dir=self._target.parent
            )
            os.fchmod(self._descriptor, self._mode())
        except OSError as exc:
            raise OutputFailedError(f"{self.name} cannot be written: {exc.strerror}") from None

    def _mode(self) -> int:
        """The permissions of the file that is replaced, or those of a new file."""
        try:
            return os.stat(self._target).st_mode & 0o777
        except FileNotFoundError:
            umask = os.umask(0)
            os.umask(umask)
            return 0o666 & ~umask

    def close(self, *, durable: bool = False) -> None:
        """Put the file in place if `durable`, else drop it. May be called twice."""
        begun, self._begun = self._begun, False
        if self._descriptor < 0:
            if not (durable and begun):
                return
            self._make()
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if durable:
                os.fsync(descriptor)
                os.replace(self._temporary, self._target)
        except OSError as exc:
            raise OutputFailedError(f"{self.name} cannot be written: {exc.strerror}") from None
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


class StreamFile(OutputFile):
    """An output that is no file: the standard output, a pipe, a terminal. Nothing that it was given is taken back."""

    def __init__(self, name: str) -> None:
        """Opens nothing before `begin`: of a named pipe that would wait for its reader."""
        self.name = name
        self.rows = 0
        self._size = 0
        self._unused = False
        self._descriptor = -1
        self._is_stdout = _is_stdout(name)

    def begin(self) -> None:
        """Open the stream. Raises `DestinationError`, and `OutputFailedError` where the standard output is closed."""
        if self._is_stdout and sys.__stdout__ is None:  # what stands in for it (`common.standard`) would drop the rows
            raise OutputFailedError(f"{self.name} cannot be written: the standard output is closed")
        try:
            if self._is_stdout:
                self._descriptor = os.dup(sys.stdout.fileno())
            else:
                self._descriptor = os.open(self.name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as exc:
            raise DestinationError(f"{self.name} cannot be written: {exc.strerror}") from None

    def rewind(self, mark: tuple[int, int]) -> None:
        """Nothing is taken back."""

    def _write(self, block: bytes, *, truncate: bool = False) -> None:  # noqa: ARG002 - a stream has no beginning
        view = memoryview(block)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except BrokenPipeError:
            if self._is_stdout:
                raise  # whoever read it left, as `| head` does, which is no failure
            raise OutputFailedError(f"{self.name} cannot be written: its reader left") from None
        except OSError as exc:
            raise OutputFailedError(f"{self.name} cannot be written: {exc.strerror}") from None

    def close(self, *, durable: bool = False) -> None:  # noqa: ARG002 - who reads it sees to that
        """Close the stream. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _blocks(rows: IO[bytes], *, failed_only: bool) -> Iterator[tuple[bytes, int]]:
    block: list[bytes] = []
    size = 0
    for row in rows:
        if failed_only and not row_failed(row):
            continue
        block.append(row)
        size += len(row)
        if size >= _BLOCK_BYTES:
            yield b"".join(block), len(block)
            block, size = [], 0
    if block:
        yield b"".join(block), len(block)


class Destination:
    """Where a producer puts rows: the output, and the failed ones once more in the errors file.

    Files of this machine grow while the batch runs; what is remote is sent whole once the batch is closed.
    """

    def __init__(self, output: str, errors: str | None, *, replace: bool = False, s3_endpoint: str = "") -> None:
        """Open the files; nothing is touched before `begin`, and with `replace` not before they are closed."""
        self._files: list[tuple[OutputFile, bool]] = []
        self._remotes: list[tuple[Remote, Callable[[str, int], str]]] = []
        try:
            for name, failed_only, stored in ((output, False, layout.output), (errors, True, layout.errors)):
                if name is None:
                    continue
                found = remote(name, s3_endpoint)
                if found is not None:
                    self._remotes.append((found, stored))
                    continue
                kind = StreamFile if _is_stream(name) else ReplacingFile if replace else OutputFile
                self._files.append((kind(name), failed_only))
        except BaseException:
            self.close()
            raise

    @property
    def grows(self) -> bool:
        """Whether anything is to be appended while the batch runs."""
        return bool(self._files)

    def begin(self) -> None:
        """Empty the files."""
        for file, _ in self._files:
            file.begin()

    def append(self, rows: IO[bytes]) -> None:
        """Append the rows of one part: all of them or, when that fails, none. It may be tried again then."""
        marks = [file.mark() for file, _ in self._files]
        try:
            for number, (file, failed_only) in enumerate(self._files):
                if number:
                    rows.seek(0)
                file.append(rows, failed_only=failed_only)
        except BaseException:
            for (file, _), mark in zip(self._files, marks, strict=True):
                file.rewind(mark)
            raise

    def close(self, *, durable: bool = False) -> None:
        """Close the files. May be called twice."""
        for file, _ in self._files:
            file.close(durable=durable)

    def deliver(self, store: ObjectStore, run: Run) -> None:
        """Send a closed run's rows to what is remote. Raises `OutputFailedError`, when all were tried."""
        failed: list[str] = []
        for each, stored in self._remotes:
            name = stored(run.batch_id, run.number)
            try:
                with local_copy(store, name) as file:
                    each.send(file)
            except OutputFailedError as exc:
                failed.append(f"{exc}; what should go there is kept as {store.uri}/{name}")
        if failed:
            raise OutputFailedError("; ".join(failed))
