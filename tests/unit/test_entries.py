"""The commands' entries: Ctrl-C while the commands' modules are being imported, and closed standard streams."""

from __future__ import annotations

import os
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


#: What the command has for stdout and stderr once its own module is imported, into the file that is its argument.
REPORTED_STREAMS = """
import os, subprocess, sys
class Reporting:
    def find_spec(self, name, path=None, target=None):
        if name == "common.errors":
            print("out", "\\udc80"), print("err", file=sys.stderr, flush=True)
            numbers = sys.stdout.fileno(), sys.stderr.fileno()
            null = os.path.samestat(os.fstat(2), os.stat(os.devnull))
            look = "import sys; sys.exit(sys.stdout is None or sys.stderr is None)"
            child = subprocess.run([sys.executable, "-c", look])
            with open(sys.argv[1], "w") as report:
                print(numbers, null, child.returncode, file=report, end="")
            os._exit(0)
sys.meta_path.insert(0, Reporting())
from {module} import main
main()
"""


@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
@pytest.mark.parametrize("package", ["producer", "workers"])
def test_a_closed_stdout_or_stderr_is_dev_null_for_all_that_follows(package: str, closed: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    script = REPORTED_STREAMS.format(module=f"{package}.__main__")

    subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, script, str(report)],
        cwd=ROOT, env={**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"},
        capture_output=True, timeout=30, check=True,
    )  # fmt: skip

    assert report.read_text() == "(1, 2) True 0"
