"""The list of modules in CONTRIBUTING.md is the tree."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parents[2]


def test_every_module_and_its_one_idea_is_listed() -> None:
    page = (TOP / "CONTRIBUTING.md").read_text()
    listed = re.findall(r"^\| `(\w+/[\w/]*\.py)` \| .+ \|$", page, re.MULTILINE)
    there = {
        str(path.relative_to(TOP))
        for package in ("common", "producer", "workers")
        for path in (TOP / package).rglob("*.py")
        if path.name != "__init__.py" or path.parent.name == "engine"
    }

    assert sorted(listed) == sorted(there)
