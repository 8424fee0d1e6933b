"""Intake: a file is validated as a whole, then cut into shards that hold its very lines in its order."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import layout
from common.batch import MAX_PROBLEMS, Manifest, first_run
from common.errors import InputRefusedError, UsageError
from common.settings import ProducerSettings
from common.store import LocalStore
from producer import intake
from producer.intake import MIN_SHARD_SIZE, batch_digest, check, shard_size, write_batch

DIGEST = "0" * 64


def line(custom_id: str, **body: object) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request, ensure_ascii=False)


def lines(count: int) -> list[str]:
    return [line(f"r{number}") for number in range(count)]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def written(folder: Path, content: bytes | list[str]) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else "".join(f"{each}\n" for each in content).encode())
    return path


def durable(store: LocalStore, path: Path, max_shard_size: int = 1000) -> Manifest:
    checked = check(str(path), str(path))
    return write_batch(store, checked, batch_id=layout.new_batch_id(), digest=DIGEST, max_shard_size=max_shard_size)


def shards(store: LocalStore, manifest: Manifest) -> list[bytes]:
    return [store.read(layout.shard_input(manifest.batch_id, number)) for number in range(len(manifest.counts))]


def problems(folder: Path, content: bytes | list[str]) -> list[str]:
    """The reasons with their line numbers, without the file's name."""
    path = written(folder, content)
    with pytest.raises(InputRefusedError) as caught:
        check("NAME", str(path))
    assert all(each.startswith("NAME:") for each in caught.value.problems)
    return [each.removeprefix("NAME:") for each in caught.value.problems]


# -- the first pass ----------------------------------------------------------------------------------------------------


def test_a_good_file_is_counted_and_described(tmp_path: Path) -> None:
    path = written(tmp_path, [line("a", model="m"), line("b", model="m")])

    checked = check("NAME", str(path))

    assert (checked.name, checked.total, checked.endpoint, checked.model) == ("NAME", 2, "/v1/chat/completions", "m")


def test_a_file_of_several_models_is_mixed(tmp_path: Path) -> None:
    path = written(tmp_path, [line("a", model="m"), line("b", model="n"), line("c", model="m")])

    assert check("NAME", str(path)).model == "mixed"


def test_a_repeated_id_is_named_with_both_lines(tmp_path: Path) -> None:
    content = [line("a"), line("b"), "", line("a"), line("b"), line("a")]

    assert problems(tmp_path, content) == [
        "4: custom_id 'a' is repeated; it is first on line 1",
        "5: custom_id 'b' is repeated; it is first on line 2",
        "6: custom_id 'a' is repeated; it is first on line 1",
    ]


def test_ids_that_are_repeated_thousands_of_lines_apart_are_found(tmp_path: Path) -> None:
    content = lines(3500)
    content[3400] = content[3]
    content[1000] = content[999]
    content[2999] = content[0]

    assert [each.split(":")[0] for each in problems(tmp_path, content)] == ["1001", "3000", "3401"]
    assert problems(tmp_path, content)[2].endswith("it is first on line 4")


def test_ids_are_compared_as_the_user_wrote_them(tmp_path: Path) -> None:
    path = written(tmp_path, [line("a"), line("A"), line("a "), line("é"), line("e\u0301"), line("1")])

    assert check("NAME", str(path)).total == 6


def test_an_escaped_id_is_the_same_id(tmp_path: Path) -> None:
    assert problems(tmp_path, [line("é"), json.dumps(json.loads(line("é")))])[0].startswith("2: ")


def test_a_long_id_is_cut_in_its_refusal(tmp_path: Path) -> None:
    (said,) = problems(tmp_path, [line("x" * 5000), line("x" * 5000)])

    assert len(said) < 200


def test_blank_lines_are_no_requests_and_count_as_lines(tmp_path: Path) -> None:
    assert problems(tmp_path, ["", line("a"), "   ", "\t", "\r", "nothing"]) == [
        "6: not JSON: " + problems(tmp_path, ["nothing"])[0].partition("not JSON: ")[2]
    ]
    assert check("NAME", str(written(tmp_path, ["", line("a"), "  ", line("b"), "", ""]))).total == 2


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\t\n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n\n"])
def test_a_file_without_requests_is_good_and_empty(tmp_path: Path, content: bytes) -> None:
    assert check("NAME", str(written(tmp_path, content))).total == 0


def test_problems_are_in_the_files_order_whatever_their_kind(tmp_path: Path) -> None:
    content = [line("a"), line("a"), "[]", line("b"), "{", line("b")]

    assert [each.partition(":")[0] for each in problems(tmp_path, content)] == ["2", "3", "5", "6"]


def test_twenty_problems_are_named_and_all_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, [line("same"), *["[]"] * 100, *[line("same")] * 50])

    with pytest.raises(InputRefusedError) as caught:
        check("NAME", str(path))

    assert [each.split(":")[1] for each in caught.value.problems] == [str(number) for number in range(2, 22)]
    assert len(caught.value.problems) == MAX_PROBLEMS
    assert caught.value.total == 150
    assert str(caught.value).endswith("\n... and 130 more problems")
    assert str(InputRefusedError(["NAME:1: not UTF-8"], 2)).endswith("\n... and 1 more problem")
    assert str(InputRefusedError(["NAME:1: not UTF-8"], 1)) == "NAME:1: not UTF-8"


def test_an_early_repeated_id_is_among_the_named_problems(tmp_path: Path) -> None:
    """Repeated ids are found late; the first twenty by line are named all the same."""
    content = [line("a"), line("a"), *["[]"] * 500]

    assert problems(tmp_path, content)[0].startswith("2: custom_id")


def test_a_byte_that_is_not_utf8_is_named_by_line(tmp_path: Path) -> None:
    said = problems(tmp_path, line("a").encode() + b"\n" + line("é").encode("latin-1") + b"\n")

    assert said[0].startswith("2: not UTF-8")


def test_a_file_in_utf16_says_so_once_per_line(tmp_path: Path) -> None:
    assert "UTF-16" in problems(tmp_path, (line("a") + "\n").encode("utf-16"))[0]


def test_progress_is_told_while_a_large_file_is_read(tmp_path: Path) -> None:
    told: list[int] = []

    check("NAME", str(written(tmp_path, lines(10_001))), told.append)

    assert told == [5000, 10_000]


# -- the second pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "at_most", "expected"),
    [
        (1, 1000, 16),
        (40, 1000, 16),
        (512, 1000, 16),
        (513, 1000, 17),
        (3200, 1000, 100),
        (1_000_000, 1000, 1000),
        (40, 5, 5),
    ],
)
def test_shards_are_a_thirty_second_of_the_file_within_limits(total: int, at_most: int, expected: int) -> None:
    assert shard_size(total, at_most) == expected


def test_a_file_is_cut_into_consecutive_shards(tmp_path: Path, store: LocalStore) -> None:
    content = lines(40)

    manifest = durable(store, written(tmp_path, content))

    assert manifest.counts == (16, 16, 8)
    assert [part.decode().splitlines() for part in shards(store, manifest)] == [
        content[:16], content[16:32], content[32:]
    ]  # fmt: skip
    assert [shard.first for shard in first_run(manifest).shards] == [0, 16, 32]


def test_a_shard_is_closed_at_its_size_in_bytes(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_SHARD_BYTES", 1000)
    content = [line(f"r{number}", text="x" * 600) for number in range(10)]

    manifest = durable(store, written(tmp_path, content))

    assert manifest.counts == (2, 2, 2, 2, 2)
    assert b"".join(shards(store, manifest)).decode().splitlines() == content


def test_lines_are_kept_but_for_the_space_around_them(tmp_path: Path, store: LocalStore) -> None:
    raw = b'\xef\xbb\xbf {"custom_id" : "a","method":"POST","url":"u","body":{"t":1.0,"s":"\\u00e9\xe2\x80\xa8"}}\t\r\n'
    manifest = durable(store, written(tmp_path, raw + b"\r\n" + line("b").encode()))

    (shard,) = shards(store, manifest)

    assert shard.split(b"\n") == [raw.removeprefix(b"\xef\xbb\xbf").strip(), line("b").encode(), b""]


def test_a_file_that_changed_in_between_is_refused_and_is_no_batch(tmp_path: Path, store: LocalStore) -> None:
    path = written(tmp_path, lines(40))
    checked = check("NAME", str(path))
    path.write_bytes(path.read_bytes().replace(b"r39", b"r99"))

    with pytest.raises(InputRefusedError) as caught:
        write_batch(store, checked, batch_id=layout.new_batch_id(), digest=DIGEST, max_shard_size=1000)

    assert caught.value.problems == ["NAME: the file changed while it was read"]
    assert not list((tmp_path / "store").rglob("manifest.json"))


def test_a_file_that_vanished_in_between_is_refused(tmp_path: Path, store: LocalStore) -> None:
    path = written(tmp_path, lines(2))
    checked = check("NAME", str(path))
    path.unlink()

    with pytest.raises(UsageError, match="No such file"):
        write_batch(store, checked, batch_id=layout.new_batch_id(), digest=DIGEST, max_shard_size=1000)


def test_the_digest_is_over_bytes_and_what_changes_rows(tmp_path: Path) -> None:
    first = check("one", str(written(tmp_path, lines(2))))
    same = check("other name", str(written(tmp_path, lines(2))))
    changed = check("one", str(written(tmp_path, [*lines(2), ""])))

    assert batch_digest(first, ["a"]) == batch_digest(same, ["a"])
    assert len({batch_digest(first, []), batch_digest(first, ["a"]), batch_digest(first, ["a", "b"])}) == 3
    assert batch_digest(first, ["ab"]) != batch_digest(first, ["a", "b"])
    assert batch_digest(first, []) != batch_digest(changed, [])


# -- limits ------------------------------------------------------------------------------------------------------------


def limited(**limits: int) -> ProducerSettings:
    return ProducerSettings.model_construct(**limits)


def test_a_line_that_is_too_long_is_named_and_ends_the_pass(tmp_path: Path) -> None:
    longest = len(line("r0", prompt="x" * 1000))
    path = written(
        tmp_path, [line("r0", prompt="x" * 1000), "no JSON", line("r1", prompt="x" * 1001), "no JSON either"]
    )

    with pytest.raises(InputRefusedError) as caught:
        check("NAME", str(path), limits=limited(max_line_bytes=longest))

    assert [problem.partition(": ")[0] for problem in caught.value.problems] == ["NAME:2", "NAME:3"]
    assert f"longer than {longest} bytes (FLEET_MAX_LINE_BYTES)" in caught.value.problems[1]


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_ends_of_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path, end: str) -> None:
    text = line("r0", prompt="x" * 1000)
    path = written(tmp_path, b"\xef\xbb\xbf" + (text + end).encode())

    assert check("NAME", str(path), limits=limited(max_line_bytes=len(text))).total == 1


def test_more_lines_than_the_limit_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [line("a"), "", line("b"), line("c")])

    assert check("NAME", str(path), limits=limited(max_lines=4)).total == 3
    with pytest.raises(InputRefusedError) as caught:
        check("NAME", str(path), limits=limited(max_lines=3))
    assert caught.value.problems == ["NAME:4: the input has more than 3 lines (FLEET_MAX_LINES)"]


@pytest.mark.parametrize(
    "value", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000]
)
def test_nesting_beyond_the_limit_is_a_clean_refusal(tmp_path: Path, value: str) -> None:
    said = problems(tmp_path, [line("a"), line("b")[:-2] + f'"x": {value}}}}}'])

    assert said == ["2: nested deeper than 200 levels"]


# -- any file ----------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
_ENDS = st.sampled_from(["\n", "\r\n", " \n", "\n\n", "\n \t\r\n"])


@settings(max_examples=60)
@given(st.lists(st.tuples(_TEXT, _ENDS), max_size=80), st.integers(1, 40), st.booleans(), st.booleans())
def test_the_shards_joined_are_the_files_requests_in_order(
    drawn: list[tuple[str, str]], max_shard_size: int, bom: bool, cut_last_end: bool
) -> None:
    """Whatever stands in the lines and between them: no request is lost, repeated, changed or moved."""
    wanted = [line(f"{number}-{text}", text=text) for number, (text, _) in enumerate(drawn)]
    ends = [end for _, end in drawn]
    if cut_last_end and ends:
        ends[-1] = ""
    raw = "".join(each + end for each, end in zip(wanted, ends, strict=True)).encode()
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder) / "store")
        path = written(Path(folder), (b"\xef\xbb\xbf" if bom else b"") + raw)

        manifest = durable(store, path, max_shard_size)

        parts = shards(store, manifest)
    assert b"".join(parts) == "".join(f"{each}\n" for each in wanted).encode()
    assert [part.count(b"\n") for part in parts] == list(manifest.counts)
    assert manifest.total == sum(manifest.counts) == len(wanted)
    assert all(1 <= count <= min(max_shard_size, MIN_SHARD_SIZE) for count in manifest.counts)
