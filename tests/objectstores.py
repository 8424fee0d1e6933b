"""S3 servers of tests: moto's, which keeps to the rules, and rclone's, which ignores conditions.

Owns: starting them on a free port of the loopback interface, their buckets, and ending them by pid.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.servers import START_S, Process, free_port, wait_until

if TYPE_CHECKING:
    from types import TracebackType

#: What every client of these servers needs in its environment; nothing here is a secret.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-access-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-key-of-the-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def rclone_binary() -> str | None:
    """The command `rclone`, from PATH or beside the interpreter, or None."""
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


def moto_binary() -> str | None:
    """The command `moto_server`, beside the interpreter or from PATH, or None."""
    beside = Path(sys.executable).with_name("moto_server")
    return str(beside) if beside.exists() else shutil.which("moto_server")


class ObjectServer:
    """An S3 server in `folder`. `client` is a plain boto3 client of it, for what a test prepares or looks at."""

    def __init__(self, name: str, command: list[str], folder: Path, port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.endpoint = f"http://127.0.0.1:{port}"
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), **CREDENTIALS}
        self._start = lambda: Process(name, command, folder, environment)
        self._process = self._start()
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            config=Config(
                s3={"addressing_style": "path"},
                retries={"max_attempts": 0},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        wait_until(self._answers, START_S, f"{name} answers")
        self._buckets = 0

    def _answers(self) -> bool:
        assert self._process.running, self._process.stderr[-2000:]
        try:
            self.client.list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True

    def new_bucket(self) -> str:
        """A bucket of the test's own."""
        self._buckets += 1
        name = f"bucket-{self._buckets:03d}"
        self.client.create_bucket(Bucket=name)
        return name

    def bytes_of(self, bucket: str, key: str) -> bytes:
        """An object, read by a client of the test's own."""
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def kill(self) -> None:
        """End the server for now: nobody listens on its port any more."""
        self._process.kill()

    def start_again(self) -> None:
        """Start the server once more, on the same port; rclone's has kept everything in its folder."""
        self._process = self._start()
        wait_until(self._answers, START_S, "the server answers again")

    def stop(self) -> None:
        """End the server."""
        self.client.close()
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def moto(folder: Path) -> ObjectServer:
    """moto's S3 server: it refuses small parts, and keeps to conditions and ranges."""
    binary, port = moto_binary(), free_port()
    assert binary is not None
    return ObjectServer("moto", [binary, "-H", "127.0.0.1", "-p", str(port)], folder, port)


def rclone(folder: Path) -> ObjectServer:
    """rclone's S3 server over a folder: it checks signatures, and ignores `If-None-Match` and `If-Match`."""
    binary, port = rclone_binary(), free_port()
    assert binary is not None
    (folder / "data").mkdir(parents=True)
    login = f"{CREDENTIALS['AWS_ACCESS_KEY_ID']},{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}"
    command = [binary, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", login, str(folder / "data")]
    return ObjectServer("rclone", [*command, "--config", os.devnull], folder, port)
