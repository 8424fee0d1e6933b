"""Comparing result rows that two runs of the same requests made."""

from __future__ import annotations

import json
from typing import Any


def same_row(a: bytes, b: bytes) -> bool:
    """Whether two result rows are the same answer: equal in content and key order, but for ids and times.

    Ignored are `id`, `response.request_id`, `response.body.id` and `response.body.created`.
    Raises `ValueError` for a row that is not strict JSON.
    """
    return _answer(a) == _answer(b)


def _answer(row: bytes) -> str:
    value = parse_row(row)
    value["id"] = None
    response = value.get("response")
    if isinstance(response, dict):
        response["request_id"] = None
        body = response.get("body")
        if isinstance(body, dict):
            body.update({key: None for key in ("id", "created") if key in body})
    return json.dumps(value)


def parse_row(row: bytes) -> dict[str, Any]:
    """Read one row. Raises `ValueError` when it is not one strict JSON object in UTF-8."""
    value = json.loads(row.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError("a row is a JSON object")  # noqa: TRY004 - of a value, not of an argument
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")
