"""What the import linter cannot see: vLLM is reached by its adapter alone, boto3 and OpenTelemetry by a module each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "producer", "workers")


@pytest.mark.parametrize(
    ("package", "home"),
    [
        ("vllm", r"workers/engine/vllm\w*\.py"),
        ("boto3", r"common/s3\.py"),
        ("opentelemetry", r"common/tracing\.py"),
    ],
    ids=["vllm", "boto3", "opentelemetry"],
)
def test_a_heavy_package_is_named_at_home_alone(package: str, home: str) -> None:
    """Neither `import vllm` nor `import_module("vllm…")` stands anywhere else."""
    reaches = re.compile(rf"""^\s*(?:import|from) {package}\b|import_module\(\s*["']{package}\b""", re.MULTILINE)
    found = [
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
        if reaches.search(path.read_text(encoding="utf-8"))
    ]

    assert [path for path in found if not re.fullmatch(home, path)] == []


def test_boto3_is_imported_only_where_s3_is_used() -> None:
    """It takes a quarter of a second, and memory in every worker."""
    modules = "producer.cli, workers.cli, workers.aggregate, workers.watchdog, common.store"
    program = f"import sys, {modules}; sys.exit('boto3' in sys.modules)"

    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
