"""The file format: which lines refuse a file, what is kept of the others, and the shape of failed rows."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.batch import (
    JSON_SPACE,
    SUCCESS_END,
    BatchStatus,
    LineError,
    Manifest,
    RequestCounts,
    RunEnd,
    RunStart,
    Usage,
    batch_object,
    counted_tokens,
    custom_id_of,
    dumps,
    failed_row,
    first_run,
    has_nonfinite_number,
    http_error,
    later_run,
    parse_line,
    row_failed,
    spans_of,
)
from common.failures import MAX_MESSAGE_BYTES, Failure, FailureKind


def line_of(**changes: Any) -> bytes:
    """A good line with some fields changed; a field that is `...` is left out."""
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}, ensure_ascii=False).encode()


def reason(raw: bytes) -> str:
    """Why this line refuses its file."""
    with pytest.raises(LineError) as caught:
        parse_line(raw)
    return str(caught.value)


def strict(raw: bytes) -> Any:
    """Read strict JSON: Python's reader takes NaN and Infinity, which are not JSON."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(raw.decode("utf-8"), parse_constant=refuse)


def ascii_id(value: str) -> str:
    """A short name of a parameter for the test report."""
    return ascii(value[:12])[1:-1]


# -- lines ------------------------------------------------------------------------------------------------------------


def test_a_good_line_is_read() -> None:
    """The fields that the fleet needs, and the line as it was written."""
    raw = line_of(custom_id="r-1", body={"model": "m", "x": [1]})
    line = parse_line(raw)
    assert (line.custom_id, line.url, line.model) == ("r-1", "/v1/chat/completions", "m")
    assert line.text == raw.decode()


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": 7}])
def test_a_body_without_a_model_name_is_the_engines_to_judge(body: dict[str, Any]) -> None:
    """Such a request is no reason to refuse a whole file."""
    assert parse_line(line_of(body=body)).model is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"custom_id": ...}, "custom_id is missing"),
        ({"custom_id": ""}, "custom_id is empty"),
        ({"custom_id": None}, "custom_id must be a string, not null"),
        ({"custom_id": 7}, "custom_id must be a string, not a number"),
        ({"custom_id": True}, "custom_id must be a string, not a boolean"),
        ({"method": ...}, "method is missing"),
        ({"method": "GET"}, "method must be POST"),
        ({"method": "post"}, "method must be POST"),
        ({"method": None}, "method must be POST"),
        ({"url": ...}, "url is missing"),
        ({"url": None}, "url must be a string, not null"),
        ({"url": ["/v1"]}, "url must be a string, not an array"),
        ({"body": ...}, "body is missing"),
        ({"body": None}, "body must be an object, not null"),
        ({"body": "{}"}, "body must be an object, not a string"),
        ({"body": 1.5}, "body must be an object, not a number"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(changes: dict[str, Any], expected: str) -> None:
    """The user sees which field to mend."""
    assert reason(line_of(**changes)) == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"[1, 2]", "an array"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"7", "a number"),
        (b"1.5", "a number"),
        (b"true", "a boolean"),
    ],
)
def test_json_that_is_no_object_is_refused_by_its_type(raw: bytes, expected: str) -> None:
    """A plain word for what stands there, and no AttributeError."""
    assert reason(raw) == f"not a JSON object but {expected}"


@pytest.mark.parametrize(
    "raw",
    [
        line_of() + b",",
        line_of() + b" " + line_of(),
        line_of()[:-20],
        b"{'custom_id': 'a'}",
        b"",
        b'{"custom_id": "tab\tin a string"}',
    ],
    ids=["comma", "two objects", "cut off", "quotes", "nothing", "control character"],
)
def test_what_is_not_json_is_refused_with_a_column(raw: bytes) -> None:
    """The column is the only useful part of the parser's place: it always says line 1, which would mislead."""
    message = reason(raw)
    assert message.startswith("not JSON: ")
    assert "at column " in message
    assert "line 1" not in message


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"custom_id":', "EOF while parsing a value at column 13"),
        (b'{"custom_id": "a', "EOF while parsing a string at column 16"),
        (b"{", "EOF while parsing an object at column 1"),
    ],
)
def test_what_a_line_lacks_at_its_end_is_lacking_on_that_line(line: bytes, said: str, end: bytes) -> None:
    """Not at column 0 of a line 2, beside the number of the line in the file; an open string is one, not its LF."""
    assert reason(line + end) == f"not JSON: {said}"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_refused(literal: str) -> None:
    """Python writes them without being asked; an engine would sample with them."""
    raw = line_of(body={"temperature": 0}).replace(b": 0}", f": {literal}}}".encode())
    assert literal.encode() in raw
    assert reason(raw).startswith("not JSON: ")


def test_a_lone_surrogate_is_refused() -> None:
    r"""`\ud800` alone is no character; vLLM 0.32 aborts a whole run on it."""
    assert reason(line_of().replace(b'"m"', b'"\\ud800"')).startswith("not JSON: ")


def test_nesting_without_end_is_refused_and_not_a_crash() -> None:
    """The parser stops at a depth of its own, long before Python's stack ends."""
    deep = b'{"custom_id": "a", "body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert reason(deep) == "nested deeper than 200 levels"


def test_a_byte_order_mark_inside_the_file_is_named() -> None:
    """Only the file's first one is skipped, elsewhere; two files put together leave one in the middle."""
    assert reason(b"\xef\xbb\xbf" + line_of()) == "not JSON: a byte order mark (BOM) inside the file"


def test_latin_1_is_refused_with_the_bytes_place() -> None:
    """The first byte that is not UTF-8, counted from 1."""
    raw = '{"custom_id": "é"}'.encode("latin-1")
    assert reason(raw) == "not UTF-8 (byte 16 of the line)"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_recognised(encoding: str) -> None:
    """With or without a byte order mark, the user reads what to do."""
    message = reason('{"custom_id": "a"}'.encode(encoding))
    assert message.endswith("it looks like UTF-16, convert the file to UTF-8")


@pytest.mark.parametrize("around", [b"\r", b"  \t", b"\r\r"])
def test_space_around_a_line_is_not_part_of_it(around: bytes) -> None:
    """CRLF files are fine; the CR does not travel on."""
    assert parse_line(around + line_of() + around).text == line_of().decode()


@pytest.mark.parametrize("space", ["\v", "\f", "\u00a0", "\u2028", "\u0085"])
def test_only_json_space_is_space(space: str) -> None:
    """`str.strip` would take these too, and then pass a line that vLLM's parser refuses."""
    assert reason(line_of() + space.encode()).startswith("not JSON: ")


def test_numbers_and_text_are_not_rewritten() -> None:
    """What the user wrote reaches the engine: no float is rounded, no escape resolved, no key reordered."""
    body = (
        '{"z": 1.10, "seed": 9223372036854775808, "a": 1E+2, "e": "\\u00e9\\/", "raw": "é\u2028\u0085😀",  "n": null,'
        ' "big": 1e400}'
    )
    text = f'{{"custom_id":"a","method":"POST","url":"u","body":{body},"more":0.1000}}'
    assert parse_line(text.encode()).text == text


@pytest.mark.parametrize(
    "custom_id", ["é", "\u2028", 'quote"back\\', "x" * 5000, " ", "\u0000", "日本😀", "null"], ids=ascii_id
)
def test_any_id_comes_back_from_the_line(custom_id: str) -> None:
    """An id is the user's; nothing about it is normalised."""
    line = parse_line(line_of(custom_id=custom_id))
    assert line.custom_id == custom_id
    assert custom_id_of(line.text) == custom_id


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SPACE = st.text(alphabet=JSON_SPACE.decode(), max_size=3)


@settings(deadline=None)
@given(
    custom_id=st.text(min_size=1),
    url=st.text(),
    body=st.dictionaries(st.text(), JSON, max_size=4),
    more=st.dictionaries(st.text(), JSON, max_size=3),
    ascii_only=st.booleans(),
    around=st.tuples(SPACE, SPACE),
)
def test_any_object_with_good_fields_passes_unchanged(
    custom_id: str,
    url: str,
    body: dict[str, Any],
    more: dict[str, Any],
    ascii_only: bool,
    around: tuple[str, str],
) -> None:
    """Whatever else a line holds and however it is written, it passes, and its text is the line but for its edges."""
    fields = {**more, "custom_id": custom_id, "method": "POST", "url": url, "body": body}
    text = json.dumps(fields, ensure_ascii=ascii_only)
    line = parse_line((around[0] + text + around[1]).encode())
    assert (line.custom_id, line.url, line.text) == (custom_id, url, text)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_pass_or_are_refused(raw: bytes) -> None:
    """No input line makes an exception other than the one that refuses it."""
    try:
        parse_line(raw)
    except LineError as refused:
        assert str(refused)  # noqa: PT017 - either way is right, but a refusal has a reason


def test_a_refusal_quotes_no_body() -> None:
    """Reasons reach terminals and logs; prompts must not."""
    for raw in (line_of(custom_id=7, body={"x": "SENTINEL"}), line_of(body={"x": "SENTINEL"})[:-1], b'"SENTINEL"'):
        assert "SENTINEL" not in reason(raw)


# -- numbers too large ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    ["1e400", "-1e400", "1E+309", "1e0309", "1" + "0" * 309, "-1" + "0" * 309, "9" * 400 + ".5", "1" * 250 + "e60"],
    ids=ascii_id,
)
@pytest.mark.parametrize("place", ["{}", "[0, [{}]]", '{{"deep": {{"er": {}}}}}'])
def test_a_number_beyond_a_float_is_found(number: str, place: str) -> None:
    """It is valid JSON and reads as infinity, wherever it stands and however it is written."""
    assert has_nonfinite_number('{"body": ' + place.format(number) + "}")


@pytest.mark.parametrize(
    "value",
    ["1e308", "-1.7e308", "1e-400", "1" + "0" * 308, "9223372036854775808", '"1e400"', '"' + "9" * 400 + '"', "true"],
    ids=ascii_id,
)
def test_a_number_that_fits_and_text_are_left_alone(value: str) -> None:
    """The largest floats, numbers that underflow to zero, and digits inside a string are all fine."""
    assert not has_nonfinite_number('{"body": [' + value + "]}")


def test_a_line_with_a_number_too_large_is_no_reason_to_refuse_the_file() -> None:
    """RFC 8259 leaves it to the reader; the engine answers it with a failed row."""
    raw = line_of(body={"top_p": 1}).replace(b": 1}", b": 1e400}")
    assert parse_line(raw).custom_id == "a"


# -- failed rows ------------------------------------------------------------------------------------------------------


def test_a_failed_row_without_an_answer_has_a_null_response() -> None:
    """Nothing answered: a status code would be an invention."""
    row = failed_row("id-1", Failure(FailureKind.WORKERS_LOST, "three workers died"))
    value = strict(row)
    assert list(value) == ["id", "custom_id", "response", "error"]
    assert value["id"].startswith("vllm-")
    assert value["custom_id"] == "id-1"
    assert value["response"] is None
    assert value["error"] == {"code": "workers_lost", "message": "three workers died"}


def test_a_failed_row_with_an_answer_keeps_it() -> None:
    """What the endpoint said stands where the HTTP API puts it."""
    failure = Failure(FailureKind.MODEL_NOT_FOUND, "no such model")
    answered = http_error(failure, type_="NotFoundError", param="model")
    value = strict(failed_row("a", failure, answered=answered, prefix="echo"))
    assert value["id"].startswith("echo-")
    assert value["response"]["request_id"].startswith("echo-batch-")
    assert value["response"]["status_code"] == 404
    assert value["response"]["body"]["error"] == {
        "message": "no such model",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert value["error"]["code"] == "model_not_found"


def test_an_answers_own_status_wins_over_the_kinds() -> None:
    """A 429 and a 503 are one kind and stay two statuses."""
    failure = Failure(FailureKind.ENGINE_OVERLOADED, "busy")
    value = strict(failed_row("a", failure, answered=http_error(failure, type_="X", code=429), status_code=429))
    assert value["response"]["status_code"] == 429
    assert value["response"]["body"]["error"]["code"] == 429


def test_numbers_that_json_lacks_become_null_in_a_failed_row() -> None:
    """An answer's error may hold any value; the row stays strict JSON."""
    row = failed_row("a", Failure(FailureKind.ENGINE_ERROR, "x"), answered={"message": "x", "code": float("nan")})
    assert strict(row)["response"]["body"]["error"]["code"] is None


@pytest.mark.parametrize(
    "text", ['"error":null}', 'x"error":null}', "\n", "\u2028", "é" * (MAX_MESSAGE_BYTES // 2)], ids=ascii_id
)
def test_no_text_makes_a_failed_row_look_like_success(text: str) -> None:
    """Rows are counted by how they end, so ids and messages must not be able to forge the end, or a line end."""
    row = failed_row(text, Failure(FailureKind.TIMEOUT, text))
    assert row_failed(row)
    assert b"\n" not in row
    assert strict(row)["custom_id"] == text


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_row_is_told_by_its_end(end: bytes) -> None:
    """With or without its line end."""
    assert not row_failed(b'{"id":"vllm-1","custom_id":"a","response":{},"error":null}' + end)
    assert row_failed(b'{"id":"vllm-1","custom_id":"a","response":null,"error":{"code":"x"}}' + end)


def test_two_failed_rows_have_ids_of_their_own() -> None:
    """Ids of rows are never reused, not even for the same request."""
    failure = Failure(FailureKind.TIMEOUT, "late")
    assert strict(failed_row("a", failure))["id"] != strict(failed_row("a", failure))["id"]


@settings(deadline=None)
@given(custom_id=st.text(), message=st.text(), kind=st.sampled_from(FailureKind))
def test_any_failed_row_reads_back(custom_id: str, message: str, kind: FailureKind) -> None:
    """Id and message come back from strict JSON as they went in."""
    row = failed_row(custom_id, Failure(kind, message))
    value = strict(row)
    assert (value["custom_id"], value["error"]) == (custom_id, {"code": kind.code, "message": message})
    assert not row.endswith(SUCCESS_END)


# -- records ----------------------------------------------------------------------------------------------------------


def manifest_of(*counts: int) -> Manifest:
    """A manifest with shards of these sizes."""
    return Manifest(
        batch_id="b", created_at=1, input_name="in.jsonl", endpoint="/v1", digest="d", total=sum(counts), counts=counts
    )


@given(st.lists(st.integers(min_value=1, max_value=1000), max_size=20))
def test_shards_cover_the_batch_without_gap_or_overlap(counts: list[int]) -> None:
    """Every index is in exactly one shard, in order."""
    run = first_run(manifest_of(*counts))
    assert [index for shard in run.shards for index in shard.indexes] == list(range(run.total))
    assert [shard.number for shard in run.shards] == [shard.source for shard in run.shards] == list(range(len(counts)))


@given(st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=8), st.data())
def test_a_later_run_has_exactly_its_requests_in_order(counts: list[int], data: st.DataObject) -> None:
    """Each in the input shard that holds its line, in dense shards, whatever was chosen."""
    manifest = manifest_of(*counts)
    indexes = sorted(data.draw(st.sets(st.integers(min_value=0, max_value=manifest.total - 1), min_size=1)))

    run = later_run(manifest, 2, RunStart(at=1, spans=spans_of(indexes)))

    assert [index for shard in run.shards for index in shard.indexes] == indexes
    assert run.total == len(indexes)
    assert [shard.number for shard in run.shards] == list(range(len(run.shards)))
    for shard in run.shards:
        assert shard.count > 0
        assert shard.first == sum(counts[: shard.source])
        assert all(shard.first <= index < shard.first + counts[shard.source] for index in shard.indexes)
        assert shard.before == sum(other.count for other in run.shards[: shard.number])


def test_consecutive_indexes_are_one_span() -> None:
    assert spans_of([0, 1, 2, 7, 9, 10]) == ((0, 3), (7, 1), (9, 2))


def test_a_record_of_a_later_release_is_read() -> None:
    """An older worker does not fail on a field that it does not know."""
    record = {**manifest_of(2).model_dump(mode="json"), "later": {"x": 1}}
    assert Manifest.model_validate_json(json.dumps(record)) == manifest_of(2)


def test_a_run_end_reads_back() -> None:
    """What was written when a run closed is what the next reader sees."""
    end = RunEnd(
        status=BatchStatus.CANCELLED,
        at=5,
        counts=RequestCounts(total=3, completed=1, failed=1),
        usage=Usage(prompt_tokens=2),
    )
    assert RunEnd.model_validate_json(end.model_dump_json()) == end


def test_the_batch_object_has_the_openai_shape() -> None:
    """Scripts written for the OpenAI Batch object find their fields; a closed batch has exactly one closing time."""
    counts = RequestCounts(total=3, completed=2, failed=1)
    value = batch_object(
        manifest_of(3), BatchStatus.COMPLETED, counts, Usage(prompt_tokens=5, completion_tokens=7), closed_at=9
    )
    assert value["object"] == "batch"
    assert value["status"] == "completed"
    assert value["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert value["usage"]["total_tokens"] == 12
    closing = ("completed_at", "failed_at", "expired_at", "cancelled_at")
    assert {name: value[name] for name in closing} == {**dict.fromkeys(closing), "completed_at": 9}


def test_records_for_people_are_strict_json() -> None:
    """Text stays readable, and a number that JSON lacks is a fault here rather than at the reader."""
    assert strict(dumps({"name": "日本"}).encode()) == {"name": "日本"}
    assert "日本" in dumps({"name": "日本"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"x": float("nan")})


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}, (3, 5)),
        ({"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": None}, (3, 0)),
        ({"input_tokens": 3, "output_tokens": 5}, (3, 5)),
        ({"type": "duration", "seconds": 4}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_tokens_are_counted_by_the_names_of_every_endpoint(usage: dict[str, Any], counted: tuple[int, int]) -> None:
    assert counted_tokens(usage) == counted
