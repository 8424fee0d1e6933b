"""The replay cases of `tests/cases`: what each needs, what is right for it, and what is wrong with an output.

Owns: reading `expected.json`, the inputs that are made at run time, and the judgement. Must not know: how a fleet is
started. What is wrong is returned as sentences: `tests/cases/replay.py` prints them, tests fail with them.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.invariants import input_lines, is_failed, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.invariants import Wanted
    from tests.servers import Result

CASES = Path(__file__).parent / "cases"

#: Who answers: the echo engine, or real vLLM with a chat or an embedding model.
Target = Literal["echo", "chat", "embeddings"]

#: Cases whose fault lies in an engine need a real one.
_CHAT: tuple[Target, ...] = ("chat",)
_BOTH: tuple[Target, ...] = ("echo", "chat")
TARGETS: dict[str, tuple[Target, ...]] = {
    "I09": _BOTH,
    "I10": _BOTH,
    "I12": _BOTH,
    "I13": _BOTH,
    "I15": _CHAT,
    "I19": _CHAT,
    "I20": _CHAT,
    "I22": _CHAT,
    "I24": _CHAT,
    "I25": ("embeddings",),
    "I27": _BOTH,
    "I28": _CHAT,
    "I29": _CHAT,
    "I30": _CHAT,
    "I40": _CHAT,
    "I42": _BOTH,
}

#: Refused files, with the lines that the refusal must name and a word of the reason for each.
REFUSED = {
    "I05.jsonl": {3: "repeated"},
    "I06.jsonl": {1: "is missing"},
    "I06b.jsonl": {2: "method must be POST", 3: "url is missing"},
    "I08.jsonl": {2: "not a JSON object"},
    "I08b.jsonl": {2: "not a JSON object"},
    "I08c.jsonl": {2: "not a JSON object", 3: "body must be an object", 4: "body must be an object"},
    "I18.jsonl": {2: "not JSON"},
    "I35.jsonl": {1: "not UTF-8"},
    "I35b.jsonl": {2: "not UTF-8"},
    "I39.jsonl": {1: "not JSON"},
    "I39b.jsonl": {1: "not JSON"},
    "I39c.jsonl": {2: "not JSON"},
}

#: Files without requests.
EMPTY = ("I38.jsonl", "I38b.jsonl")

#: Files whose fleet must run in the C locale, with Python's UTF-8 mode off.
IN_C_LOCALE = ("I36.jsonl",)
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

#: Bytes of base64 in each line of I33, which would be too large to keep.
_LONG_LINES = (10, 70_000, 10, 1_000_000, 12_000_000, 10)

#: The address in I27 that stands for whatever listens on this machine.
_LISTENER = b"127.0.0.1:6379"


@dataclass(frozen=True)
class Case:
    """One file of a case and what is right for it."""

    id: str
    file: str
    policy: str
    rows: dict[str, Wanted]

    @property
    def path(self) -> Path:
        """The file, where it is kept."""
        return CASES / self.file

    @property
    def targets(self) -> tuple[Target, ...]:
        """Who must answer it."""
        return TARGETS.get(self.id, ("echo",))

    @property
    def expected(self) -> str:
        """What is right, in a few words."""
        if self.file in REFUSED:
            return f"refused, line {', '.join(map(str, REFUSED[self.file]))}"
        if not self.rows:
            return "an empty output"
        return _count(list(self.rows.values()))

    def write(self, path: Path, *, listener_port: int = 0) -> Path:
        """Write its input to `path`, with the port of a listener of the test's own in I27."""
        if self.file == "I33.jsonl":
            path.write_text("".join(f"{_long_line(k, size)}\n" for k, size in enumerate(_LONG_LINES)))
        else:
            content = self.path.read_bytes()
            path.write_bytes(content.replace(_LISTENER, b"127.0.0.1:%d" % listener_port) if listener_port else content)
        return path


def _long_line(number: int, size: int) -> str:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "describe"}, image]}]
    body = {"model": "test-model", "messages": messages, "max_tokens": 8}
    request = {"custom_id": f"ln-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request)


def _read() -> dict[str, Case]:
    expected = json.loads((CASES / "expected.json").read_bytes())
    return {
        each["file"]: Case(name, each["file"], each["policy"], dict(each["rows"]))
        for name, files in expected.items()
        for each in files
    }


#: Every case by its file.
ALL = _read()


def _count(outcomes: list[Any]) -> str:
    parts = [f"{outcomes.count(kind)} {kind}" for kind in ("ok", "err", "any") if kind in outcomes]
    return f"{len(outcomes)} rows: {', '.join(parts)}"


# -- the judgement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a case, in a few words, and what is wrong with it."""

    got: str
    problems: list[str]


def judge(case: Case, source: Path, run: Result, output: Path) -> Outcome:
    """Compare what `producer submit source -o output` did with what is right for the case."""
    if "Traceback" in run.stderr:
        return Outcome(f"exit {run.code}", ["a traceback on stderr"])
    if case.file in REFUSED:
        named = re.findall(rf"^{re.escape(str(source))}:(\d+): ", run.stderr, re.MULTILINE)
        return Outcome(f"refused, line {', '.join(named)}", refusal_problems(case, source, run))
    if run.code not in (0, 3) or not output.exists():
        return Outcome(f"exit {run.code}", [f"no output: {run.stderr.strip()[-200:]}"])
    try:
        rows = rows_of(output.read_bytes())
        outcomes = ["err" if is_failed(row) else "ok" for row in rows]
    except (AssertionError, ValueError) as exc:
        return Outcome(f"exit {run.code}", [f"the output is not rows: {exc}"])
    return Outcome(_count(outcomes) if rows else "an empty output", _row_problems(case, source, run, rows, outcomes))


def refusal_problems(case: Case, source: Path, run: Result) -> list[str]:
    """What is wrong with the refusal of a file: exit code, lines named, reasons."""
    problems = [] if run.code == 2 else [f"exit {run.code} in place of 2"]
    for number, reason in REFUSED[case.file].items():
        if not any(said.startswith(f"{source}:{number}: ") and reason in said for said in run.stderr.splitlines()):
            problems.append(f"line {number} is not refused as {reason!r}")
    problems += [f"{name} on stderr" for name in ("AttributeError", "TypeError", "KeyError") if name in run.stderr]
    return problems


def _row_problems(case: Case, source: Path, run: Result, rows: list[dict[str, Any]], outcomes: list[str]) -> list[str]:
    found = [row["custom_id"] for row in rows]
    if found != [json.loads(line)["custom_id"] for line in input_lines(source)]:
        return ["not one row for each line, in the input's order"]
    problems = [
        f"{custom_id} is {outcome} in place of {case.rows[custom_id]}"
        for custom_id, outcome in zip(found, outcomes, strict=True)
        if case.rows[custom_id] not in ("any", outcome)
    ]
    failed = outcomes.count("err")
    if run.code != (3 if failed else 0):
        problems.append(f"exit {run.code} with {failed} failed rows")
    # I29: choices are not requests.
    if rows and f"{len(rows) - failed} ok, {failed} failed" not in run.stderr:
        problems.append("the summary counts otherwise")
    by_id = {row["custom_id"]: row for row in rows}
    if not problems and case.file in _CHECKS:
        problems += _CHECKS[case.file](by_id)
    return problems


def _choices(rows: dict[str, Any]) -> list[str]:
    indexes = [choice["index"] for choice in rows["n-3"]["response"]["body"]["choices"]]
    return [] if indexes == [0, 1, 2] else [f"n-3 has the choices {indexes}"]


def _same_vector(rows: dict[str, Any]) -> list[str]:
    plain, packed = (rows[name]["response"]["body"]["data"][0]["embedding"] for name in ("em-1", "em-b64"))
    raw = base64.b64decode(packed)
    unpacked = struct.unpack(f"<{len(raw) // 4}f", raw)
    far = max(abs(a - b) for a, b in zip(plain, unpacked, strict=True))
    problems = [] if far < 1e-6 else [f"base64 and numbers differ by {far}"]
    if "does not support" not in rows["em-chat"]["error"]["message"]:
        problems.append("em-chat does not say that the model does not support it")
    return problems


def _short_message(rows: dict[str, Any]) -> list[str]:
    size = len(rows["ve-many"]["error"]["message"].encode())
    return [] if size <= 16 * 1024 else [f"a message of {size} bytes"]


def _stream_named(rows: dict[str, Any]) -> list[str]:
    return [f"{name} does not name it" for name in ("st-1", "st-4") if "stream" not in rows[name]["error"]["message"]]


def _urls_listed(rows: dict[str, Any]) -> list[str]:
    names = ("u-azure", "u-full", "u-empty")
    return [f"{name} lists no urls" for name in names if "/v1/chat/completions" not in rows[name]["error"]["message"]]


def _too_long_is_400(rows: dict[str, Any]) -> list[str]:
    status = rows["len-long"]["response"]["status_code"]
    return [] if status == 400 else [f"len-long is a {status}"]


def _never_fetched(rows: dict[str, Any]) -> list[str]:
    codes = {name: rows[name]["error"]["code"] for name in ("au-meta", "au-loop", "au-file")}
    return [f"{name} failed as {code}" for name, code in codes.items() if code not in _REFUSALS]


#: An engine without audio endpoints may say so first.
_REFUSALS = ("media_refused", "unsupported_endpoint")

#: What besides the outcome of each row must hold.
_CHECKS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "I09.jsonl": _stream_named,
    "I10.jsonl": _urls_listed,
    "I13.jsonl": _too_long_is_400,
    "I25.jsonl": _same_vector,
    "I27.jsonl": _never_fetched,
    "I29.jsonl": _choices,
    "I42.jsonl": _short_message,
}
