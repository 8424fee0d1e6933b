"""Names inside the store: ids from people become names of objects, so nothing but an id may pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import layout
from common.errors import UsageError

GOOD = "batch_0123456789abcdef01234567"


def test_a_new_id_is_an_id_and_never_the_same() -> None:
    made = {layout.new_batch_id() for _ in range(100)}

    assert len(made) == 100
    assert all(layout.checked_batch_id(each) == each for each in made)


@pytest.mark.parametrize(
    "text",
    [
        "", "batch_", "..", "../../etc/passwd", f"../{GOOD}", f"{GOOD}/..", f"{GOOD}/manifest.json", f"{GOOD}\n",
        f" {GOOD}", f"{GOOD}\0", GOOD.upper(), GOOD[:-1], f"{GOOD}0", "batch_0123456789abcdef0123456g", "/" + GOOD,
        "batch_٠123456789abcdef01234567",
    ],
)  # fmt: skip
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a batch id"):
        layout.checked_batch_id(text)


@given(st.text())
def test_whatever_passes_is_one_harmless_name(text: str) -> None:
    try:
        passed = layout.checked_batch_id(text)
    except UsageError:
        return
    assert passed == text
    assert set(passed) <= set("batch_0123456789abcdef")


def test_names_of_a_run_lie_in_its_batch() -> None:
    names = [
        layout.manifest(GOOD), layout.shard_input(GOOD, 3), layout.part(GOOD, 1, 3), layout.end(GOOD, 1),
        layout.output(GOOD, 1), layout.errors(GOOD, 1), layout.output(GOOD, 2), layout.errors(GOOD, 2),
        layout.start(GOOD, 2),
    ]  # fmt: skip

    assert all(name.startswith(f"{layout.BATCHES}/{GOOD}/") for name in names)
    assert len(set(names)) == len(names)
    assert layout.part(GOOD, 1, 3).startswith(layout.parts(GOOD, 1) + "/")
    assert layout.part(GOOD, 2, 3) != layout.part(GOOD, 1, 3)


def test_more_shards_than_five_digits_have_names_of_their_own() -> None:
    assert layout.part(GOOD, 1, 123456) != layout.part(GOOD, 1, 12345)
