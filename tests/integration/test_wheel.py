"""The package that users install: built from the checkout, used away from it."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-qq",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=100)
    (found,) = folder.glob("*.whl")
    return found


def test_every_module_and_the_types_marker_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("common", "producer", "workers")
        for path in [*(ROOT / package).rglob("*.py"), ROOT / package / "py.typed"]
    }

    assert wanted <= names
    assert not {name for name in names if name.startswith(("tests", "docs", "deploy"))}


def test_the_wheel_has_its_commands_and_the_engines_plugin(wheel: Path) -> None:
    """Without the plugin an engine would outlive a worker that was killed."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(name).decode())

    assert dict(entries["console_scripts"]) == {
        "producer": "producer.__main__:main",
        "worker": "workers.__main__:main",
    }
    assert dict(entries["vllm.general_plugins"]) == {"fleet": "workers.engine.tie:register"}


def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Imported from the wheel itself, ahead of the checkout that the tests' environment has installed."""
    code = "import producer, sys; from producer.cli import main; print(producer.__file__, flush=True); main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(wheel), "PATH": ""}, cwd=tmp_path, capture_output=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert str(wheel).encode() in done.stdout.splitlines()[0]
    assert b"submit" in done.stdout
