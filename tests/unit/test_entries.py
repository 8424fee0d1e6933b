"""The commands' entries: Ctrl-C before anything is there to end, while the commands' modules are being imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: SIGINT arrives at the moment in which `common.errors`, which both commands need, is imported.
INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "common.errors":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from {module} import main
main()
"""


def interrupted(module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT.format(module=module), "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("package", ["producer", "workers"])
def test_ctrl_c_while_a_command_is_imported_is_quiet(package: str) -> None:
    done = interrupted(f"{package}.__main__")

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("package", ["producer", "workers"])
def test_without_the_entry_it_is_a_traceback(package: str) -> None:
    """The safeguard off: the command's own module, as an entry."""
    done = interrupted(f"{package}.cli")

    assert done.returncode != 130
    assert "KeyboardInterrupt" in done.stderr
