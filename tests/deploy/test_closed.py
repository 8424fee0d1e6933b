"""Nothing that we ship or write down opens Redis or Flower to others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.deploy.conftest import TOP

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [TOP / "README.md", TOP / "SECURITY.md", *sorted((TOP / "docs").rglob("*.md"))]
SHIPPED = [
    TOP / "docker-compose.yml",
    *(path for path in sorted((TOP / "deploy").rglob("*")) if path.suffix in (".yaml", ".yml", ".service", ".sh")),
]


def name(path: Path) -> str:
    return str(path.relative_to(TOP))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_documented_commands_start_flower_closed(page: Path) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if "worker flower" in line or " workers flower" in line:
                assert "FLOWER_BASIC_AUTH=" in line, line
                assert "0.0.0.0" not in line, line
            if " workers flower" in line:
                assert {"--address=127.0.0.1", "--read_only=true"} <= set(line.split()), line


@pytest.mark.parametrize("path", [*SHIPPED, *PAGES], ids=name)
def test_nobody_is_let_in_without_a_password(path: Path) -> None:
    text = path.read_text()

    for bad in ("protected-mode no", "nopass", "FLOWER_UNAUTHENTICATED_API", "FLOWER_READ_ONLY=false", "6379:6379"):
        assert bad not in text, bad


def test_redis_is_shipped_closed() -> None:
    conf = (TOP / "deploy/redis/redis.conf").read_text().splitlines()
    users = (TOP / "deploy/redis/users.acl").read_text().splitlines()

    assert "protected-mode yes" in conf
    assert "maxmemory-policy noeviction" in conf
    assert users[0] == "user default off resetpass resetkeys resetchannels -@all"
    for user in users[1:]:
        assert re.match(r"user \w+ on #[A-Z]+_PASSWORD resetkeys resetchannels ", user), user
        assert not {"+@all", "~*", "allkeys", "allcommands", "&*", "allchannels"} & set(user.split()), user
