"""An input may come from anywhere, compressed or not: the same lines arrive, and nothing more than the limits allow."""

from __future__ import annotations

import gzip
import io
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.errors import InputRefusedError, UsageError
from common.settings import ProducerSettings
from producer.output import default_output
from producer.sources import staged, zstd
from tests.webserver import Exchange, RawServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.objectstores import ObjectServer

LINES = "".join(f'{{"custom_id": "r{number}", "text": "é {number}"}}\n' for number in range(20_000)).encode()

#: What a source may hold, and what must come of it: with several members or frames too, as parallel tools write them.
HELD: dict[str, bytes] = {
    "plain": LINES,
    "gzip": gzip.compress(LINES),
    # As the command `zstd` does it, and Python does not.
    "zstd": zstd.compress(LINES, options={zstd.CompressionParameter.checksum_flag: 1}),
    "gzip in two": gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]),
    "zstd in two": zstd.compress(LINES[:1000]) + b"\x50\x2a\x4d\x18\x02\x00\x00\x00xx" + zstd.compress(LINES[1000:]),
    "zstd after a frame to skip": b"\x5f\x2a\x4d\x18\x02\x00\x00\x00xx" + zstd.compress(LINES),
}


@pytest.fixture(params=HELD)
def held(request: pytest.FixtureRequest) -> bytes:
    return HELD[request.param]


def limits(**changed: object) -> ProducerSettings:
    return ProducerSettings.model_construct(**changed)  # type: ignore[arg-type]


def lines_of(name: object, **changed: object) -> bytes:
    with staged(str(name), limits(**changed)) as source:
        return Path(source.path).read_bytes()


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was staged is gone, whatever happened."""
    folder = tmp_path / "staging"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def serving(data: bytes) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(200, body=data)


# -- the same lines from everywhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst"])
def test_a_file_is_known_by_its_first_bytes_not_by_its_name(tmp_path: Path, held: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(held)

    assert lines_of(tmp_path / name) == LINES


def test_a_pipe_gives_the_same_lines(tmp_path: Path, held: bytes) -> None:
    """Its first bytes come one at a time: compression must be seen all the same."""
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
            for byte in held[:3]:
                pipe.write(bytes([byte]))
                time.sleep(0.01)
            pipe.write(held[3:])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert lines_of(tmp_path / "pipe") == LINES
    writer.join(5)


def test_stdin_gives_the_same_lines(tmp_path: Path, held: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """`< file` too, also when somebody has read its beginning."""
    (tmp_path / "in").write_bytes(b"a first line\n" + held)
    for seekable in (True, False):
        with open(tmp_path / "in", "rb") as file:
            file.seek(len(b"a first line\n"))
            stdin = file if seekable else io.BufferedReader(_Unseekable(file.read()))
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
            assert lines_of("-") == LINES


class _Unseekable(io.RawIOBase):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data, self._data = self._data[: len(buffer)], self._data[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def test_a_get_gives_the_same_lines(held: bytes) -> None:
    with RawServer(serving(held)) as server:
        assert lines_of(f"{server.url}/in.jsonl?signature=x") == LINES


def test_an_object_gives_the_same_lines(moto: ObjectServer, s3_environment: None, held: bytes) -> None:
    bucket = moto.new_bucket()
    moto.client.put_object(Bucket=bucket, Key="some/in.jsonl", Body=held)

    assert lines_of(f"s3://{bucket}/some/in.jsonl", s3_endpoint=moto.endpoint) == LINES


def test_a_compressed_download_goes_on_where_it_broke() -> None:
    data = HELD["gzip"]
    half = len(data) // 2

    def broken(exchange: Exchange) -> None:
        exchange.answer(200, 'ETag: "one"', body=data[:half], length=len(data))

    def rest(exchange: Exchange) -> None:
        exchange.answer(206, f"Content-Range: bytes {half}-{len(data) - 1}/{len(data)}", body=data[half:])

    with RawServer(broken, rest) as server:
        assert lines_of(f"{server.url}/in.jsonl.gz") == LINES


def test_a_plain_file_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)

    with staged(str(path), limits()) as source:
        assert source.path == str(path)


@pytest.mark.parametrize("data", [b"", gzip.compress(b""), zstd.compress(b"")], ids=["plain", "gzip", "zstd"])
def test_an_empty_input_is_empty(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in").write_bytes(data)

    assert lines_of(tmp_path / "in") == b""


# -- refused -----------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said(tmp_path: Path, moto: ObjectServer, s3_environment: None) -> None:
    bucket = moto.new_bucket()
    with RawServer(lambda exchange: exchange.answer(404)) as server:
        for name, reason in (
            (tmp_path / "missing", "No such file"),
            (tmp_path, "is a directory"),
            (f"s3://{bucket}/missing", "there is no such object"),
            (f"s3://{bucket}/", "names no object"),
            (f"{server.url}/missing?signature=secret", "the server answered 404"),
            ("ftp://host/in.jsonl", "an input is a path"),
        ):
            with pytest.raises(UsageError, match=reason) as caught:
                lines_of(name, s3_endpoint=moto.endpoint)
            assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("keep", [0.5, 0.999, "trailer"])
def test_compressed_data_that_is_cut_off_is_never_a_shorter_input(tmp_path: Path, kind: str, keep: float | str) -> None:
    data = HELD[kind]
    (tmp_path / "in").write_bytes(data[:-1] if keep == "trailer" else data[: int(len(data) * float(keep))])

    with pytest.raises(UsageError, match="cut off"):
        lines_of(tmp_path / "in")


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_compressed_data_that_is_damaged_is_refused(tmp_path: Path, kind: str) -> None:
    data = bytearray(HELD[kind])
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "in").write_bytes(data)

    with pytest.raises(UsageError, match="damaged"):
        lines_of(tmp_path / "in")


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd", "a pipe"])
def test_an_input_beyond_the_limit_of_bytes_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "in"
    if kind == "a pipe":
        os.mkfifo(path)
        threading.Thread(target=_write_until_broken, args=(path, LINES), daemon=True).start()
    else:
        path.write_bytes(HELD[kind])

    with pytest.raises(UsageError, match=rf"more than {len(LINES) - 1} bytes.*FLEET_MAX_INPUT_BYTES"):
        lines_of(path, max_input_bytes=len(LINES) - 1)


def _write_until_broken(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except BrokenPipeError:
        return


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
def test_a_bomb_without_lines_stops_at_the_limit_of_one_line(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    """64 MiB of zeros are 64 kB of gzip and 6 kB of zstd: the rest must not even be decompressed."""
    (tmp_path / "in").write_bytes(b"".join([compress(b"{}\n\n")] + [compress(b"\0" * 2**24)] * 4))

    with pytest.raises(InputRefusedError) as caught:
        lines_of(tmp_path / "in", max_line_bytes=2**21, max_input_bytes=2**30)
    assert caught.value.problems == [
        f"{tmp_path / 'in'}:3: the line is longer than {2**21} bytes (FLEET_MAX_LINE_BYTES)"
    ]


def test_a_bomb_of_empty_lines_stops_at_the_limit_of_lines(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(gzip.compress(b"\n" * 2**24))

    with pytest.raises(InputRefusedError) as caught:
        lines_of(tmp_path / "in", max_lines=1_000_000)
    assert caught.value.problems == [
        f"{tmp_path / 'in'}:1000001: the input has more than 1000000 lines (FLEET_MAX_LINES)"
    ]


def test_no_room_for_staging_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(HELD["gzip"])
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with pytest.raises(UsageError, match=r"cannot be staged in .* \(TMPDIR\): No such file"):
            lines_of(tmp_path / "in")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("a/in.jsonl.gz", "a/in.out.jsonl"),
        ("a/in.zst", "a/in.out.jsonl"),
        ("https://host/a/in.jsonl.gz?signature=/x.jsonl", "in.out.jsonl"),
        ("https://host/a/my%20in.jsonl", "my in.out.jsonl"),
        ("s3://bucket/a/in.jsonl", "in.out.jsonl"),
    ],
)
def test_the_default_output_is_named_after_the_input(name: str, output: str) -> None:
    assert default_output(name) == output


@pytest.mark.parametrize("name", ["https://host", "https://host/?in.jsonl", "s3://bucket/"])
def test_a_source_without_a_name_needs_an_output(name: str) -> None:
    with pytest.raises(UsageError, match="name the output with -o"):
        default_output(name)


def test_what_people_see_of_a_source_holds_no_signature() -> None:
    with RawServer(serving(LINES)) as server, staged(f"{server.url}/in.jsonl?signature=secret", limits()) as source:
        assert source.shown == f"{server.url}/in.jsonl"
