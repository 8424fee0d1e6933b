"""Sources: everything that an input may come from, as a file that can be read twice.

Owns: `staged`: paths, pipes, `-`, http(s) and `s3://`, compressed by gzip or zstd or not, and the limits meanwhile.
Must not know: what the lines mean (`producer.intake`), batches.
On failure: what is not there, or not what it seems, raises `UsageError` or `InputRefusedError` and leaves nothing;
what cannot be reached raises `SourceUnavailableError` or `StoreUnavailableError`.

A regular file is read where it lies. Everything else is staged in a temporary file (`TMPDIR`), decompressed on the
way. Compression is told by the first bytes, never by the name: servers and tools decompress what they like. A bomb
stops at the limit on the input's bytes, on its lines, or, if it has no lines, on the bytes of one line.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import stat
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, cast
from urllib.parse import unquote

from common.errors import InputRefusedError, ObjectMissingError, UsageError
from producer import web

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.settings import ProducerSettings

_GZIP = b"\x1f\x8b"
#: A zstd frame, and one that is skipped; the latter begins with any of 16 bytes. RFC 8878, section 3.1.
_ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")
_MAGIC_BYTES = 4

_BLOCK_BYTES = 1024 * 1024

#: Reasons of a refusal that `intake` gives too.
TOO_LONG = "the line is longer than {} bytes (FLEET_MAX_LINE_BYTES)"
_TOO_LARGE = "more than {} bytes, as decompressed (FLEET_MAX_INPUT_BYTES)"
TOO_MANY = "the input has more than {} lines (FLEET_MAX_LINES)"


@dataclass(frozen=True, slots=True)
class Source:
    """An input that can be read twice at `path`; people know it as `shown`, which holds no query and no login."""

    path: str
    shown: str


def is_remote(name: str) -> bool:
    """Whether an input or an output is named by a URL."""
    return re.match(r"(?i)(https?|s3)://", name) is not None


def shown(name: str) -> str:
    """An input's or an output's name for people, logs and records."""
    return web.shown_url(name) if re.match(r"(?i)https?://", name) else name


def plain_name(name: str) -> str:
    """The file name that an input has, or would have in the current folder, without its compression's ending."""
    if is_remote(name):
        name = unquote(PurePosixPath(shown(name).partition("://")[2].partition("/")[2]).name).replace("/", "_")
    for ending in (".gz", ".zst"):
        name = name.removesuffix(ending)
    return name


@contextlib.contextmanager
def staged(name: str, limits: ProducerSettings) -> Iterator[Source]:
    """The input for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        with _opened(name, limits) as stream:
            if isinstance(stream, str):
                path = stream
            else:
                try:
                    copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="fleet-input-", suffix=".jsonl"))
                except OSError as exc:
                    raise _not_staged(name, exc) from None
                _stage(shown(name), stream, cast("IO[bytes]", copy), limits)
                path = copy.name
        yield Source(path, shown(name))


@contextlib.contextmanager
def _opened(name: str, limits: ProducerSettings) -> Iterator[IO[bytes] | str]:
    """A stream of the input's lines, or its path where it can be read in place."""
    if name == "-" and sys.stdin is None:
        raise UsageError("-: stdin is closed")
    if is_remote(name):
        with _opened_remote(name, limits) as raw, _decompressed(raw) as stream:
            yield stream
        return
    if name != "-" and _is_regular(name):
        try:
            file: IO[bytes] = open(name, "rb")  # noqa: SIM115 - closed below
        except OSError as exc:
            raise UsageError(f"{name}: {exc.strerror}") from None
        with file, _decompressed(file) as stream:
            if stream is not file:
                yield stream
                return
            if os.fstat(file.fileno()).st_size > limits.max_input_bytes:
                raise UsageError(f"{name}: {_TOO_LARGE.format(limits.max_input_bytes)}")
        yield name
        return
    try:
        pipe: IO[bytes] = sys.stdin.buffer if name == "-" else open(name, "rb")  # noqa: SIM115 - closed below
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from None
    with pipe, _decompressed(pipe) as stream:
        yield stream


def _is_regular(name: str) -> bool:
    try:
        mode = os.stat(name).st_mode
    except OSError as exc:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name):
            raise UsageError(f"{web.shown_url(name)}: an input is a path, -, http://, https:// or s3://") from None
        raise UsageError(f"{name}: {exc.strerror}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{name}: is a directory")
    return stat.S_ISREG(mode)


def _opened_remote(name: str, limits: ProducerSettings) -> IO[bytes]:
    if not name.lower().startswith("s3://"):
        return web.open_url(web.Url.parse(name))
    from common.s3 import S3Bucket, split_uri  # noqa: PLC0415 - a quarter of a second, for those who use it

    bucket, key = split_uri(name, name)
    if not key:
        raise UsageError(f"{name}: names no object")
    try:
        return S3Bucket(bucket, limits.s3_endpoint).open(key)
    except ObjectMissingError:
        raise UsageError(f"{name}: there is no such object") from None


@contextlib.contextmanager
def _decompressed(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """`raw` itself, from its first byte on, or what it holds compressed."""
    start = raw.tell() if raw.seekable() else None  # of `< file`, somebody may have read the beginning
    head = raw.read(_MAGIC_BYTES)
    if start is None:
        whole = cast("IO[bytes]", _Rejoined(head, raw))
    else:
        whole = raw
        raw.seek(start)
    if head.startswith(_GZIP):
        with gzip.GzipFile(fileobj=whole) as stream:
            yield cast("IO[bytes]", stream)
    elif _ZSTD.match(head):
        with zstd.ZstdFile(whole) as stream:
            yield cast("IO[bytes]", stream)
    else:
        yield whole


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        head, self._head = self._head, b""
        if size is None or size < 0:
            return head + self._rest.read()
        if not head:
            return self._rest.read(size)
        self._head = head[size:]
        return head[:size]


def _stage(name: str, stream: IO[bytes], copy: IO[bytes], limits: ProducerSettings) -> None:
    """Copy the lines, within the limits. What a limit of one line leaves through is found by `intake.check`."""
    total = lines = of_line = 0
    while data := _read(name, stream):
        total += len(data)
        if total > limits.max_input_bytes:
            raise UsageError(f"{name}: {_TOO_LARGE.format(limits.max_input_bytes)}")
        lines += data.count(b"\n")
        if lines > limits.max_lines:
            raise InputRefusedError([f"{name}:{limits.max_lines + 1}: {TOO_MANY.format(limits.max_lines)}"], 1)
        end = data.rfind(b"\n")
        of_line = len(data) - end - 1 if end >= 0 else of_line + len(data)
        if of_line > limits.max_line_bytes:
            raise InputRefusedError([f"{name}:{lines + 1}: {TOO_LONG.format(limits.max_line_bytes)}"], 1)
        try:
            copy.write(data)
        except OSError as exc:
            raise _not_staged(name, exc) from None
    try:
        copy.flush()
    except OSError as exc:
        raise _not_staged(name, exc) from None


def _read(name: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_BLOCK_BYTES)
    except EOFError:
        raise UsageError(f"{name}: the compressed data is cut off") from None
    except (gzip.BadGzipFile, zlib.error, zstd.ZstdError):
        raise UsageError(f"{name}: the compressed data is damaged") from None
    except OSError as exc:
        raise UsageError(f"{name} cannot be read: {exc.strerror}") from None


def _not_staged(name: str, exc: OSError) -> UsageError:
    return UsageError(f"{shown(name)} cannot be staged in {tempfile.gettempdir()} (TMPDIR): {exc.strerror}")
