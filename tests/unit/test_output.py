"""The user's output file: refused early, locked, untouched until the batch begins, and whole rows only."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import socket
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common.errors import DestinationError, OutputFailedError
from producer.output import Destination, OutputFile, ReplacingFile, check_destinations, default_output

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OK_ROW = b'{"id":"a","error":null}\n'
BAD_ROW = b'{"id":"b","error":{"code":"x"}}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"input\n")
    return path


def refusal(*names: object, streams: bool = False) -> str:
    with pytest.raises(DestinationError) as caught:
        check_destinations(*(None if name is None else str(name) for name in names), streams=streams)  # type: ignore[arg-type]
    return str(caught.value)


# -- refused before anything -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["path", "relative path", "symlink", "hard link", "symlink of the input"])
def test_the_input_is_no_destination(source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    name: object = other
    given: object = source
    if kind == "path":
        name = source
    elif kind == "relative path":
        name = "./in.jsonl"
    elif kind == "symlink":
        other.symlink_to(source)
    elif kind == "hard link":
        os.link(source, other)
    else:
        given, name = other, source
        other.symlink_to(source)

    assert "is the input" in refusal(given, name)
    assert source.read_bytes() == b"input\n"


def test_output_and_errors_are_two_files(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "out")

    assert "also the output" in refusal(source, tmp_path / "new", tmp_path / "new")
    assert "also the output" in refusal(source, tmp_path / "out", tmp_path / "link")
    assert "is the input" in refusal(source, tmp_path / "out", source)


def test_a_directory_or_a_missing_one_is_refused(source: Path, tmp_path: Path) -> None:
    assert "is a directory" in refusal(source, tmp_path)
    assert "there is no directory" in refusal(source, tmp_path / "missing" / "out")
    assert "there is no directory" in refusal(source, source / "out")


def test_a_symlink_into_a_missing_directory_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "out")

    assert "there is no directory" in refusal(source, tmp_path / "link")


def test_what_is_no_file_is_refused(source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for name in (tmp_path / "pipe", os.devnull, "-", "/dev/stdout"):
        assert f"producer fetch BATCH -o {name}" in refusal(source, name)


def test_rows_that_are_all_there_may_go_to_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))

        check_destinations(None, str(tmp_path / "pipe"), os.devnull, streams=True)
        check_destinations(None, "-", None, streams=True)

        assert "also the output" in refusal(None, tmp_path / "pipe", tmp_path / "pipe", streams=True)
        assert "is not a file" in refusal(None, tmp_path / "socket", streams=True)


def test_a_place_that_cannot_be_written_is_refused(source: Path) -> None:
    """/proc takes no files, not even root's."""
    assert "cannot be written" in refusal(source, "/proc/out.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_file_or_folder_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    (tmp_path / "file").write_bytes(b"kept")
    (tmp_path / "file").chmod(0o400)
    folder.chmod(0o500)
    try:
        assert "cannot be written" in refusal(source, folder / "out")
        assert "cannot be written" in refusal(source, tmp_path / "file")
    finally:
        folder.chmod(0o700)


def test_a_check_leaves_nothing_and_changes_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"kept")

    check_destinations(str(source), str(tmp_path / "out"), str(tmp_path / "new"))
    check_destinations(str(source), str(tmp_path / "out"), None)

    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out"]
    assert (tmp_path / "out").read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("in.jsonl", "in.out.jsonl"),
        ("a/b.jsonl", "a/b.out.jsonl"),
        ("in.txt", "in.txt.out.jsonl"),
        ("in", "in.out.jsonl"),
    ],
)
def test_the_default_output_is_named_after_the_input(name: str, expected: str) -> None:
    assert default_output(name) == expected


def test_a_pipe_has_no_default_output() -> None:
    with pytest.raises(DestinationError, match="-o"):
        default_output("-")


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_untouched_until_the_batch_begins(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"kept\n")

    with closing(OutputFile(str(path))) as file:
        assert path.read_bytes() == b"kept\n"
        file.begin()
        assert path.read_bytes() == b""
        file.append(io.BytesIO(OK_ROW))
        assert path.read_bytes() == OK_ROW


def test_a_file_that_was_made_and_not_used_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"kept")

    for name in ("new", "old"):
        OutputFile(str(tmp_path / name)).close()

    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"kept"


def test_a_file_that_was_begun_stays_even_when_it_is_empty(tmp_path: Path) -> None:
    file = OutputFile(str(tmp_path / "new"))
    file.begin()
    file.close(durable=True)
    file.close()

    assert os.listdir(tmp_path) == ["new"]


def test_a_second_producer_is_refused_until_the_first_one_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out"
    (tmp_path / "link").symlink_to(path)
    first = OutputFile(str(path))
    first.begin()
    first.append(io.BytesIO(OK_ROW))

    for name in (path, tmp_path / "link"):
        with pytest.raises(DestinationError, match="another producer"):
            OutputFile(str(name))
    assert path.read_bytes() == OK_ROW

    first.close()
    OutputFile(str(path)).close()
    assert path.read_bytes() == OK_ROW


def test_a_second_producer_does_not_remove_the_file_of_the_first(tmp_path: Path) -> None:
    """The first one made the file and has not begun; the second is refused and leaves it where it is."""
    path = tmp_path / "out"
    with closing(OutputFile(str(path))) as first:
        with pytest.raises(DestinationError):
            OutputFile(str(path))
        assert path.exists()
        first.begin()
    assert path.exists()


def test_rows_are_appended_in_order_across_parts(tmp_path: Path) -> None:
    path = tmp_path / "out"
    rows = [b'{"n":%d,"error":null}\n' % number for number in range(1000)]

    with closing(OutputFile(str(path))) as file:
        file.begin()
        for start in range(0, 1000, 100):
            file.append(io.BytesIO(b"".join(rows[start : start + 100])))
        assert file.rows == 1000

    assert path.read_bytes() == b"".join(rows)


def test_a_part_larger_than_a_block_is_copied_whole(tmp_path: Path) -> None:
    path, row = tmp_path / "out", b'{"x":"' + b"y" * 700_000 + b'","error":null}\n'

    with closing(OutputFile(str(path))) as file:
        file.begin()
        file.append(io.BytesIO(row * 3))

    assert path.read_bytes() == row * 3


def test_a_full_disk_is_an_error_and_leaves_whole_rows(tmp_path: Path) -> None:
    """O07: the rows are in the batch, and the file holds whole ones."""
    path = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    with closing(OutputFile(str(path))) as file:
        file.begin()
        file.append(io.BytesIO(OK_ROW * 10))
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(OK_ROW) * 15 + 7, hard))
        try:
            with pytest.raises(OutputFailedError, match="cannot be written"):
                file.append(io.BytesIO(OK_ROW * 10))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    left = path.read_bytes()
    assert left.startswith(OK_ROW * 10)
    assert len(left) % len(OK_ROW) == 0


def test_failed_rows_also_go_to_the_errors_file(tmp_path: Path) -> None:
    with closing(Destination(str(tmp_path / "out"), str(tmp_path / "errors"))) as destination:
        destination.begin()
        destination.append(io.BytesIO(OK_ROW + BAD_ROW + OK_ROW))
        destination.append(io.BytesIO(BAD_ROW))

    assert (tmp_path / "out").read_bytes() == OK_ROW + BAD_ROW + OK_ROW + BAD_ROW
    assert (tmp_path / "errors").read_bytes() == BAD_ROW * 2


def test_an_errors_file_that_cannot_be_opened_releases_the_output(tmp_path: Path) -> None:
    with closing(OutputFile(str(tmp_path / "errors"))):
        with pytest.raises(DestinationError):
            Destination(str(tmp_path / "out"), str(tmp_path / "errors"))
        assert not (tmp_path / "out").exists()


# -- a file that takes another one's place -----------------------------------------------------------------------------


def test_a_replaced_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"kept\n")
    path.chmod(0o640)

    for durable in (False, True):
        with closing(ReplacingFile(str(path))) as file:
            file.begin()
            file.append(io.BytesIO(OK_ROW))
            assert path.read_bytes() == b"kept\n"
            file.close(durable=durable)

    assert path.read_bytes() == OK_ROW
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


def test_waiting_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    """A producer may be killed while it waits, and then nobody removes a temporary file."""
    with closing(ReplacingFile(str(tmp_path / "out"))) as file:
        file.begin()
        assert os.listdir(tmp_path) == []
        file.append(io.BytesIO(OK_ROW))
        assert len(os.listdir(tmp_path)) == 1
        file.begin()
        file.append(io.BytesIO(BAD_ROW))
        file.close(durable=True)

    assert (tmp_path / "out").read_bytes() == BAD_ROW


def test_an_output_without_rows_is_put_in_place_once(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old\n")
    file = ReplacingFile(str(path))
    file.close(durable=True)
    assert path.read_bytes() == b"old\n"
    file.begin()
    file.close(durable=True)
    assert path.read_bytes() == b""
    path.unlink()

    file.close(durable=True)

    assert os.listdir(tmp_path) == []


def test_a_file_that_grows_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with closing(OutputFile(str(path))), pytest.raises(DestinationError, match="another producer"):
        ReplacingFile(str(path))

    path.write_bytes(b"")
    with closing(ReplacingFile(str(path))), closing(ReplacingFile(str(path))):
        pass


def test_a_folder_that_takes_no_file_is_refused_before_anything() -> None:
    for name in ("/proc/out.jsonl", "/proc/self/comm"):
        with pytest.raises(DestinationError, match=f"{name} cannot be written: no new file in /proc"):
            ReplacingFile(name)


# -- the standard output -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def standard(descriptor: int, path: object) -> Iterator[None]:
    """Standard input or output is this file, for as long as the block lasts."""
    kept = os.dup(descriptor)
    given = os.open(str(path), os.O_RDWR | os.O_APPEND)
    os.dup2(given, descriptor)
    os.close(given)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


@contextlib.contextmanager
def printed(path: Path) -> Iterator[Path]:
    """A file that standard output is appended to, as by `>>`. No fixture: pytest turns file descriptor 1 after them."""
    path.write_bytes(b"first\n")
    sys.stdout.flush()
    with (
        standard(1, path),
        open(1, "w", encoding="utf-8", closefd=False) as stdout,
        contextlib.redirect_stdout(stdout),
    ):
        yield path


def test_what_standard_output_goes_to_is_no_second_output(tmp_path: Path) -> None:
    """`-o - --errors f > f` would replace the file, and the rows go to one that has no name."""
    with printed(tmp_path / "out") as file:
        for names in (("-", file), (file, "-"), ("-", "-"), ("-", "/dev/fd/1")):
            assert "is also the output" in refusal(None, *names, streams=True)
        check_destinations(None, "-", str(tmp_path / "errors"), streams=True)


def test_standard_output_that_goes_to_the_input_is_refused(source: Path) -> None:
    """`fetch -o - >> STORE/batches/B/output.jsonl` would read what it writes, for ever."""
    with printed(source):
        for name in ("-", "/dev/stdout", "/dev/fd/1"):
            assert "is the input" in refusal(source, name, streams=True)


def test_a_dash_is_standard_input_as_the_input_alone(tmp_path: Path, source: Path) -> None:
    with printed(tmp_path / "out"):
        with standard(0, "/dev/null"):
            check_destinations(None, "-", "/dev/null", streams=True)
            check_destinations("-", str(source))
        with standard(0, source):
            assert "is the input" in refusal("-", source)
            check_destinations(None, "-", str(source), streams=True)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_every_name_of_standard_output_appends_where_it_stands(tmp_path: Path, name: str) -> None:
    with printed(tmp_path / "out") as file:
        assert "is not a file" in refusal(None, name)
        check_destinations(None, name, streams=True)
        with closing(Destination(name, None, replace=True)) as destination:
            destination.begin()
            destination.append(io.BytesIO(OK_ROW))
            destination.close(durable=True)

        assert file.read_bytes() == b"first\n" + OK_ROW


# -- what is no file ---------------------------------------------------------------------------------------------------


def test_a_named_pipe_gets_the_rows_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with closing(Destination(str(pipe), str(tmp_path / "errors"), replace=True)) as destination:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        destination.begin()
        destination.append(io.BytesIO(OK_ROW + BAD_ROW))
        destination.close(durable=True)

    assert os.read(reader, 1000) == OK_ROW + BAD_ROW
    os.close(reader)
    assert pipe.is_fifo()
    assert (tmp_path / "errors").read_bytes() == BAD_ROW


def test_a_reader_of_standard_output_that_leaves_is_no_failure_of_the_output() -> None:
    """As with `| head`; the command then ends as others do."""
    reader, writer = os.pipe()
    with (
        open(writer, "w", encoding="utf-8") as stdout,
        contextlib.redirect_stdout(stdout),
        closing(Destination("-", None, replace=True)) as destination,
    ):
        destination.begin()
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            destination.append(io.BytesIO(OK_ROW))


def test_a_reader_of_a_named_pipe_that_leaves_is_told(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with closing(Destination(str(tmp_path / "out"), str(pipe), replace=True)) as destination:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        destination.begin()
        os.close(reader)
        with pytest.raises(OutputFailedError, match="pipe cannot be written: its reader left"):
            destination.append(io.BytesIO(BAD_ROW))


def test_a_stream_that_cannot_be_written_is_an_error() -> None:
    with closing(Destination("/dev/full", None, replace=True)) as destination:
        destination.begin()
        with pytest.raises(OutputFailedError, match="/dev/full cannot be written"):
            destination.append(io.BytesIO(OK_ROW))
