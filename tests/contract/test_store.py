"""What every object store promises: whole objects or none, the first creator wins, an outage is no absence.

A store that joins adds itself to `STORES`.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from common.errors import ObjectMissingError, StoreUnavailableError, UsageError
from common.store import LocalStore, ObjectStore, open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.objectstores import ObjectServer

STORES: dict[str, Callable[[pytest.FixtureRequest], ObjectStore]] = {
    "local": lambda request: LocalStore(request.getfixturevalue("tmp_path") / "store"),
    "s3": lambda request: s3_store(request, "moto"),
    "s3 without conditions": lambda request: s3_store(request, "rclone"),
}

NAME = "batches/b/runs/1/parts/00000.jsonl"


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> ObjectStore:
    return STORES[request.param](request)


def s3_store(request: pytest.FixtureRequest, server: str) -> ObjectStore:
    request.getfixturevalue("s3_environment")
    started: ObjectServer = request.getfixturevalue(server)
    return open_store(f"s3://{started.new_bucket()}/some/prefix", s3_endpoint=started.endpoint)


def write(store: ObjectStore, name: str, data: bytes, *, replace: bool = False) -> bool:
    with store.writing(name, replace=replace) as out:
        out.write(data)
        assert out.created is False
    return out.created


def test_what_was_written_is_read(store: ObjectStore) -> None:
    with store.writing(NAME) as out:
        out.write(b"one\n")
        out.write(b"two\n")

    assert out.created
    assert store.exists(NAME)
    assert store.read(NAME) == b"one\ntwo\n"
    with store.open(NAME) as file:
        assert list(file) == [b"one\n", b"two\n"]


def test_a_range_is_read_without_the_rest(store: ObjectStore) -> None:
    write(store, NAME, b"one\ntwo\nthree")

    assert store.read_range(NAME, 0, 3) == b"one"
    assert store.read_range(NAME, 4, 3) == b"two"
    assert store.read_range(NAME, 8, 5) == b"three"
    with pytest.raises(ObjectMissingError):
        store.read_range("missing", 0, 1)
    for offset in (9, 20):
        with pytest.raises(StoreUnavailableError):
            store.read_range(NAME, offset, 5)


def test_an_empty_object_exists(store: ObjectStore) -> None:
    assert write(store, NAME, b"")
    assert store.exists(NAME)
    assert store.read(NAME) == b""


def test_the_first_creator_wins_and_the_second_learns_it(store: ObjectStore) -> None:
    assert write(store, NAME, b"first") is True
    assert write(store, NAME, b"second") is False
    assert store.read(NAME) == b"first"


def test_of_many_creators_at_once_one_wins(store: ObjectStore) -> None:
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        return write(store, NAME, b"%d" % number * 1000)

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(create, range(8)))

    assert won.count(True) == 1
    assert store.read(NAME) == b"%d" % won.index(True) * 1000
    assert list(store.names("batches/b/runs/1/parts")) == ["00000.jsonl"]


def test_replacing_puts_the_new_object_in_place(store: ObjectStore) -> None:
    assert write(store, NAME, b"first", replace=True)
    assert write(store, NAME, b"second", replace=True)
    assert store.read(NAME) == b"second"


def test_an_object_is_not_there_before_it_is_whole(store: ObjectStore) -> None:
    with store.writing(NAME) as out:
        out.write(b"half")
        assert not store.exists(NAME)
        assert list(store.names("batches/b/runs/1/parts")) == []

    assert store.exists(NAME)


def test_an_old_object_stays_readable_while_it_is_replaced(store: ObjectStore) -> None:
    write(store, NAME, b"old")

    with store.open(NAME) as reader:
        with store.writing(NAME, replace=True) as out:
            out.write(b"new")
            assert store.read(NAME) == b"old"
        assert reader.read() == b"old"

    assert store.read(NAME) == b"new"


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_nothing(
    store: ObjectStore, replace: bool, error: type[BaseException]
) -> None:
    with pytest.raises(error), store.writing(NAME, replace=replace) as out:
        out.write(b"half")
        raise error

    assert not store.exists(NAME)
    assert list(store.names("batches/b/runs/1/parts")) == []
    assert write(store, NAME, b"whole")


def test_an_exception_in_the_block_leaves_the_old_object(store: ObjectStore) -> None:
    write(store, NAME, b"old")

    with pytest.raises(ValueError), store.writing(NAME, replace=True) as out:
        out.write(b"half")
        raise ValueError

    assert store.read(NAME) == b"old"


def test_what_is_not_there_is_missing(store: ObjectStore) -> None:
    assert not store.exists(NAME)
    assert list(store.names("batches")) == []
    for reading in (store.read, store.open):
        with pytest.raises(ObjectMissingError):
            reading(NAME)


def test_a_name_under_an_object_is_missing(store: ObjectStore) -> None:
    write(store, NAME, b"x")

    assert not store.exists(f"{NAME}/more")
    with pytest.raises(ObjectMissingError):
        store.read(f"{NAME}/more")


def test_names_are_the_last_parts_of_what_lies_in_a_folder(store: ObjectStore) -> None:
    for name in ("f/a", "f/b", "f/g/c", "other/d"):
        write(store, name, b"")

    assert sorted(store.names("f")) == ["a", "b", "g"]


# -- a local folder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_an_object_or_a_folder_is_removed_and_its_neighbours_stay(store: ObjectStore) -> None:
    for name in ("a/one", "a/two", "ab/one", "c", "cd"):
        write(store, name, b"x")

    store.remove("a")
    store.remove("c")
    store.remove("is/not/there")

    assert [name for name in ("a/one", "a/two", "ab/one", "c", "cd") if store.exists(name)] == ["ab/one", "cd"]


def test_a_root_that_is_gone_is_an_outage_and_no_absence(local: LocalStore) -> None:
    """A share that is not mounted must not look like a batch without parts."""
    write(local, NAME, b"x")
    shutil.rmtree(local.root)

    for asking in (
        lambda: local.read(NAME),
        lambda: local.open(NAME),
        lambda: local.exists(NAME),
        lambda: list(local.names("batches")),
        lambda: write(local, NAME, b"y"),
    ):
        with pytest.raises(StoreUnavailableError):
            asking()
    assert not local.root.exists()


def test_nothing_temporary_is_left(local: LocalStore) -> None:
    write(local, NAME, b"x")
    write(local, NAME, b"y")
    write(local, NAME, b"z", replace=True)

    assert [path.name for path in local.root.rglob("*") if path.is_file()] == ["00000.jsonl"]


def test_temporary_files_of_a_writer_that_died_are_no_objects(local: LocalStore) -> None:
    write(local, NAME, b"x")
    (local.root / NAME).with_name(".tmp-dead").write_bytes(b"half")

    assert list(local.names("batches/b/runs/1/parts")) == ["00000.jsonl"]


def test_objects_are_readable_by_the_other_users_of_a_share(local: LocalStore) -> None:
    write(local, NAME, b"x")

    assert (local.root / NAME).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("size", [100, 100_000], ids=["within the buffer", "beyond the buffer"])
def test_a_full_disk_is_an_outage_and_leaves_nothing(local: LocalStore, size: int) -> None:
    """The aggregator tries again after an outage; any other error would lose the shard's sealing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with pytest.raises(StoreUnavailableError):
            write(local, NAME, b"x" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert not local.exists(NAME)
    assert os.listdir((local.root / NAME).parent) == []


def test_a_root_that_cannot_be_made_is_an_outage(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StoreUnavailableError):
        LocalStore(tmp_path / "file" / "store")


def test_a_root_whose_parent_is_missing_is_an_outage(tmp_path: Path) -> None:
    """A store on a share that is not mounted must not be made anew in its mount point."""
    with pytest.raises(StoreUnavailableError):
        LocalStore(tmp_path / "not-mounted" / "store")

    assert not (tmp_path / "not-mounted").exists()


@pytest.mark.parametrize("uri", ["file://{root}", "{root}", "file://localhost{root}"])
def test_a_folder_is_opened_by_uri_or_path(tmp_path: Path, uri: str) -> None:
    opened = open_store(uri.format(root=tmp_path))

    assert opened.uri == tmp_path.resolve().as_uri()


def test_a_uri_with_escapes_names_the_real_folder(tmp_path: Path) -> None:
    store = open_store((tmp_path / "a b–c").as_uri())
    write(store, "x", b"")

    assert (tmp_path / "a b–c" / "x").exists()


@pytest.mark.parametrize(
    "uri", ["", "relative/path", "file://relative", "file://host/path", "file:relative", "ftp://h/p"]
)
def test_what_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="FLEET_STORE"):
        open_store(uri)
