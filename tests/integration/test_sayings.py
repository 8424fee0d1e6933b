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


def test_nothing_to_show_is_said_and_nothing_is_printed(workplace: Workplace) -> None:
    """Else nobody knows whether the right place was looked at."""
    folder = workplace.state / "batch-fleet"
    folder.mkdir(parents=True)
    store = folder.resolve().as_uri()
    status, listing = workplace.producer("status", "--local"), workplace.producer("list", "--local")
    machine = workplace.producer("status", "--local", "--json"), workplace.producer("list", "--local", "--json")

    assert (status.code, status.stdout, status.stderr) == (0, b"", f"no open batch in {store}\n")
    assert (listing.code, listing.stdout, listing.stderr) == (0, b"", f"no batch in {store}\n")
    assert [json.loads(machine[0].stdout)["data"], machine[1].stdout] == [[], b""]
    assert {run.stderr for run in machine} == {""}


def test_a_closed_batch_is_listed_and_none_is_open(workplace: Workplace) -> None:
    assert workplace.producer("submit", str(workplace.write("in.jsonl", [chat_line("a", "x")])), *LOCAL).code == 0

    status, listing = workplace.producer("status", "--local"), workplace.producer("list", "--local")

    assert status.stdout == b""
    assert status.stderr.startswith("no open batch in ")
    assert b"1/1 done" in listing.stdout
    assert listing.stderr == ""
