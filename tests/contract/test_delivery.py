"""A closed batch's output reaches S3 and a presigned URL whole, from a folder and from S3."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common import layout
from common.batch import Manifest, Run
from common.errors import DestinationError, OutputFailedError
from common.store import LocalStore, open_store
from producer.delivery import local_copy
from producer.output import Destination, check_destinations
from tests.servers import free_port
from tests.webserver import RawServer, Uploads

if TYPE_CHECKING:
    from pathlib import Path

    from common.store import ObjectStore
    from tests.objectstores import ObjectServer

MIB = 1024 * 1024
BATCH = layout.new_batch_id()
#: A later run: the newest one's output is the batch's.
RUN = Run(Manifest(batch_id=BATCH, created_at=0, input_name="", endpoint="", digest="", total=1, counts=(1,)), 2, (), 1)

pytestmark = pytest.mark.usefixtures("s3_environment")


def put_output(store: ObjectStore, data: bytes) -> ObjectStore:
    for name, content in ((layout.output(BATCH, 2), data), (layout.errors(BATCH, 2), data[:10])):
        with store.writing(name) as out:
            out.write(content)
    return store


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, moto: ObjectServer) -> ObjectStore:
    if request.param == "folder":
        return LocalStore(tmp_path / "store")
    return open_store(f"s3://{moto.new_bucket()}/store", s3_endpoint=moto.endpoint)


@pytest.mark.parametrize("size", [0, 1_000_000, 5 * MIB, 12_000_000], ids=["empty", "1 MB", "5 MiB", "12 MB"])
def test_O01_an_output_of_any_size_reaches_its_places(store: ObjectStore, size: int, moto: ObjectServer) -> None:
    """O01: to S3 and to a presigned URL, equal bytes."""
    data, bucket, uploads = os.urandom(size), moto.new_bucket(), Uploads()
    put_output(store, data)

    with (
        RawServer(uploads) as server,
        closing(
            Destination(f"s3://{bucket}/out", f"{server.url}/errors?signature=%2f", s3_endpoint=moto.endpoint)
        ) as destination,
    ):
        assert not destination.grows
        destination.begin()
        destination.deliver(store, RUN)
    assert moto.bytes_of(bucket, "out") == data
    assert uploads.stored == [("/errors?signature=%2f", data[:10])]

    with RawServer(uploads) as server, closing(Destination(f"{server.url}/out", None)) as destination:
        destination.deliver(store, RUN)
    assert uploads.stored[1] == ("/out", data)


def test_one_destination_that_fails_keeps_nothing_from_the_other(tmp_path: Path, moto: ObjectServer) -> None:
    store, uploads = put_output(LocalStore(tmp_path / "store"), b"row\n"), Uploads()
    with (
        RawServer(lambda exchange: exchange.answer(403)) as refusing,
        RawServer(uploads) as server,
        closing(Destination(f"{refusing.url}/out?signature=secret", f"{server.url}/errors")) as destination,
        pytest.raises(OutputFailedError) as caught,
    ):
        destination.deliver(store, RUN)

    assert uploads.stored == [("/errors", b"row\n")]
    assert "403" in str(caught.value)
    assert f"is kept as {store.uri}/{layout.output(BATCH, 2)}" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_store_that_is_away_is_said(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    shutil.rmtree(store.root)

    with pytest.raises(OutputFailedError, match="is not there"), local_copy(store, layout.output(BATCH, 2)):
        pass


# -- refused at submit -------------------------------------------------------------------------------------------------


def test_O07_a_destination_that_cannot_work_is_refused(moto: ObjectServer, tmp_path: Path) -> None:
    """O07: a bad destination is found before any work, not after it."""
    with RawServer(Uploads()) as server:
        good = f"{server.url}/out?signature=secret"
        check_destinations("in.jsonl", good, None)
        for name, reason in (
            (f"s3://no-such-bucket-{os.getpid()}/out", "no such bucket"),
            ("s3://bucket", "names no object"),
            ("s3://bucket/folder/", "names no object"),
            (f"http://127.0.0.1:{free_port()}/out?signature=secret", "Connection refused"),
            ("http://no-such-host.invalid/out?signature=secret", "cannot be reached"),
            (str(tmp_path / "missing" / "out"), "there is no directory"),
            (str(tmp_path), "is a directory"),
        ):
            with pytest.raises(DestinationError, match=reason) as caught:
                check_destinations("in.jsonl", name, s3_endpoint=moto.endpoint)
            assert "secret" not in str(caught.value)
        assert server.seen == []


def test_looking_at_a_bucket_leaves_nothing_in_it(moto: ObjectServer) -> None:
    bucket = moto.new_bucket()
    check_destinations("in.jsonl", f"s3://{bucket}/out", s3_endpoint=moto.endpoint)

    assert "Contents" not in moto.client.list_objects_v2(Bucket=bucket)
    assert "Uploads" not in moto.client.list_multipart_uploads(Bucket=bucket)


def test_the_same_place_twice_is_refused() -> None:
    for one, other, what in (
        ("s3://b/in.jsonl", "s3://b/in.jsonl", "is the input"),
        ("https://h/in?sig=secret", "https://h/in?sig=secret", "is the input"),
    ):
        with pytest.raises(DestinationError, match=what) as caught:
            check_destinations(one, other)
        assert "secret" not in str(caught.value)
