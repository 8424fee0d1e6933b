"""Intake: from an input file to a batch directory, in two streaming passes with flat memory.

Owns: validation of a whole file, the digest, cutting shards, writing the batch directory.
Must not know: Redis, Celery, the command line.
On failure: a file with problems raises `InputRefusedError` in the first pass, before anything is written; it names
physical line numbers (1-based) and quotes no line. The manifest is written last: a batch directory without one is no
batch, and nobody will find it.

The first pass reads every line, the second writes them; a file that changed in between is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Self

from common import layout
from common.batch import BOM, JSON_SPACE, MAX_PROBLEMS, LineError, Manifest, RequestLine, parse_line
from common.errors import InputRefusedError, UsageError
from common.runs import now
from common.settings import ProducerSettings
from producer.sources import TOO_LONG, TOO_MANY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from common.store import ObjectStore

#: A shard is closed at this size, whatever its number of requests, so that a part stays a moderate object.
MAX_SHARD_BYTES = 64 * 1024 * 1024
#: A file has about so many shards, so that small ones show progress too; but none smaller than the second number.
SHARDS_PER_FILE = 32
MIN_SHARD_SIZE = 16

#: Ids looked up at once.
_ID_BATCH = 1000
_DEFAULT_LIMITS = ProducerSettings.model_construct()
#: Lines between two calls of the progress callback.
_REPORT_EVERY = 5000


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that passed: its name as the user wrote it, where it can be read, and what was seen in it.

    `sha256` is over the file's bytes. `endpoint` and `model` are those of the lines, "mixed" when they differ.
    """

    name: str
    path: str
    total: int
    sha256: str
    endpoint: str
    model: str | None


def check(
    name: str,
    path: str,
    on_lines: Callable[[int], None] | None = None,
    *,
    limits: ProducerSettings = _DEFAULT_LIMITS,
) -> Checked:
    """First pass: validate every line of the file at `path`, which people know as `name`.

    Raises `InputRefusedError` with at most `MAX_PROBLEMS` lines and the count of all. A line beyond a limit ends the
    pass.
    """
    problems = _Problems(name)
    digest = hashlib.sha256()
    endpoints, models = _Common(), _Common()
    total = 0
    with _opened(name, path) as file, _SeenIds(problems) as seen:
        for number, raw in _lines(file, digest.update, limits.max_line_bytes):
            if number > limits.max_lines:
                problems.add(number, TOO_MANY.format(limits.max_lines))
                break
            if len(raw.rstrip(b"\r\n")) > limits.max_line_bytes:
                problems.add(number, TOO_LONG.format(limits.max_line_bytes))
                break
            try:
                line = parse_line(raw)
            except LineError as exc:
                problems.add(number, str(exc))
                continue
            seen.add(line, number)
            endpoints.add(line.url)
            models.add(line.model)
            total += 1
            if on_lines is not None and total % _REPORT_EVERY == 0:
                on_lines(total)
    problems.raise_if_any()
    return Checked(name, path, total, digest.hexdigest(), endpoints.value or "", models.value)


def batch_digest(checked: Checked, rows_depend_on: Sequence[str]) -> str:
    """What makes two submits the same batch: the file's bytes and what changes rows, never destinations."""
    # Arguments are bytes, whatever the locale made of them.
    return hashlib.sha256(b"\0".join(map(os.fsencode, (checked.sha256, *rows_depend_on)))).hexdigest()


def shard_size(total: int, at_most: int) -> int:
    """Requests per shard for a file of `total` requests."""
    return min(at_most, max(MIN_SHARD_SIZE, -(-total // SHARDS_PER_FILE)))


def write_batch(
    store: ObjectStore,
    checked: Checked,
    *,
    batch_id: str,
    digest: str,
    max_shard_size: int,
    expires_at: int | None = None,
    fail_after: int | None = None,
    local: bool = False,
    traceparent: str = "",
    on_lines: Callable[[int], None] | None = None,
) -> Manifest:
    """Second pass: write the shards' inputs, then the manifest. The batch is durable when this returns.

    Raises `InputRefusedError` when the file changed since it was checked.
    """
    size = shard_size(checked.total, max_shard_size)
    again = hashlib.sha256()
    counts: list[int] = []
    written = 0
    with _opened(checked.name, checked.path) as file:
        lines = (raw.strip(JSON_SPACE) for _, raw in _lines(file, again.update))
        pending = next(lines, None)
        while pending is not None:
            count = shard_bytes = 0
            with store.writing(layout.shard_input(batch_id, len(counts))) as shard:
                while pending is not None and count < size and shard_bytes < MAX_SHARD_BYTES:
                    shard.write(pending + b"\n")
                    count += 1
                    shard_bytes += len(pending)
                    pending = next(lines, None)
            counts.append(count)
            written += count
            if on_lines is not None and written >= _REPORT_EVERY:
                on_lines(written)
    if again.hexdigest() != checked.sha256:
        raise InputRefusedError([f"{checked.name}: the file changed while it was read"], 1)
    manifest = Manifest(
        batch_id=batch_id,
        created_at=now(),
        # A file name is bytes; the manifest is JSON.
        input_name=os.fsencode(checked.name).decode("utf-8", "replace"),
        endpoint=checked.endpoint,
        model=checked.model,
        digest=digest,
        total=checked.total,
        counts=tuple(counts),
        expires_at=expires_at,
        fail_after=fail_after,
        local=local,
        traceparent=traceparent,
    )
    with store.writing(layout.manifest(batch_id)) as out:
        out.write(manifest.model_dump_json().encode())
    return manifest


@contextlib.contextmanager
def _opened(name: str, path: str) -> Iterator[IO[bytes]]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as exc:
        raise UsageError(f"{name}: {exc.strerror}") from None
    with file:
        yield file


def _lines(
    file: IO[bytes], on_bytes: Callable[[bytes], None], max_bytes: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Non-blank lines with their physical numbers. Lines end at LF only: U+2028 and CR are text.

    Of a line that is longer than `max_bytes` a little more than that comes, and nothing that makes sense after it.
    """
    for number, raw in enumerate(_read(file, max_bytes), start=1):
        on_bytes(raw)
        line = raw.removeprefix(BOM) if number == 1 else raw
        if line.strip(JSON_SPACE):
            yield number, line


def _read(file: IO[bytes], max_bytes: int | None) -> Iterator[bytes]:
    # With room for an end of line and a byte order mark, which do not count.
    at_once = -1 if max_bytes is None else max_bytes + 5
    try:
        while line := file.readline(at_once):
            yield line
    except OSError as exc:
        raise UsageError(f"{file.name}: {exc.strerror}") from None


class _Problems:
    """What is wrong with a file: the first problems in words, all of them counted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._named: list[tuple[int, str]] = []
        self._total = 0

    def add(self, line_number: int, reason: str) -> None:
        self._total += 1
        self._named.append((line_number, reason))
        if len(self._named) > 2 * MAX_PROBLEMS:
            self._trim()

    def _trim(self) -> None:
        # Repeated ids are found a thousand lines late, so the list is not in order by itself.
        self._named = sorted(self._named)[:MAX_PROBLEMS]

    def raise_if_any(self) -> None:
        if self._total:
            self._trim()
            raise InputRefusedError([f"{self._name}:{number}: {reason}" for number, reason in self._named], self._total)


class _Common:
    """The one value that all lines share, or "mixed"."""

    def __init__(self) -> None:
        self.value: str | None = None

    def add(self, value: str | None) -> None:
        if value is not None and value != self.value:
            self.value = value if self.value is None else "mixed"


class _SeenIds:
    """Finds repeated ids with flat memory: 16 bytes of a digest and a line number each, in a temporary database.

    SQLite keeps a nameless database in its page cache and spills what does not fit to a file that it deletes itself.
    """

    def __init__(self, problems: _Problems) -> None:
        self._problems = problems
        self._waiting: list[tuple[bytes, int, str]] = []
        self._database = sqlite3.connect("", isolation_level=None)

    def __enter__(self) -> Self:
        for statement in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            "PRAGMA cache_size = -16384",
            "CREATE TABLE seen (id BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID",
        ):
            self._database.execute(statement)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        self._database.close()

    def add(self, line: RequestLine, number: int) -> None:
        key = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        self._waiting.append((key, number, line.custom_id))
        if len(self._waiting) >= _ID_BATCH:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        cursor = self._database.executemany(
            "INSERT INTO seen VALUES (?, ?) ON CONFLICT DO NOTHING", ((key, number) for key, number, _ in waiting)
        )
        if cursor.rowcount == len(waiting):
            return
        for key, number, custom_id in waiting:
            (first,) = self._database.execute("SELECT line FROM seen WHERE id = ?", (key,)).fetchone()
            if first != number:
                self._problems.add(number, f"custom_id {_shown(custom_id)} is repeated; it is first on line {first}")


def _shown(custom_id: str) -> str:
    """An id for people: quoted, cut, one line."""
    return repr(custom_id if len(custom_id) <= 80 else custom_id[:80] + "...")
