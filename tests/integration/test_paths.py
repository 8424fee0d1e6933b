"""The fleet writes below its store and nowhere else, whatever a message or a batch file says."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from common import broker, layout
from common.dispatch import send
from tests.invariants import chat_line, chat_lines, rows_of
from tests.servers import START_S, FleetServers, wait_until

if TYPE_CHECKING:
    from pathlib import Path


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def elsewhere(fleet: FleetServers) -> Path:
    """A batch beside the store, all but assembled: whoever may write to Redis would like the fleet to touch it."""
    fleet.aggregator()
    fleet.worker()
    run = fleet.producer("submit", str(fleet.write("in.jsonl", chat_lines(4))), "--new")
    assert run.code == 0, run.stderr
    (batch_id,) = fleet.batch_ids()
    other = fleet.folder / "elsewhere"
    shutil.copytree(fleet.store_root / layout.batch(batch_id), other)
    for path in files(other):
        if not {"parts", "input"} & set(path.parts) and path.name != "manifest.json":
            path.unlink()
    return other


def test_a_message_cannot_name_a_folder_outside_of_the_store(fleet: FleetServers, elsewhere: Path) -> None:
    (aggregator,) = [process for process in fleet.processes if "aggregate" in process.name]
    app = broker.make_app(fleet.broker.url)
    before = files(elsewhere)
    messages: list[tuple[str, dict[str, Any]]] = [
        (broker.ASSEMBLE_BATCH, {"batch_id": "../../elsewhere", "run": 1}),
        (broker.ASSEMBLE_BATCH, {"batch_id": str(elsewhere), "run": 1}),
        (broker.END_EARLY, {"batch_id": "../../elsewhere", "run": 1}),
        (broker.SEAL_SHARD, {"batch_id": next(iter(fleet.batch_ids())), "run": "1/../../../../elsewhere", "shard": 0}),
        (broker.FEED, {"batch_id": "../../elsewhere", "run": 1}),
    ]
    for name, ids in messages:
        send(app, name, **ids)

    wait_until(lambda: aggregator.stderr.count("dropped a message") == len(messages), START_S, "all were dropped")
    app.close()

    assert files(elsewhere) == before
    assert aggregator.running


def test_a_batch_file_cannot_name_a_place(fleet: FleetServers) -> None:
    """Ids of requests become names of nothing."""
    fleet.aggregator()
    fleet.worker()
    names = ["../../escaped", "/tmp/escaped", "a/b", "..", "c\u0000d", "fleet:workers", "*"]
    source = fleet.write("in.jsonl", [chat_line(name, "text") for name in names])
    before = files(fleet.folder.parent)
    run = fleet.producer("submit", str(source))

    assert run.code == 0, run.stderr
    assert [row["custom_id"] for row in rows_of((fleet.folder / "in.out.jsonl").read_bytes())] == names
    new = {path for path in files(fleet.folder.parent) - before if not path.is_relative_to(fleet.store_root)}
    assert {path.name for path in new if path.suffix not in (".stdout", ".stderr")} == {"in.out.jsonl"}
    assert {key.decode() for key in fleet.client.scan_iter("*escaped*")} == set()
