"""What the import linter cannot see: vLLM and boto3 are reached through one module each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "producer", "workers")


@pytest.mark.parametrize(
    ("package", "home"), [("vllm", "workers/engine/vllm.py"), ("boto3", "common/store.py")], ids=["vllm", "boto3"]
)
def test_a_heavy_package_is_named_in_one_module_alone(package: str, home: str) -> None:
    """Neither `import vllm` nor `import_module("vllm…")` stands anywhere else."""
    reaches = re.compile(rf"""^\s*(?:import|from) {package}\b|import_module\(\s*["']{package}\b""", re.MULTILINE)
    found = [
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if reaches.search(path.read_text(encoding="utf-8"))
    ]

    assert set(found) <= {home}
