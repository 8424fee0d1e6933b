"""A Redis that is started as we ship it: by deploy/redis/start.sh, with its users, and on TLS if wanted."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import redis

from tests.deploy.conftest import TOP
from tests.servers import START_S, Process, free_port, server_binary, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

PASSWORDS = {name: f"{name}pass" for name in ("fleet", "scaler", "exporter", "flower")}


class SecureRedis:
    """The server, and URLs for its users. Ends with the `with` block."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        tls_port: int = 0,
        environment: Mapping[str, str] | None = None,
        binary: str | None = None,
    ) -> None:
        binary = binary or server_binary()
        assert binary is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.port = tls_port or free_port()
        self._tls = bool(tls_port)
        given = {f"REDIS_{name.upper()}_PASSWORD": password for name, password in PASSWORDS.items()}
        where = ["--dir", str(folder), "--bind", "127.0.0.1", "--port", "0" if tls_port else str(self.port)]
        self.process = Process(
            "redis",
            ["sh", str(TOP / "deploy/redis/start.sh"), *where, *options],
            folder,
            {
                "PATH": os.environ.get("PATH", os.defpath),
                "REDIS_SERVER": binary,
                "REDIS_RUN": str(folder / "run"),
                "REDIS_MAXMEMORY": "1gb",
                **given,
                **(environment or {}),
            },
        )

    def url(self, user: str, *, options: str = "") -> str:
        """The broker URL of a user."""
        scheme = "rediss" if self._tls else "redis"
        return f"{scheme}://{user}:{PASSWORDS[user]}@127.0.0.1:{self.port}/0{options}"

    def client(self, user: str, *, options: str = "") -> Any:
        """A client of a user; Any, since tests send it commands of all sorts."""
        return redis.Redis.from_url(self.url(user, options=options), socket_timeout=10)

    def wait_until_ready(self, *, options: str = "") -> None:
        """Return when the server answers, or fail with what it said."""

        def answers() -> bool:
            if not self.process.running:
                raise AssertionError(f"Redis ended: {self.process.stdout.decode('utf-8', 'replace')[-2000:]}")
            with suppress(redis.ConnectionError), self.client("fleet", options=options) as client:
                return bool(client.ping())
            return False

        wait_until(answers, START_S, "Redis answers")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
