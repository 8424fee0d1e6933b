"""The file format and our records.

Owns: reading one input line, writing one failed result row, and the records of a batch directory.
Must not know: stores, Redis, Celery, engines.
On failure: a bad line is a `LineError` with a reason for people; it never echoes the line.

The format is the OpenAI batch format as `vllm run-batch` reads it: one JSON object per line with `custom_id`,
`method`, `url` and `body`. A result row has `id`, `custom_id`, `response` and `error`, in this order, and
**`"error": null` is the last thing in a row that succeeded**. That invariant (`SUCCESS_END`) lets a million rows be
counted without parsing them; every engine's rows are held to it by the engines' contract tests.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Self

    from common.failures import Failure

#: How a row that succeeded ends; no failed row does.
SUCCESS_END = b'"error":null}'

#: A batch's problems that are named one by one; the rest is counted.
MAX_PROBLEMS = 20

#: Levels of nesting that the parser (pydantic's jiter) takes; every reader behind it recurses.
MAX_DEPTH = 200

BOM = b"\xef\xbb\xbf"

#: What may stand around a JSON value (RFC 8259, section 2). Not `bytes.strip()`, which also takes \v and \f.
JSON_SPACE = b" \t\r\n"

#: Only such a number can be too large for a float, so only such lines need a second look.
#: 200 digits, not 308: an exponent of two digits may stand behind them.
_LONG_NUMBER = re.compile(r"[eE]\+?\d{3}|\d{200}")


class LineError(ValueError):
    """An input line that refuses the whole file. The message is a reason for people and quotes no body."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One input line: who it is, and the line itself, exactly as written but for surrounding JSON space."""

    custom_id: str
    url: str
    model: str | None
    text: str


def parse_line(raw: bytes) -> RequestLine:
    """Read one input line (bytes, without its LF; a CR before it is space).

    The same parser as vLLM's (pydantic's jiter) reads it, so a line that passes here parses there too.
    Raises `LineError` for everything that `contract.md` refuses at submit, but for repeated ids.
    """
    try:
        text = raw.decode("utf-8").strip(JSON_SPACE.decode())
    except UnicodeDecodeError as exc:
        raise LineError(f"not UTF-8 (byte {exc.start + 1} of the line){_guess_encoding(raw)}") from None
    try:
        # Without the line's end: what is missing there would be missing on a line 2.
        value = from_json(raw.rstrip(JSON_SPACE), allow_inf_nan=False)
    except ValueError as exc:
        raise LineError(_json_reason(raw, str(exc))) from None
    if not isinstance(value, dict):
        raise LineError(f"not a JSON object but {_type_name(value)}")
    return RequestLine(_custom_id(value), *_addressed(value), text)


def _json_reason(raw: bytes, reason: str) -> str:
    if b"\x00" in raw:
        return f"not JSON: NUL bytes{_guess_encoding(raw)}"
    if raw.startswith(BOM):
        return "not JSON: a byte order mark (BOM) inside the file"
    if reason.startswith("recursion limit"):
        return f"nested deeper than {MAX_DEPTH} levels"
    # jiter names "line 1 column N" of the line that it was given: only the column means anything to the user.
    return "not JSON: " + reason.replace("at line 1 column", "at column")


def _guess_encoding(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in raw[:200]:
        return "; it looks like UTF-16, convert the file to UTF-8"
    return ""


def _type_name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "an object")


def _custom_id(value: dict[str, Any]) -> str:
    if "custom_id" not in value:
        raise LineError("custom_id is missing")
    custom_id = value["custom_id"]
    if not isinstance(custom_id, str):
        raise LineError(f"custom_id must be a string, not {_type_name(custom_id)}")
    if not custom_id:
        raise LineError("custom_id is empty")
    return custom_id


def _addressed(value: dict[str, Any]) -> tuple[str, str | None]:
    if "method" not in value:
        raise LineError("method is missing")
    if value["method"] != "POST":
        raise LineError("method must be POST")
    if "url" not in value:
        raise LineError("url is missing")
    url = value["url"]
    if not isinstance(url, str):
        raise LineError(f"url must be a string, not {_type_name(url)}")
    if "body" not in value:
        raise LineError("body is missing")
    body = value["body"]
    if not isinstance(body, dict):
        raise LineError(f"body must be an object, not {_type_name(body)}")
    model = body.get("model")
    return url, model if isinstance(model, str) else None


def custom_id_of(text: str) -> str:
    """The `custom_id` of a line that `parse_line` accepted."""
    value: dict[str, Any] = from_json(text)
    return str(value["custom_id"])


def model_of(text: str) -> str | None:
    """The `model` of a line that `parse_line` accepted."""
    model = from_json(text)["body"].get("model")
    return model if isinstance(model, str) else None


def has_nonfinite_number(text: str) -> bool:
    """True when a number of the line is too large for a float, such as 1e400.

    It is valid JSON, so the file is not refused for it; an engine would sample with infinity. RFC 8259, section 6.
    """
    if _LONG_NUMBER.search(text) is None:
        return False
    return _holds_inf(from_json(text))


def _holds_inf(value: object) -> bool:
    if isinstance(value, (int, float)):  # An integer too: vLLM reads the text, where a float may be written as one.
        return abs(value) > sys.float_info.max
    if isinstance(value, dict):
        return any(_holds_inf(item) for item in value.values())
    if isinstance(value, list):
        return any(_holds_inf(item) for item in value)
    return False


# -- result rows ------------------------------------------------------------------------------------------------------


def row_failed(row: bytes) -> bool:
    """Whether a result row (one line, with or without its LF) is a failed one."""
    return not row.rstrip(b"\n").endswith(SUCCESS_END)


def failed_row(
    custom_id: str,
    failure: Failure,
    *,
    answered: dict[str, Any] | None = None,
    status_code: int | None = None,
    prefix: str = "vllm",
) -> bytes:
    """The result row of a failed request: strict JSON in UTF-8, no line end.

    `answered` is the error object that the endpoint answered (`message`, `type`, `param`, `code`), `status_code` its
    HTTP status (by default the kind's); without `answered` nothing answered and `response` is null.
    """
    response: dict[str, Any] | None = None
    if answered is not None:
        response = {
            "status_code": failure.kind.status if status_code is None else status_code,
            "request_id": f"{prefix}-batch-{uuid.uuid4().hex}",
            "body": {"error": answered},
        }
    row = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": {"code": failure.kind.code, "message": failure.message},
    }
    return to_json(row, inf_nan_mode="null")


def http_error(failure: Failure, *, type_: str, param: str | None = None, code: int | None = None) -> dict[str, Any]:
    """An error object as the HTTP API answers it."""
    return {
        "message": failure.message,
        "type": type_,
        "param": param,
        "code": failure.kind.status if code is None else code,
    }


def counted_tokens(usage: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt and completion tokens of a row's `usage`, by whichever names its endpoint gives them.

    `/v1/responses` calls them input and output tokens; an embedding has no completion; of speech seconds are counted.
    """
    prompt = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    return prompt, usage.get("completion_tokens") or usage.get("output_tokens") or 0


# -- records of a batch directory -------------------------------------------------------------------------------------


class BatchStatus(StrEnum):
    """Statuses of the OpenAI Batch API."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


#: A batch in one of these changes no more (but by a later run).
CLOSED = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.CANCELLED, BatchStatus.EXPIRED})


class Record(BaseModel):
    """A frozen record that tolerates fields of a later release."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RequestCounts(Record):
    """`completed` and `failed` are rows that exist; the rest is still to run."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(Record):
    """Tokens of all rows of a batch, as the rows' own `usage` counts them; rows that a later run replaced count too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Model -> (prompt tokens, completion tokens); rows that name no model stand under "".
    by_model: dict[str, tuple[int, int]] = Field(default_factory=dict)

    @classmethod
    def of(cls, by_model: Mapping[str, tuple[int, int]]) -> Self:
        """The usage with these tokens."""
        return cls(
            prompt_tokens=sum(prompt for prompt, _ in by_model.values()),
            completion_tokens=sum(completion for _, completion in by_model.values()),
            by_model=dict(by_model),
        )

    def plus(self, other: Usage) -> Usage:
        """The sum of both."""
        both = dict(self.by_model)
        for model, (prompt, completion) in other.by_model.items():
            had = both.get(model, (0, 0))
            both[model] = (had[0] + prompt, had[1] + completion)
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            by_model=both,
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """Requests of a run that become one chord and one part.

    `number` counts the run's shards from 0, `before` the run's requests in front of it. Its lines lie in the input
    shard `source`, whose first line has the index `first`. `indexes` are ascending indexes of the batch: all of the
    input shard's in run 1, some of them in a later run.
    """

    number: int
    before: int
    source: int
    first: int
    indexes: Sequence[int]

    @property
    def count(self) -> int:
        """How many requests it has."""
        return len(self.indexes)


class Manifest(Record):
    """What a batch is: written once, last of all at submit, and never changed. It exists: the batch is durable.

    `counts` holds the number of requests of each input shard, in order; each is a shard of run 1.
    `digest` is over the file's bytes and what changes rows, see `producer.intake`.
    Once `fail_after` rows of run 1 have failed, it is ended. A `local` batch belongs to the local fleet that its
    producer starts for it, with its own engine: nobody else may run it. `traceparent` is the root of its trace (W3C);
    a batch that is not traced has none.
    """

    version: int = 1
    batch_id: str
    created_at: int
    input_name: str
    endpoint: str
    model: str | None = None
    digest: str
    total: int
    counts: tuple[int, ...]
    expires_at: int | None = None
    fail_after: int | None = None
    local: bool = False
    traceparent: str = ""
    metadata: dict[str, str] = Field(default_factory=dict)


class RunStart(Record):
    """What a later run runs: created once, the first one wins. It exists: the run is durable.

    `spans` holds the run's indexes as (first index, number of consecutive ones), ascending. `purged` is the start of a
    removal: no run can be started any more, and the batch counts as gone.
    """

    at: int
    spans: tuple[tuple[int, int], ...]
    purged: bool = False


@dataclass(frozen=True)
class Run:
    """One run of a batch: run 1 is the whole file, a later one some of its requests (`RunStart`)."""

    manifest: Manifest
    number: int
    shards: tuple[Shard, ...]
    total: int
    expires_at: int | None = None

    @property
    def batch_id(self) -> str:
        """The batch's id."""
        return self.manifest.batch_id

    @property
    def traceparent(self) -> str:
        """The root of the batch's trace, which all its runs join."""
        return self.manifest.traceparent


#: The run that a submit makes.
FIRST_RUN = 1


def first_run(manifest: Manifest) -> Run:
    """The run of the whole file."""
    shards, first = [], 0
    for number, count in enumerate(manifest.counts):
        shards.append(Shard(number, before=first, source=number, first=first, indexes=range(first, first + count)))
        first += count
    return Run(manifest, FIRST_RUN, tuple(shards), manifest.total, manifest.expires_at)


def later_run(manifest: Manifest, number: int, start: RunStart) -> Run:
    """A run of some of the batch's requests, cut where the input's shards are, so that their lines stay where they are.

    Shards without a request are left out; the others are numbered anew.
    """
    spans = deque(start.spans)
    shards: list[Shard] = []
    first = before = 0
    for source, count in enumerate(manifest.counts):
        indexes: list[int] = []
        end = first + count
        while spans and spans[0][0] < end:
            at, length = spans.popleft()
            inside = min(length, end - at)
            indexes.extend(range(at, at + inside))
            if inside < length:
                spans.appendleft((end, length - inside))
        if indexes:
            shards.append(Shard(len(shards), before=before, source=source, first=first, indexes=tuple(indexes)))
            before += len(indexes)
        first = end
    return Run(manifest, number, tuple(shards), before)


def spans_of(indexes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending indexes as (first index, number of consecutive ones)."""
    spans: list[tuple[int, int]] = []
    for index in indexes:
        if spans and sum(spans[-1]) == index:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((index, 1))
    return tuple(spans)


class RunEnding(Record):
    """The wish that a run ends before it is complete. The first one wins.

    `status` is "cancelled", "expired", or "failed" where too many rows failed (`Manifest.fail_after`).
    """

    status: BatchStatus
    at: int


class RunEnd(Record):
    """How a run ended; created once, the first one wins. Its existence closes the run."""

    status: BatchStatus
    at: int
    counts: RequestCounts
    usage: Usage


def batch_object(
    manifest: Manifest,
    status: BatchStatus,
    counts: RequestCounts,
    usage: Usage,
    *,
    closed_at: int | None = None,
    output: str | None = None,
    errors: str | None = None,
) -> dict[str, Any]:
    """The batch in the shape of the OpenAI Batch object. Times are Unix seconds, files are paths or URIs."""

    def at(wanted: BatchStatus) -> int | None:
        return closed_at if status is wanted else None

    return {
        "id": manifest.batch_id,
        "object": "batch",
        "endpoint": manifest.endpoint,
        "model": manifest.model,
        "errors": None,
        "input_file_id": manifest.input_name,
        "completion_window": None,
        "status": status.value,
        "output_file_id": output,
        "error_file_id": errors,
        "created_at": manifest.created_at,
        "in_progress_at": manifest.created_at,
        "expires_at": manifest.expires_at,
        "finalizing_at": None,
        "completed_at": at(BatchStatus.COMPLETED),
        "failed_at": at(BatchStatus.FAILED),
        "expired_at": at(BatchStatus.EXPIRED),
        "cancelling_at": None,
        "cancelled_at": at(BatchStatus.CANCELLED),
        "request_counts": counts.model_dump(),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "by_model": {
                model: {"input_tokens": prompt, "output_tokens": completion}
                for model, (prompt, completion) in sorted(usage.by_model.items())
            },
        },
        "metadata": manifest.metadata or None,
    }


def dumps(value: dict[str, Any]) -> str:
    """A record for people and scripts: strict JSON, indented, UTF-8."""
    return json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False)
