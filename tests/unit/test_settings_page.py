"""docs/settings.md says what the settings classes say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from common.settings import ExporterSettings, FleetSettings, WorkerSettings

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_classes_say() -> None:
    made = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()

    assert (DOCS / "settings.md").read_text("utf-8") == made, "run: python docs/make_settings.py"


@pytest.mark.parametrize("kind", [FleetSettings, WorkerSettings, ExporterSettings])
def test_the_readme_names_every_variable(kind: type[FleetSettings]) -> None:
    readme = (DOCS.parent / "README.md").read_text("utf-8")

    assert [name for name in kind.model_fields if f"`FLEET_{name.upper()}`" not in readme] == []
