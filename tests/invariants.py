"""What must hold for every output, whatever happened to the fleet: the oracle of integration and chaos tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from common.batch import BOM, JSON_SPACE
from tests.rows import parse_row
from workers.engine.echo import echo_answer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: What a row must be: a success, a failure, or either.
Wanted = Literal["ok", "err", "any"]


def chat_line(custom_id: str, text: str, *, model: str | None = "test-model", **body: Any) -> str:
    """One input line, without its LF."""
    named = {} if model is None else {"model": model}
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**named, "messages": [{"role": "user", "content": text}], **body},
    }
    return json.dumps(request, ensure_ascii=False)


def embedding_line(custom_id: str, text: str, *, model: str = "test-model", **body: Any) -> str:
    """One input line of an embedding, without its LF."""
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": model, "input": text, **body},
    }
    return json.dumps(request, ensure_ascii=False)


def chat_lines(count: int, **body: Any) -> list[str]:
    """Input lines `c00000` …, each with a text of its own."""
    return [chat_line(f"c{number:05d}", f"text number {number}", **body) for number in range(count)]


def input_lines(path: Path) -> list[str]:
    """The non-blank lines of an input file."""
    raw = path.read_bytes().removeprefix(BOM)
    return [line.strip(JSON_SPACE).decode("utf-8") for line in raw.split(b"\n") if line.strip(JSON_SPACE)]


def rows_of(output: bytes) -> list[dict[str, Any]]:
    """The rows of an output: whole lines that end in LF, each one strict JSON object in UTF-8."""
    assert not output or output.endswith(b"\n"), "the last row has no LF"
    assert b"\r" not in output
    return [parse_row(line) for line in output.split(b"\n")[:-1]]


def is_failed(row: dict[str, Any]) -> bool:
    """Whether a row is a failed one. A row must say the same in `error` and in `status_code`."""
    assert list(row) == ["id", "custom_id", "response", "error"]
    if row["error"] is None:
        assert row["response"]["status_code"] == 200
        return False
    assert row["error"]["code"]
    assert row["error"]["message"]
    if row["response"] is not None:
        assert row["response"]["status_code"] >= 400
        assert set(row["response"]["body"]["error"]) == {"message", "type", "param", "code"}
    return True


def assert_prefix(lines: list[str], output: bytes) -> int:
    """The output holds whole rows of the first input lines, in order; returns how many."""
    rows = rows_of(output)
    ids = [json.loads(line)["custom_id"] for line in lines[: len(rows)]]
    assert [row["custom_id"] for row in rows] == ids
    return len(rows)


def assert_complete(
    lines: list[str], output: bytes, wanted: Mapping[str, Wanted] | None = None
) -> list[dict[str, Any]]:
    """Every input line has exactly one row, in order, and each that succeeded holds echo's answer to that very line.

    `wanted` says what rows must be, by `custom_id`; "ok" where it says nothing. Returns the rows.
    """
    assert assert_prefix(lines, output) == len(lines)
    rows = rows_of(output)
    assert len({row["id"] for row in rows}) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        want = (wanted or {}).get(row["custom_id"], "ok")
        failed = is_failed(row)
        assert want == "any" or failed == (want == "err"), row
        if not failed:
            assert_answer(line, row)
    return rows


def assert_answer(line: str, row: dict[str, Any]) -> None:
    """The row holds echo's answer to this line."""
    assert row["id"].startswith("echo-")
    request = json.loads(line)
    if request["url"] == "/v1/chat/completions":
        texts = [choice["message"]["content"] for choice in row["response"]["body"]["choices"]]
        assert texts == [echo_answer(line)] * (request["body"].get("n") or 1)
