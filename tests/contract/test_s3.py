"""What S3 asks beyond the stores' contract: large objects, broken connections, refusals, stores that ignore headers."""

from __future__ import annotations

import io
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from common.errors import ObjectMissingError, StoreUnavailableError, UsageError
from common.s3 import S3Bucket, split_uri
from common.s3store import S3Store
from common.store import open_store, store_id
from tests.certificates import server_context
from tests.netfaults import CuttingProxy
from tests.servers import free_port, wait_until
from tests.webserver import Exchange, RawServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.objectstores import ObjectServer

MIB = 1024 * 1024

pytestmark = pytest.mark.usefixtures("s3_environment")


@pytest.fixture(params=["moto", "rclone"])
def server(request: pytest.FixtureRequest) -> ObjectServer:
    started: ObjectServer = request.getfixturevalue(request.param)
    return started


@pytest.fixture
def proxy(server: ObjectServer) -> Iterator[CuttingProxy]:
    with CuttingProxy(int(server.endpoint.rpartition(":")[2])) as started:
        yield started


def through(proxy: CuttingProxy, bucket: str, **options: object) -> S3Bucket:
    return S3Bucket(bucket, f"http://127.0.0.1:{proxy.port}", probe_key="probe", **options)  # type: ignore[arg-type]


def write(store: S3Store, name: str, data: bytes, *, replace: bool = False) -> bool:
    with store.writing(name, replace=replace) as out:
        out.write(data)
    return out.created


# -- large objects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1_000_000, 5 * MIB, 12_000_000], ids=["empty", "1 MB", "5 MiB", "12 MB"])
def test_O01_an_object_of_any_size_is_stored_whole(server: ObjectServer, size: int) -> None:
    """O01: parts under 5 MiB are refused at completion. Parts of 5 MiB here, so 12 MB are three and 5 MiB is one."""
    bucket, data = server.new_bucket(), os.urandom(size)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        assert S3Bucket(bucket, server.endpoint, part_bytes=5 * MIB).put("large", file)

    assert server.bytes_of(bucket, "large") == data
    assert S3Bucket(bucket, server.endpoint).open("large").read() == data


def test_a_large_object_is_created_once_too(moto: ObjectServer) -> None:
    bucket = S3Bucket(moto.new_bucket(), moto.endpoint, probe_key="probe", part_bytes=5 * MIB)
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        one.write(b"1" * 6 * MIB)
        other.write(b"2" * 6 * MIB)
        assert bucket.put("large", one, only_new=True)
        assert not bucket.put("large", other, only_new=True)

    assert moto.bytes_of(bucket.bucket, "large") == b"1" * 6 * MIB
    assert "Uploads" not in moto.client.list_multipart_uploads(Bucket=bucket.bucket)


def test_an_upload_that_fails_leaves_no_parts(moto: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that nobody completes cost money for ever."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    bucket = moto.new_bucket()
    with CuttingProxy(int(moto.endpoint.rpartition(":")[2])) as proxy, tempfile.TemporaryFile() as file:
        file.write(b"x" * 11 * MIB)
        proxy.cut_next(10**9, 0)  # the first connection begins the upload; another one is cut while it sends a part
        with pytest.raises(StoreUnavailableError):
            through(proxy, bucket, part_bytes=5 * MIB).put("large", file)
        assert proxy.cut == 1

    assert "Uploads" not in moto.client.list_multipart_uploads(Bucket=bucket)


def test_a_folder_of_more_than_a_page_is_listed_and_removed_whole(rclone: ObjectServer) -> None:
    """S3 lists and deletes a thousand keys at once."""
    bucket = rclone.new_bucket()
    folder = rclone.folder / "data" / bucket / "p" / "f"
    folder.mkdir(parents=True)
    for number in range(1005):
        (folder / str(number)).write_bytes(b"")
    store = S3Store(bucket, "p", rclone.endpoint)
    write(store, "other/kept", b"")

    assert len(rclone.client.list_objects_v2(Bucket=bucket, Prefix="p/f/")["Contents"]) == 1000
    assert {int(name) for name in store.names("f")} == set(range(1005))
    store.remove("f")
    assert list(store.names("f")) == []
    assert store.exists("other/kept")


def test_removing_a_folder_keeps_what_only_begins_like_it(server: ObjectServer) -> None:
    store = S3Store(server.new_bucket(), "p", server.endpoint)
    for name in ("f/a", "f/g/b", "fa"):
        write(store, name, b"")

    store.remove("f")
    store.remove("never-there")

    assert store.exists("fa")
    assert not store.exists("f/a")
    assert not store.exists("f/g/b")


# -- broken connections ------------------------------------------------------------------------------------------------


def test_a_read_goes_on_where_the_connection_broke(server: ObjectServer, proxy: CuttingProxy) -> None:
    bucket, data = server.new_bucket(), os.urandom(8 * MIB)
    server.client.put_object(Bucket=bucket, Key="k", Body=data)
    proxy.cut_next(3 * MIB, 2 * MIB)

    with through(proxy, bucket).open("k") as stream:
        assert stream.read() == data
    assert proxy.cut == 2


def ignoring_ranges(data: bytes, length: int | None = None) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(200, 'ETag: "one"', body=data, length=length)


def test_a_store_that_ignores_ranges_gives_the_right_bytes_all_the_same() -> None:
    data = os.urandom(2 * MIB)
    with RawServer(ignoring_ranges(data[:MIB], len(data)), ignoring_ranges(data)) as server:
        assert S3Bucket("b", server.url).open("k").read() == data
    assert "range" in server.seen[1].headers

    with RawServer(ignoring_ranges(data)) as server:
        assert S3Bucket("b", server.url).read_range("k", MIB, 10) == data[MIB : MIB + 10]
        with pytest.raises(StoreUnavailableError):
            S3Bucket("b", server.url).read_range("k", 3 * MIB, 10)


def test_a_stream_goes_back_to_its_beginning(server: ObjectServer) -> None:
    bucket, data = server.new_bucket(), os.urandom(3 * MIB)
    server.client.put_object(Bucket=bucket, Key="k", Body=data)

    with S3Bucket(bucket, server.endpoint).open("k") as stream:
        assert stream.read() == data
        stream.seek(0)
        assert stream.read(10) == data[:10]
        stream.seek(-10, os.SEEK_END)
        assert stream.read() == data[-10:]


def test_an_object_that_was_replaced_is_not_mixed_with_the_old_one(server: ObjectServer, proxy: CuttingProxy) -> None:
    bucket = server.new_bucket()
    server.client.put_object(Bucket=bucket, Key="k", Body=b"a" * 8 * MIB)
    proxy.cut_next(3 * MIB)

    with through(proxy, bucket).open("k") as stream:
        stream.read(100)
        server.client.put_object(Bucket=bucket, Key="k", Body=b"b" * 8 * MIB)
        with pytest.raises(StoreUnavailableError, match="was replaced while it was read"):
            stream.read()


def test_a_creation_whose_answer_was_lost_is_still_ours(moto: ObjectServer) -> None:
    """The repeated request finds our own object: taking it for another's would leave nobody to announce the part."""
    bucket = moto.new_bucket()
    with CuttingProxy(int(moto.endpoint.rpartition(":")[2])) as proxy:
        ours = through(proxy, bucket)
        assert ours.conditional
        ours._client.close()  # the next request opens a connection
        proxy.cut_next(0)

        assert ours.put("k", io.BytesIO(b"x"), only_new=True)
        assert proxy.cut == 1
    assert moto.bytes_of(bucket, "k") == b"x"


# -- outages and refusals ----------------------------------------------------------------------------------------------


def test_a_bucket_that_is_gone_is_an_outage_and_no_absence(server: ObjectServer) -> None:
    bucket = server.new_bucket()
    store = S3Store(bucket, "p", server.endpoint)
    write(store, "f/a", b"x")
    store.remove("f")
    for key in list(S3Bucket(bucket, server.endpoint).keys("")):
        server.client.delete_object(Bucket=bucket, Key=key)
    server.client.delete_bucket(Bucket=bucket)

    for asking in (
        lambda: store.read("f/a"),
        lambda: store.open("f/a"),
        lambda: store.exists("f/a"),
        lambda: list(store.names("f")),
        lambda: write(store, "f/a", b"y"),
        lambda: S3Store(bucket, "p", server.endpoint),
    ):
        with pytest.raises(StoreUnavailableError, match="no such bucket"):
            asking()


def test_a_server_that_is_away_is_an_outage(moto: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    away = S3Bucket("bucket", f"http://127.0.0.1:{free_port()}", probe_key="probe")

    for asking in (
        lambda: away.open("k"),
        lambda: away.exists("k"),
        lambda: list(away.keys("")),
        lambda: away.remove(""),
        lambda: away.put("k", io.BytesIO()),
        lambda: away.put("k", io.BytesIO(), only_new=True),
        lambda: away.check_writable("k"),
    ):
        with pytest.raises(StoreUnavailableError) as caught:
            asking()
        assert not isinstance(caught.value, ObjectMissingError)


def test_wrong_or_missing_credentials_are_said_and_not_shown(
    rclone: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = rclone.new_bucket()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(StoreUnavailableError) as caught:
        S3Store(bucket, "p", rclone.endpoint)
    assert "S3 refused s3://" in str(caught.value)
    assert "wrong-secret" not in str(caught.value)

    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreUnavailableError, match="no credentials"):
        S3Store(bucket, "p", rclone.endpoint)


def test_who_only_looks_finds_a_mistyped_prefix(server: ObjectServer) -> None:
    bucket = server.new_bucket()
    with pytest.raises(StoreUnavailableError, match=r"nothing in s3://.*/typo"):
        open_store(f"s3://{bucket}/typo", create=False, s3_endpoint=server.endpoint)

    store_id(open_store(f"s3://{bucket}/right", s3_endpoint=server.endpoint))
    assert open_store(f"s3://{bucket}/right/", create=False, s3_endpoint=server.endpoint).uri == f"s3://{bucket}/right"


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///k", "s3:bucket/k", "s3://user:secret@bucket/k", "s3://b?x/k", "s3://b"]
)
def test_what_names_no_bucket_is_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="must be s3://") as caught:
        split_uri(uri, "the output")
    assert "secret" not in str(caught.value)


def test_a_bad_endpoint_is_refused() -> None:
    with pytest.raises(UsageError, match="FLEET_S3_ENDPOINT"):
        S3Bucket("bucket", "no url")


# -- stores that ignore headers ----------------------------------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_found_out(moto: ObjectServer, rclone: ObjectServer) -> None:
    for server, sound in ((moto, True), (rclone, False)):
        store = S3Store(server.new_bucket(), "p", server.endpoint)
        assert (store.set_up_warnings() == []) is sound
        assert list(store.names("batches")) == []
    assert "If-None-Match" in store.set_up_warnings()[0]


class _RawStore(ThreadingHTTPServer):
    """Stores bodies as they come, chunk framing and all; or refuses what is not a plain body."""

    def __init__(self, *, strict: bool) -> None:
        super().__init__(("127.0.0.1", 0), _RawHandler)
        self.strict = strict
        self.objects: dict[str, bytes] = {}


class _RawHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _RawStore

    def do_PUT(self) -> None:
        encoded = "aws-chunked" in self.headers.get("Content-Encoding", "") or "x-amz-trailer" in self.headers
        body = b"".join(self.pieces())
        if self.server.strict and encoded:
            self.send_response(501)
        else:
            self.server.objects[self.path] = body
            self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def pieces(self) -> Iterator[bytes]:
        if "Transfer-Encoding" not in self.headers:
            yield self.rfile.read(int(self.headers["Content-Length"]))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("strict", [True, False], ids=["refuses", "stores raw"])
def test_O02_no_checksum_trailer_reaches_a_compatible_store(
    strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O02: boto3's default checksums break compatible stores, or end up in the object. boto3's own switch brings
    them back, and shows the harm. Over TLS, since only there boto3 puts a checksum behind the body."""
    context, trusted = server_context(tmp_path)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
    with _RawStore(strict=strict) as store:
        store.socket = context.wrap_socket(store.socket, server_side=True)
        thread = threading.Thread(target=store.serve_forever, args=(0.01,))
        thread.start()
        try:
            endpoint = f"https://127.0.0.1:{store.server_address[1]}"
            S3Bucket("b", endpoint).put("k", io.BytesIO(b"row\n" * 1000))
            assert store.objects == {"/b/k": b"row\n" * 1000}

            monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
            if strict:
                with pytest.raises(StoreUnavailableError):
                    S3Bucket("b", endpoint).put("k", io.BytesIO(b"row\n" * 1000))
            else:
                S3Bucket("b", endpoint).put("k", io.BytesIO(b"row\n" * 1000))
                assert store.objects["/b/k"] != b"row\n" * 1000
        finally:
            store.shutdown()
            thread.join()
    wait_until(lambda: not thread.is_alive(), 5, "the store ended")
