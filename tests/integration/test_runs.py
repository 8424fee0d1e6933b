"""Later runs of a batch: `retry` of failed rows, and `resume` of what was cancelled or has expired."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common import layout
from common.batch import FIRST_RUN, BatchStatus, RequestCounts, RunEnd, Usage, first_run
from common.errors import NoSuchBatchError
from common.ledger import Ledger
from common.routes import Routes
from common.runs import newest_run, read_end, read_manifest, start_purge, start_run, state_of, write_end
from common.store import LocalStore
from producer import control, intake
from producer.local_batches import see_all
from producer.output import Destination
from tests.invariants import assert_complete, chat_line, chat_lines, input_lines, rows_of
from tests.servers import BrokerServer, FleetServers, Workplace, wait_until
from workers.aggregate import Aggregator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from common.batch import Run

#: Every fourth request of these is for a model that is not served at first.
MIXED = [
    chat_line(f"r{n:03d}", f"text {n}", model="later-model" if n % 4 == 3 else "test-model", echo={}) for n in range(40)
]
LATER = {f"r{n:03d}" for n in range(3, 40, 4)}


@pytest.fixture
def fleet(server: str, tmp_path: Path) -> Iterator[FleetServers]:
    """An aggregator, small shards, and no worker yet."""
    servers = FleetServers(tmp_path, FLEET_SHARD_SIZE="16", FLEET_WINDOW="32", FLEET_DRAIN_S="0")
    try:
        servers.aggregator()
        yield servers
    finally:
        servers.close()


def batch_of(servers: FleetServers) -> str:
    (batch_id,) = servers.batch_ids()
    return batch_id


def run_mixed(servers: FleetServers) -> tuple[str, bytes]:
    """Submit `MIXED` to a worker that does not serve one of its models; returns the batch's id and its output."""
    path, output = servers.write("in.jsonl", MIXED), servers.folder / "in.out.jsonl"
    worker = servers.worker()
    run = servers.producer("submit", str(path))
    assert run.code == 3, run.stderr
    assert worker.stop().code == 0
    assert_complete(MIXED, output.read_bytes(), dict.fromkeys(LATER, "err"))
    return batch_of(servers), output.read_bytes()


def test_a_retry_runs_the_failed_rows_alone_and_leaves_a_complete_output(fleet: FleetServers) -> None:
    batch_id, before = run_mixed(fleet)
    fleet.worker(model="later-model")
    output, errors = fleet.folder / "in.out.jsonl", fleet.folder / "errors.jsonl"

    retry = fleet.producer("retry", batch_id, "--errors", str(errors), "--json")

    assert retry.code == 0, retry.stderr
    assert "10 of 40" in retry.stderr
    after = output.read_bytes()
    rows = assert_complete(MIXED, after)
    old = {row["custom_id"]: row for row in rows_of(before)}
    assert {row["custom_id"] for row in rows if row != old[row["custom_id"]]} == LATER
    assert errors.read_bytes() == b""
    batch = json.loads(retry.stdout)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 40, "completed": 40, "failed": 0})
    assert batch["usage"]["input_tokens"] == sum(row["response"]["body"]["usage"]["prompt_tokens"] for row in rows)
    # Tokens by model, of both runs: echo's rows name the model that they were asked for.
    per_model = {model: tokens["input_tokens"] for model, tokens in batch["usage"]["by_model"].items()}
    assert set(per_model) == {"test-model", "later-model"}
    assert sum(per_model.values()) == batch["usage"]["input_tokens"]
    assert "tokens; later-model: " in retry.stderr
    fetched = fleet.folder / "fetched.jsonl"
    assert fleet.producer("fetch", batch_id, "-o", str(fetched)).code == 0
    assert fetched.read_bytes() == after

    # There is nothing more to retry, and the first run's output is still what it was.
    fetched.unlink()
    assert fleet.producer("retry", batch_id).code == 0
    assert fleet.producer("retry", batch_id, "-o", str(fetched)).code == 0
    assert fetched.read_bytes() == after
    assert newest_run(fleet.store, read_manifest(fleet.store, batch_id)).number == 2
    assert fleet.store.read(layout.output(batch_id, FIRST_RUN)) == before


def test_a_retry_can_fail_again_and_be_retried(fleet: FleetServers) -> None:
    batch_id, before = run_mixed(fleet)
    again = fleet.worker()
    output = fleet.folder / "in.out.jsonl"

    assert fleet.producer("retry", batch_id).code == 3
    assert_complete(MIXED, output.read_bytes(), dict.fromkeys(LATER, "err"))
    assert [row for row in rows_of(output.read_bytes()) if row["error"] is None] == [
        row for row in rows_of(before) if row["error"] is None
    ]
    again.stop()
    fleet.worker(model="later-model")

    assert fleet.producer("retry", batch_id).code == 0
    assert_complete(MIXED, output.read_bytes())
    assert newest_run(fleet.store, read_manifest(fleet.store, batch_id)).number == 3


def test_an_open_batch_is_not_retried(fleet: FleetServers) -> None:
    path = fleet.write("in.jsonl", chat_lines(3))
    assert fleet.producer("submit", str(path), "--detach").code == 0

    run = fleet.producer("retry", batch_of(fleet))

    assert run.code == 2
    assert "still open" in run.stderr
    assert fleet.producer("cancel", batch_of(fleet)).code == 0
    wait_until(lambda: fleet.is_closed(batch_of(fleet)), 30, "the batch is closed")


def test_two_retries_at_once_are_one_run_and_leave_whole_files(fleet: FleetServers) -> None:
    batch_id, _ = run_mixed(fleet)
    fleet.worker(model="later-model")
    outputs = [fleet.folder / f"retried-{n}.jsonl" for n in range(2)]

    producers = [fleet.start_producer("retry", batch_id, "-o", str(output)) for output in outputs]

    for producer, output in zip(producers, outputs, strict=True):
        run = producer.wait(60)
        assert run.code == 0, run.stderr
        assert_complete(MIXED, output.read_bytes())  # also of a slow one, which finds that nothing failed any more
    assert newest_run(fleet.store, read_manifest(fleet.store, batch_id)).number == 2


def test_resuming_a_cancelled_batch_runs_exactly_what_was_cancelled(fleet: FleetServers) -> None:
    path, output = fleet.write("in.jsonl", MIXED), fleet.folder / "in.out.jsonl"
    assert fleet.producer("submit", str(path), "--detach").code == 0
    batch_id = batch_of(fleet)
    assert "is being cancelled" in fleet.producer("cancel", batch_id).stderr
    wait_until(lambda: fleet.is_closed(batch_id), 30, "the batch is closed")
    assert "is cancelled already" in fleet.producer("cancel", batch_id).stderr
    fleet.worker()

    run = fleet.producer("resume", batch_id, "-o", str(output))

    # The rows of the other model fail by themselves now, and are not cancelled any more.
    assert run.code == 3, run.stderr
    rows = assert_complete(MIXED, output.read_bytes(), dict.fromkeys(LATER, "err"))
    assert {row["error"]["code"] for row in rows if row["error"]} == {"model_not_found"}
    assert json.loads(fleet.producer("status", batch_id, "--json").stdout)["status"] == "completed"
    # A completed batch is not taken up by resume, but its rows are put where they are wanted.
    late = fleet.folder / "late.jsonl"
    again = fleet.producer("resume", batch_id, "-o", str(late), "--json")
    assert again.code == 3
    assert late.read_bytes() == output.read_bytes()
    assert json.loads(again.stdout)["output_file_id"] == str(late)
    assert "is completed already" in fleet.producer("cancel", batch_id).stderr
    # Their input is the only file that is nowhere else.
    for command in ("resume", "retry", "fetch"):
        refused = fleet.producer(command, batch_id, "-o", str(path))
        assert refused.code == 2
        assert "is the input" in refused.stderr
    assert input_lines(path) == MIXED
    assert newest_run(fleet.store, read_manifest(fleet.store, batch_id)).number == 2


def test_a_later_run_can_be_cancelled_and_resumed(fleet: FleetServers) -> None:
    batch_id, _ = run_mixed(fleet)
    assert fleet.producer("retry", batch_id, "--detach").code == 0
    shown = json.loads(fleet.producer("status", batch_id, "--json").stdout)
    assert shown["status"] == "in_progress"
    assert shown["request_counts"] == {"total": 40, "completed": 30, "failed": 0}

    assert fleet.producer("cancel", batch_id).code == 0
    wait_until(lambda: read_end(fleet.store, batch_id, 2) is not None, 30, "the second run is closed")
    assert json.loads(fleet.producer("status", batch_id, "--json").stdout)["status"] == "cancelled"
    fleet.worker(model="later-model")

    run = fleet.producer("resume", batch_id)

    assert run.code == 0, run.stderr
    assert_complete(MIXED, (fleet.folder / "in.out.jsonl").read_bytes())


def test_a_later_run_goes_on_after_the_broker_was_emptied(fleet: FleetServers) -> None:
    """The aggregator that closed the first run finds the second one in the store."""
    batch_id, _ = run_mixed(fleet)
    assert fleet.producer("retry", batch_id, "--detach").code == 0
    fleet.client.flushall()
    resumed = fleet.start_producer("resume", batch_id)
    wait_until(lambda: "attached" in resumed.stderr, 30, "the run is attached to")
    fleet.worker(model="later-model")

    assert resumed.wait(60).code == 0
    assert_complete(MIXED, (fleet.folder / "in.out.jsonl").read_bytes())


def test_a_producer_that_slept_does_not_put_older_rows_in_place(fleet: FleetServers) -> None:
    """It waits for run 2 and sleeps over its end, and over the whole of run 3."""
    batch_id, _ = run_mixed(fleet)
    sleeper = fleet.start_producer("retry", batch_id)
    wait_until(lambda: fleet.waiting() >= 10, 20, "the second run is published")
    sleeper.send(signal.SIGSTOP)
    worker = fleet.worker()
    wait_until(lambda: read_end(fleet.store, batch_id, 2) is not None, 30, "the second run is closed")
    worker.stop()
    fleet.worker(model="later-model")
    assert fleet.producer("retry", batch_id).code == 0

    sleeper.send(signal.SIGCONT)

    run = sleeper.wait(30)
    assert run.code == 5, run.stderr
    assert "run 3 is newer" in run.stderr
    assert f"producer fetch {batch_id}" in run.stderr
    assert_complete(MIXED, (fleet.folder / "in.out.jsonl").read_bytes())


def test_a_local_batch_is_retried_on_this_machine(server: str, tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    try:
        path, output = workplace.write("in.jsonl", MIXED), workplace.folder / "in.out.jsonl"
        first = workplace.producer(
            "submit", str(path), "--local", "--engine", "echo", "--model", "test-model", "--json"
        )
        assert first.code == 3, first.stderr
        batch_id = json.loads(first.stdout)["id"]

        retry = workplace.producer("retry", batch_id, "--local", "--engine", "echo", "--model", "later-model")

        assert retry.code == 0, retry.stderr
        assert_complete(MIXED, output.read_bytes())
    finally:
        workplace.close()


@pytest.fixture
def failed_local(workplace: Workplace) -> tuple[Workplace, str]:
    """A local batch that is closed, with failed rows."""
    path = workplace.write("in.jsonl", MIXED)
    first = workplace.producer("submit", str(path), "--local", "--engine", "echo", "--model", "test-model", "--json")
    assert first.code == 3, first.stderr
    return workplace, json.loads(first.stdout)["id"]


def local_status(workplace: Workplace, batch_id: str) -> str:
    status: str = json.loads(workplace.producer("status", batch_id, "--local", "--json").stdout)["status"]
    return status


@pytest.mark.parametrize("command", ["retry", "resume"])
def test_a_local_set_up_that_cannot_work_leaves_the_batch_closed(
    failed_local: tuple[Workplace, str], command: str
) -> None:
    workplace, batch_id = failed_local
    if command == "resume":
        store = LocalStore(workplace.state / "batch-fleet")
        end = store.root / layout.end(batch_id, FIRST_RUN)
        end.write_text(end.read_text("utf-8").replace("completed", "expired", 1), "utf-8")
        output = store.root / layout.output(batch_id, FIRST_RUN)
        output.write_text(output.read_text("utf-8").replace('"model_not_found"', '"expired"'), "utf-8")
    before = local_status(workplace, batch_id)
    local = ("--local", "--engine", "echo", "--model", "later-model", "-o", str(workplace.folder / "new.jsonl"))

    failed = workplace.producer(command, batch_id, *local, "--", "--no-such-flag")

    assert failed.code == 2, failed.stderr
    assert local_status(workplace, batch_id) == before
    assert list(workplace.state.glob("batch-fleet/local/*")) == []
    assert not (workplace.folder / "new.jsonl").exists()
    fetched = workplace.producer("fetch", batch_id, "--local", "-o", str(workplace.folder / "fetched.jsonl"))
    assert fetched.code == {"retry": 3, "resume": 4}[command], fetched.stderr
    # The corrected command runs it.
    assert workplace.producer(command, batch_id, *local).code == 0
    assert_complete(MIXED, (workplace.folder / "new.jsonl").read_bytes())


def test_ctrl_c_before_a_local_retry_has_begun_changes_nothing(failed_local: tuple[Workplace, str]) -> None:
    workplace, batch_id = failed_local
    output = workplace.folder / "new.jsonl"
    output.write_bytes(b"kept\n")
    retry = workplace.start_producer(
        "retry", batch_id, "--local", "--engine", "echo", "--model", "later-model", "-o", str(output)
    )
    wait_until((workplace.state / "batch-fleet" / "local" / batch_id / "lock").exists, 20, "it starts")

    retry.send(signal.SIGINT)

    run = retry.wait(40)
    assert run.code == 130, run.stderr
    assert "nothing was run again" in run.stderr
    assert output.read_bytes() == b"kept\n"
    assert local_status(workplace, batch_id) == "completed"


# -- batches that go wrong, and batches that are over ------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "at_least"), [("5", 5), ("10%", 20)])
def test_a_batch_that_goes_wrong_is_ended_early(fleet: FleetServers, limit: str, at_least: int) -> None:
    """Finished rows stay, the rest is cancelled, and resume runs exactly that."""
    lines = [
        chat_line(f"r{n:03d}", f"text {n}", model="later-model" if n % 2 else "test-model", echo={"latency_s": 0.05})
        for n in range(200)
    ]
    path, output = fleet.write("in.jsonl", lines), fleet.folder / "in.out.jsonl"
    worker = fleet.worker("--max-inflight", "4")

    run = fleet.producer("submit", str(path), "--fail-after", limit)

    assert run.code == 4, run.stderr
    (batch_id,) = fleet.batch_ids()
    assert json.loads(fleet.producer("status", batch_id, "--json").stdout)["status"] == "failed"
    rows = assert_complete(lines, output.read_bytes(), {f"r{n:03d}": "any" for n in range(200)})
    codes = [row["error"]["code"] if row["error"] else "" for row in rows]
    assert codes.count("model_not_found") >= at_least
    assert codes.count("cancelled") > 100
    assert set(codes) == {"", "model_not_found", "cancelled"}

    worker.stop()
    fleet.worker(model="later-model")
    assert fleet.producer("resume", batch_id).code == 3
    again = assert_complete(lines, output.read_bytes(), {f"r{n:03d}": "any" for n in range(200)})
    for code, old, new in zip(codes, rows, again, strict=True):
        assert (old == new) is (code != "cancelled")


def test_closed_batches_are_purged_when_they_are_old_enough(fleet: FleetServers) -> None:
    """Open ones never, and nothing that is younger."""
    path = fleet.write("in.jsonl", chat_lines(3))
    fleet.worker()
    assert fleet.producer("submit", str(path)).code == 0
    (closed,) = fleet.batch_ids()
    held = fleet.write("held.jsonl", [chat_line("held", "x", echo={"latency_s": 300})])
    assert fleet.producer("submit", str(held), "--detach").code == 0
    (opened,) = fleet.batch_ids() - {closed}

    assert fleet.producer("purge", "--older-than", "1h").stdout == b""
    wait_until(lambda: fleet.producer("purge", "--older-than", "1s", "--dry-run").stdout != b"", 10, "a second passed")
    assert fleet.batch_ids() == {closed, opened}

    purged = fleet.producer("purge", "--older-than", "1s")

    assert purged.stdout.decode().split() == [closed]
    assert fleet.batch_ids() == {opened}
    assert fleet.producer("status", closed).code == 1
    # The same file is a batch of its own again.
    assert fleet.producer("submit", str(path)).code == 0
    assert fleet.producer("cancel", opened).code == 0
    wait_until(lambda: fleet.is_closed(opened), 20, "the held batch is closed")


def test_a_purge_that_dies_leaves_nothing_that_is_run_again(closed: tuple[LocalStore, Run]) -> None:
    """The manifest goes first; what is left is no batch."""
    store, run = closed
    purge = control.purge(store, 0)
    assert next(purge) == run.batch_id
    store.remove(layout.manifest(run.batch_id))  # what it does next, and then dies

    assert list(control.manifests(store)) == []
    assert store.exists(layout.shard_input(run.batch_id, 0))


def test_a_batch_that_is_being_purged_is_not_run_again(closed: tuple[LocalStore, Run]) -> None:
    store, run = closed
    purge = control.purge(store, 0)
    assert next(purge) == run.batch_id

    # Whoever read the newest run before, and whoever reads it now.
    with pytest.raises(NoSuchBatchError, match="purged"):
        start_run(store, run, [1])
    with pytest.raises(NoSuchBatchError, match="purged"):
        newest_run(store, run.manifest)
    assert list(see_all(store, None, local=False)) == []

    assert list(purge) == []
    with pytest.raises(NoSuchBatchError, match="removed"):
        start_run(store, run, [1])
    assert not list(store.names(layout.BATCHES))


def test_a_batch_that_is_run_again_is_not_purged(
    closed: tuple[LocalStore, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry comes between the purge's look at the newest run and its first step."""
    store, run = closed

    def purge_late(store: LocalStore, seen: Run) -> bool:
        start_run(store, seen, [1])
        return start_purge(store, seen)

    monkeypatch.setattr(control, "start_purge", purge_late)

    assert list(control.purge(store, 0)) == []
    assert newest_run(store, read_manifest(store, run.batch_id)).number == 2


def test_a_purge_that_died_is_finished_by_the_next_one(closed: tuple[LocalStore, Run]) -> None:
    store, run = closed
    assert next(control.purge(store, 0)) == run.batch_id  # and dies

    assert list(control.purge(store, 10**9)) == [run.batch_id]

    assert not list(store.names(layout.BATCHES))


def test_a_dry_run_of_a_purge_leaves_the_batch_to_be_run_again(closed: tuple[LocalStore, Run]) -> None:
    store, run = closed

    assert list(control.purge(store, 0, dry_run=True)) == [run.batch_id]

    assert start_run(store, run, [1]).number == 2


def test_who_waits_for_a_batch_that_is_removed_is_told(fleet: FleetServers) -> None:
    path, output = fleet.write("in.jsonl", chat_lines(3)), fleet.folder / "in.out.jsonl"
    waiting = fleet.start_producer("submit", str(path))
    wait_until(lambda: fleet.waiting() > 0, 30, "the batch is published")
    (batch_id,) = fleet.batch_ids()

    fleet.store.remove(layout.batch(batch_id))

    run = waiting.wait(20)
    assert run.code == 1, run.stderr
    assert "was removed from" in run.stderr
    assert output.read_bytes() == b""
    fleet.client.flushall()


@pytest.mark.parametrize("replace", [True, False])
def test_fetching_a_batch_that_is_gone_keeps_the_file(closed: tuple[LocalStore, Run], replace: bool) -> None:
    """It may be the only copy of the rows by then."""
    store, run = closed
    path = store.root.parent / "mine.jsonl"
    path.write_bytes(b"kept\n")
    store.remove(layout.manifest(run.batch_id))
    store.remove(layout.output(run.batch_id, run.number))  # purge got so far after fetch had looked at the end

    with closing(Destination(str(path), None, replace=replace)) as destination, pytest.raises(NoSuchBatchError):
        control.fetch(store, run, destination)

    assert path.read_bytes() == b"kept\n"


# -- what can die in between -------------------------------------------------------------------------------------------


@pytest.fixture
def closed(tmp_path: Path) -> tuple[LocalStore, Run]:
    """A closed first run of 20 requests: all rows failed but the even ones."""
    store, source = LocalStore(tmp_path / "store"), tmp_path / "in.jsonl"
    source.write_text("".join(f"{line}\n" for line in chat_lines(20)))
    manifest = control.write_batch(store, intake.check("in", str(source)), digest="d", max_shard_size=16)
    run = first_run(manifest)
    with store.writing(layout.output(run.batch_id, FIRST_RUN)) as out:
        for n in range(20):
            out.write(row(n, failed=n % 2 == 1, text="old"))
    counts = RequestCounts(total=20, completed=10, failed=10)
    write_end(store, run.batch_id, FIRST_RUN, RunEnd(status=BatchStatus.COMPLETED, at=1, counts=counts, usage=Usage()))
    return store, run


def row(n: int, *, failed: bool, text: str) -> bytes:
    """A row with its LF."""
    body = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "text": text}
    error = {"code": "engine_error", "message": text} if failed else None
    return json.dumps({"id": n, "response": {"body": body}, "error": error}, separators=(",", ":")).encode() + b"\n"


def test_a_later_run_is_assembled_again_after_a_death_before_its_end(
    broker_server: BrokerServer, closed: tuple[LocalStore, Run]
) -> None:
    """The output was put in place, the end was not: assembling once more gives the same output."""
    store, first = closed
    ledger = Ledger(broker_server.client)
    run = start_run(store, first, [1, 3, 17])
    for shard in run.shards:
        with store.writing(layout.part(run.batch_id, run.number, shard.number)) as part:
            for index in shard.indexes:
                part.write(row(index, failed=index == 3, text="new"))
    aggregator = Aggregator(None, store, ledger, window=100, routes=Routes())  # type: ignore[arg-type]  # it sends nothing

    end = aggregator.assemble_batch(run.batch_id, 2)
    output = store.read(layout.output(run.batch_id, 2))
    (store.root / layout.end(run.batch_id, 2)).unlink()
    again = aggregator.assemble_batch(run.batch_id, 2)

    assert end is not None
    assert again is not None
    assert end.counts == again.counts == RequestCounts(total=20, completed=12, failed=8)
    assert end.usage == again.usage == Usage.of({"": (2, 4)})
    assert output == store.read(layout.output(run.batch_id, 2))
    texts = [json.loads(line)["response"]["body"]["text"] for line in output.splitlines()]
    assert [n for n, text in enumerate(texts) if text == "new"] == [1, 3, 17]


def test_of_two_that_start_a_run_the_first_wins(closed: tuple[LocalStore, Run]) -> None:
    store, first = closed

    one, two = start_run(store, first, [1, 3]), start_run(store, first, [5])

    assert one == two
    assert newest_run(store, first.manifest) == one


def test_a_run_that_is_being_started_is_not_there_yet(closed: tuple[LocalStore, Run]) -> None:
    """Its folder is made before its record."""
    store, first = closed
    (store.root / layout.start(first.batch_id, 2)).parent.mkdir()

    assert newest_run(store, first.manifest) == first
    assert state_of(store, None, first.manifest).status is BatchStatus.COMPLETED
