"""Write docs/settings.md from the settings classes; `tests/unit/test_settings_page.py` holds that it is true.

    python docs/make_settings.py

The meaning of a setting is the `#:` comment above its field, so that it is written once, beside the code.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

PAGE = Path(__file__).parent / "settings.md"

HEAD = """\
# Settings

Environment variables, read once at start; options of the command line win over them.
An empty variable counts as one that is not set.
This page is made from the settings classes by `python docs/make_settings.py`.
"""

WORKER_TEXT = """\
Also read by `celery -A workers worker`, and by Flower, which loads the same app: `worker flower` refuses a bad one.
Flower uses `FLEET_BROKER_URL`, `FLEET_LEASE_S`, and while it sees no worker `FLEET_QUEUE`, which it shows as theirs.\
"""

TITLES = {
    "FleetSettings": ("Every process", "Producers, workers and aggregators must agree on them."),
    "WorkerSettings": ("Worker and aggregator", WORKER_TEXT),
    "ExporterSettings": (
        "Exporter",
        "Of the others it uses `FLEET_BROKER_URL`, `FLEET_LEASE_S`, `FLEET_ROUTES` and `FLEET_LOG_FORMAT`.",
    ),
}

#: How limits are said: pydantic's name for one, and ours.
LIMITS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(kind) for kind in _kinds())


def _kinds() -> Iterator[type[settings.FleetSettings]]:
    for value in vars(settings).values():
        if inspect.isclass(value) and issubclass(value, settings.FleetSettings):
            yield value


def _section(kind: type[settings.FleetSettings]) -> str:
    title, text = TITLES.get(kind.__name__, (kind.__name__.removesuffix("Settings"), ""))
    meanings = _meanings(kind)
    rows = [f"| {_row(name, field, meanings[name])} |" for name, field in kind.model_fields.items() if name in meanings]
    told = f"{text}\n\n" if text else ""
    return "\n".join(
        [f"\n## {title}\n", f"{told}| variable | default | limits | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )


def _row(name: str, field: FieldInfo, meaning: str) -> str:
    if not meaning:
        raise SystemExit(f"{name} has no meaning: write a #: comment above it")
    default = f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"
    return " | ".join([f"`FLEET_{name.upper()}`", default if field.default != "" else "none", _limits(field), meaning])


def _limits(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    if isinstance(field.json_schema_extra, dict) and "limits" in field.json_schema_extra:
        return str(field.json_schema_extra["limits"])  # of a validator, which cannot be read from the field
    said = [
        text.format(f"{getattr(limit, name):g}")
        for limit in field.metadata
        for name, text in LIMITS.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join(said)


def _meanings(kind: type[settings.FleetSettings]) -> dict[str, str]:
    """The fields that a class adds, with the `#:` comment above each."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id in kind.model_fields
        ):
            above: list[str] = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#:"):
                    break
                above.insert(0, line.strip().removeprefix("#:").strip())
            found[node.target.id] = " ".join(above).replace("|", "\\|")
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
