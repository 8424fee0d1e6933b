"""The index of replay cases and the crash table name tests that exist, and these say which case they are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "tests/cases/README.md").read_text(encoding="utf-8")
CRASHES = (ROOT / "docs/crash-table.md").read_text(encoding="utf-8")

#: A row of the index that names tests: its id, and the tests.
ROWS = {
    row[1].strip(): re.findall(r"`(tests/\S+?\.py)::(test_\w+)`", line)
    for line in INDEX.splitlines()
    if (row := line.split("|")) and "`tests/" in line and len(row) > 2
}

#: What must be replayed.
WANTED = set(
    re.findall(
        r"\w+", "E01 E02 E03 E06 C01 C02 C03 C04 C06 C08 C09 C10 C12 C18 C19 C23 O01 O02 O03 O05 O07 O09 O11 A03"
    )
)


@cache
def docstrings(path: str) -> dict[str, str]:
    """The tests of a file and what they say."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_wanted_case_is_in_the_index() -> None:
    assert set(ROWS) >= WANTED


@pytest.mark.parametrize("case", ROWS)
def test_the_tests_of_a_case_exist_and_name_it(case: str) -> None:
    assert ROWS[case]
    for path, name in ROWS[case]:
        assert re.search(rf"\b{case}\b", docstrings(path)[name]), f"{path}::{name} does not say that it replays {case}"


def test_the_crash_table_names_tests_that_exist() -> None:
    known = {name for path in (ROOT / "tests").rglob("test_*.py") for name in docstrings(str(path.relative_to(ROOT)))}
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}

    named = set(re.findall(r"\b(test_\w+)", CRASHES))

    assert len(named) > 20
    assert named <= known | files
