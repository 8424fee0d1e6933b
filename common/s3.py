"""S3 and what is compatible with it: the objects of a bucket.

Owns: everything that is known about boto3, and is the only module that imports it.
Must not know: stores, what the objects mean.
On failure: as `common.store` says. A missing key is absence; a missing bucket, a refusal and everything else is an
outage. Reads go on where a connection broke; a changed object is an outage, never a mixture.

Objects are collected in a temporary file on this machine and uploaded whole, the large ones in parts, so memory stays
flat and nothing is visible before it is complete. Creation without replacing is `If-None-Match: *`. Some compatible
stores ignore that header in silence; a probe finds it out, and creators then look first, one at a time. That is sound
within one process and leaves a gap between several: see docs/decisions.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from common.errors import ObjectMissingError, StoreUnavailableError, UsageError
from common.streams import Body, ResumingStream, buffered

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Size of the parts of a large upload, and of the largest object that is uploaded in one piece. S3's limits: parts of
#: 5 MiB to 5 GiB, all but the last; at most 10,000 of them.
PART_BYTES = 64 * 1024 * 1024
MAX_PARTS = 10_000
#: Parts that travel at once.
PARALLEL = 4
#: Keys that one request deletes (S3's limit).
_DELETE_AT_ONCE = 1000
#: Times that a creation is tried again which collided with another one.
_COLLISIONS = 5

_MISSING = frozenset({"NoSuchKey", "404"})
_EXISTS = frozenset({"PreconditionFailed", "412"})
_COLLIDED = frozenset({"ConditionalRequestConflict", "409"})
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def split_uri(uri: str, what: str) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key`; `what` is named in the refusal. Raises `UsageError`."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme.lower() != "s3" or _BUCKET.fullmatch(bucket) is None:
        raise UsageError(f"{what} must be s3://bucket/key")
    if len(key.encode("utf-8", "surrogateescape")) > 1024 or "\0" in key:
        raise UsageError(f"{what}: a key has at most 1024 bytes and no NUL")
    return bucket, key


def _client(endpoint: str) -> Any:
    """A client; safe to use from several threads, not across a fork. Credentials are found by boto3's own rules."""
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    session = boto3.session.Session()
    options: dict[str, Any] = {}
    if endpoint:
        # Since 1.36 boto3 sends checksums in trailers that compatible stores refuse, or store with the object
        # (boto3 #4398, #4435). boto3's own variables stay the way to ask for them.
        for name in ("request_checksum_calculation", "response_checksum_validation"):
            if f"AWS_{name.upper()}" not in os.environ:
                options[name] = "when_required"
        options["s3"] = {"addressing_style": "path"}
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        options["retries"] = {"mode": "standard", "max_attempts": 5}
    try:
        return session.client(
            "s3",
            endpoint_url=endpoint or None,
            region_name=session.region_name or "us-east-1",
            config=Config(connect_timeout=10, read_timeout=60, max_pool_connections=16, **options),
        )
    except (BotoCoreError, ValueError) as exc:
        raise UsageError(f"S3 cannot be set up: {type(exc).__name__}; look at FLEET_S3_ENDPOINT and AWS_*") from None


def _code(exc: ClientError) -> str:
    return str(exc.response.get("Error", {}).get("Code", ""))


def _status(exc: ClientError) -> int:
    return int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextlib.contextmanager
def _outage(what: str) -> Iterator[None]:
    """Turn boto3's exceptions into ours. Never more than a code is repeated: messages may quote signed URLs."""
    try:
        yield
    except ClientError as exc:
        if _code(exc) in _MISSING:
            raise ObjectMissingError(f"{what} is not there") from exc
        raise StoreUnavailableError(f"S3 refused {what}: {_reason(_code(exc))}") from exc
    except NoCredentialsError as exc:
        raise StoreUnavailableError(
            f"S3 refused {what}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role"
        ) from exc
    except (BotoCoreError, EOFError) as exc:
        raise StoreUnavailableError(f"S3 failed at {what}: {type(exc).__name__}") from exc


def _reason(code: str) -> str:
    said = {"NoSuchBucket": "there is no such bucket", "AccessDenied": "access denied", "403": "access denied"}
    return said.get(code, code or "no reason given")


class _Object:
    """One object as the origin of a stream: the same content for every connection, by its ETag."""

    broken: tuple[type[Exception], ...] = (BotoCoreError,)

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self._client = client
        self._where = {"Bucket": bucket, "Key": key}
        self._name = f"s3://{bucket}/{key}"
        self._etag: str | None = None
        self.size: int | None = None

    def connect(self, position: int) -> Body:
        conditions: dict[str, str] = {}
        if position:
            conditions["Range"] = f"bytes={position}-"
        if self._etag is not None:
            conditions["IfMatch"] = self._etag
        try:
            answer = self._client.get_object(**self._where, **conditions)
        except ClientError as exc:
            if _code(exc) in _EXISTS:
                raise self._changed() from exc
            with _outage(self._name):
                raise
        body = cast("Body", answer["Body"])
        if self._etag is None:
            self._etag, self.size = answer.get("ETag"), answer["ContentLength"]
        elif answer.get("ETag") != self._etag:  # a store that ignores conditions
            body.close()
            raise self._changed()
        if position and answer["ContentLength"] == self.size:  # one that ignores ranges
            _skip(body, position)
        return body

    def _changed(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"{self._name} was replaced while it was read")

    def lost(self, exc: Exception) -> Exception:
        return StoreUnavailableError(f"S3 failed at {self._name}: {type(exc).__name__}")


def _skip(body: Body, amount: int) -> None:
    while amount:
        data = body.read(min(amount, 1024 * 1024))
        if not data:
            raise EOFError
        amount -= len(data)


class _Piece:
    """A part of an open file as a body of its own: several are read at once, none is held in memory."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._size = size
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def read(self, amount: int | None = -1) -> bytes:
        left = self._size - self._at
        wanted = left if amount is None or amount < 0 else min(amount, left)
        data = os.pread(self._descriptor, wanted, self._start + self._at)
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at


class S3Bucket:
    """The objects of one bucket, by key."""

    def __init__(self, bucket: str, endpoint: str = "", *, probe_key: str = "", part_bytes: int = PART_BYTES) -> None:
        """`endpoint` is the URL of a compatible store, "" for AWS; `probe_key` is needed where objects are created."""
        self.bucket = bucket
        self._probe_key = probe_key
        self._client = _client(endpoint)
        self._part_bytes = part_bytes
        self._creating = threading.Lock()

    def uri(self, key: str) -> str:
        """The object's name for people."""
        return f"s3://{self.bucket}/{key}"

    def open(self, key: str) -> IO[bytes]:
        """The object as a stream that goes on where a connection broke. Raises `ObjectMissingError`."""
        found = _Object(self._client, self.bucket, key)
        with _outage(self.uri(key)):
            body = found.connect(0)
        return cast("IO[bytes]", buffered(ResumingStream(found, body)))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Bytes of an object, in one request. Raises `ObjectMissingError`; one that ends before is an outage."""
        with _outage(self.uri(key)):
            answer = self._client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={offset}-{offset + length - 1}")
            with contextlib.closing(answer["Body"]) as body:
                if "ContentRange" not in answer:  # one that ignores ranges
                    _skip(body, offset)
                data: bytes = body.read(length)
        if len(data) < length:
            raise StoreUnavailableError(f"{self.uri(key)} is shorter than it was")
        return data

    def exists(self, key: str) -> bool:
        """Whether the object exists. Asks by GET: to a HEAD a missing bucket and a missing key answer alike."""
        try:
            with _outage(self.uri(key)):
                answer = self._client.get_object(Bucket=self.bucket, Key=key, Range="bytes=0-0")
        except ObjectMissingError:
            return False
        except StoreUnavailableError as exc:
            cause = exc.__cause__
            if isinstance(cause, ClientError) and _status(cause) == 416:
                return True  # it is empty
            raise
        answer["Body"].close()
        return True

    def keys(self, prefix: str, *, folders: bool = False, at_most: int | None = None) -> Iterator[str]:
        """Keys that begin with `prefix`; with `folders`, what lies deeper is one key that ends in `/`."""
        options: dict[str, Any] = {"Bucket": self.bucket, "Prefix": prefix}
        if folders:
            options["Delimiter"] = "/"
        if at_most is not None:
            options["PaginationConfig"] = {"MaxItems": at_most, "PageSize": at_most}
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(**options))
        while True:
            with _outage(self.uri(prefix)):
                page = next(pages, None)
            if page is None:
                return
            yield from (each["Key"] for each in page.get("Contents", ()))
            yield from (each["Prefix"] for each in page.get("CommonPrefixes", ()))

    def remove(self, name: str) -> None:
        """Delete the key `name` and all that begin with it and a slash."""
        batch: list[dict[str, str]] = []
        for key in self.keys(name):
            if key != name and not key.startswith(f"{name}/"):
                continue
            batch.append({"Key": key})
            if len(batch) == _DELETE_AT_ONCE:
                self._delete(batch)
                batch = []
        if batch:
            self._delete(batch)

    def _delete(self, batch: list[dict[str, str]]) -> None:
        with _outage(self.uri("")):
            answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})
        for error in answer.get("Errors", ()):
            raise StoreUnavailableError(f"S3 refused to delete {self.uri(error['Key'])}: {_reason(error['Code'])}")

    def put(self, key: str, file: IO[bytes], *, only_new: bool = False) -> bool:
        """Upload a whole file, from its beginning; True when it is in place.

        With `only_new` an object that exists stays, and the answer is False.
        """
        with _outage(self.uri(key)):
            if not only_new:
                self._put(key, file, {})
                return True
            if self.conditional:
                return self._create(key, file)
            with self._creating:
                if self.exists(key):
                    return False
                self._put(key, file, {})
                return True

    def _create(self, key: str, file: IO[bytes]) -> bool:
        # An answer may get lost and the repeated request find our own object: its writer says whose it is.
        writer = uuid.uuid4().hex
        for collision in range(1, _COLLISIONS + 1):
            try:
                self._put(key, file, {"IfNoneMatch": "*"}, {"Metadata": {"writer": writer}})
            except ClientError as exc:
                if _code(exc) in _COLLIDED and collision < _COLLISIONS:
                    time.sleep(0.1 * collision)
                    continue
                if _code(exc) not in _EXISTS:
                    raise
                found = self._client.head_object(Bucket=self.bucket, Key=key)
                return bool(found.get("Metadata", {}).get("writer") == writer)
            else:
                return True
        raise AssertionError("unreachable")

    def _put(self, key: str, file: IO[bytes], conditions: dict[str, str], extra: dict[str, Any] | None = None) -> None:
        where, size = {"Bucket": self.bucket, "Key": key}, file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= self._part_bytes:
            self._client.put_object(**where, Body=file, **conditions, **(extra or {}))
            return
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))
        upload = {**where, "UploadId": self._client.create_multipart_upload(**where, **(extra or {}))["UploadId"]}

        def send(number: int) -> dict[str, Any]:
            start = (number - 1) * part_bytes
            piece = _Piece(file.fileno(), start, min(part_bytes, size - start))
            answer = self._client.upload_part(**upload, PartNumber=number, Body=piece)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="fleet-s3") as threads:
                try:
                    parts = list(threads.map(send, range(1, -(-size // part_bytes) + 1)))
                except BaseException:
                    threads.shutdown(cancel_futures=True)
                    raise
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **conditions)
        except BaseException:
            # What stays of an upload that is not aborted costs money until a lifecycle rule removes it.
            with contextlib.suppress(ClientError, BotoCoreError):
                self._client.abort_multipart_upload(**upload)
            raise

    @cached_property
    def conditional(self) -> bool:
        """Whether the store keeps to `If-None-Match: *`, asked with an object of no meaning."""
        probe = {"Bucket": self.bucket, "Key": self._probe_key, "Body": b"", "IfNoneMatch": "*"}
        with _outage(self.uri(self._probe_key)):
            for _ in range(2):
                try:
                    self._client.put_object(**probe)
                except ClientError as exc:
                    if _code(exc) in _EXISTS:
                        return True
                    if _code(exc) in _COLLIDED:  # somebody else's probe
                        return True
                    if _status(exc) == 501:  # the header is known, and refused
                        return False
                    raise
        return False

    def check_writable(self, key: str) -> None:
        """Find out whether `key` may be written, leaving nothing: a large upload is begun and given up."""
        where = {"Bucket": self.bucket, "Key": key}
        with _outage(self.uri(key)):
            upload = self._client.create_multipart_upload(**where)["UploadId"]
            self._client.abort_multipart_upload(**where, UploadId=upload)
