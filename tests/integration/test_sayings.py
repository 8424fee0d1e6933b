"""What the producer's commands say to people, where there is one of a thing, or none."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tests.invariants import chat_line

if TYPE_CHECKING:
    from tests.servers import Workplace

LOCAL = ("--local", "--engine", "echo", "--model", "test-model")


def test_one_of_a_thing_is_no_plural(workplace: Workplace) -> None:
    path = str(workplace.write("in.jsonl", [chat_line("a", "x", model="other")]))

    check = workplace.producer("check", path)
    submit = workplace.producer("submit", path, *LOCAL, "--json")
    batch_id = json.loads(submit.stdout)["id"]
    retry = workplace.producer("retry", batch_id, *LOCAL)

    assert check.stderr.endswith(": 1 request, all well-formed\n")
    assert f"{batch_id}: 1 request in 1 shard\n" in submit.stderr
    assert f"{batch_id}: run 2 over 1 of 1 request\n" in retry.stderr
    assert not re.search(r"\b1 (requests|shards|rows|batches)\b", check.stderr + submit.stderr + retry.stderr)
