"""Comparing result rows that two runs of the same requests made."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any


def same_row(a: bytes, b: bytes, *, tolerance: float = 0.0) -> bool:
    """Whether two result rows are the same answer: equal in content and key order, but for ids and times.

    With a tolerance its numbers may differ by that much, also those of a vector in base64: what a model computes beside
    other requests differs in the last bits.

    Ignored are `id`, `response.request_id`, `response.body.id`, `response.body.created`, and the ids of tool calls.
    Raises `ValueError` for a row that is not strict JSON.
    """
    one, other = _answer(a), _answer(b)
    return one == other or (tolerance > 0 and _alike(json.loads(one), json.loads(other), tolerance))


def _alike(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(
            _alike(_vector(k, one[k]), _vector(k, other[k]), tolerance) for k in one
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(*pair, tolerance) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0, abs_tol=tolerance)
    return type(one) is type(other) and bool(one == other)


def _vector(key: str, value: Any) -> Any:
    if key != "embedding" or not isinstance(value, str):
        return value
    raw = base64.b64decode(value)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _answer(row: bytes) -> str:
    value = parse_row(row)
    value["id"] = None
    response = value.get("response")
    if isinstance(response, dict):
        response["request_id"] = None
        body = response.get("body")
        if isinstance(body, dict):
            body.update({key: None for key in ("id", "created") if key in body})
            for choice in body.get("choices") or []:
                for call in choice.get("message", {}).get("tool_calls") or []:
                    call["id"] = None
    return json.dumps(value)


def parse_row(row: bytes) -> dict[str, Any]:
    """Read one row. Raises `ValueError` when it is not one strict JSON object in UTF-8."""
    value = json.loads(row.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError("a row is a JSON object")  # noqa: TRY004 - of a value, not of an argument
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")
