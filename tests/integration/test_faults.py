"""Faults that testers found: each stays a test of its kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest

from common import layout
from common.batch import first_run
from common.errors import InputRefusedError
from common.ledger import Ledger
from common.runs import read_manifest, reconcile, restore
from common.store import LocalStore
from producer import control, intake
from tests.invariants import assert_complete, chat_line, chat_lines, input_lines
from tests.servers import MODEL, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import BrokerServer, FleetServers, Workplace

ECHO = ("--local", "--engine", "echo", "--model", MODEL)


def written(store: LocalStore, path: Path) -> str:
    """A durable batch of the lines of a file; returns its id."""
    checked = intake.check(str(path), str(path))
    return control.write_batch(store, checked, digest="d", max_shard_size=16).batch_id


def test_a_part_whose_sealer_died_before_it_noted_it_is_noted_by_the_next_producer(
    broker_server: BrokerServer, tmp_path: Path
) -> None:
    """Else the batch is never seen as complete: every part is there, one of them unknown to the ledger."""
    store, ledger = LocalStore(tmp_path / "store"), Ledger(broker_server.client)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line + "\n" for line in chat_lines(20)))
    batch_id = written(store, source)
    run = first_run(read_manifest(store, batch_id))
    restore(store, ledger, run, window=100)
    with store.writing(layout.part(batch_id, 1, 0)) as part:
        part.write(b"{}\n" * 16)
    assert not ledger.is_sealed(batch_id, 1, 0)

    reconcile(store, ledger, run)

    assert ledger.is_sealed(batch_id, 1, 0)
    assert not ledger.is_sealed(batch_id, 1, 1)


def test_a_file_that_changes_between_the_passes_leaves_no_prompt_behind(tmp_path: Path) -> None:
    store, source = LocalStore(tmp_path / "store"), tmp_path / "in.jsonl"
    source.write_text("".join(line + "\n" for line in chat_lines(20)))
    checked = intake.check(str(source), str(source))
    with source.open("a") as file:
        file.write(chat_line("late", "late") + "\n")

    with pytest.raises(InputRefusedError, match="the file changed"):
        control.write_batch(store, checked, digest="d", max_shard_size=16)

    assert list(store.names(layout.BATCHES)) == []


def test_an_output_that_stdin_is_read_from_is_refused(workplace: Workplace) -> None:
    source = workplace.write("in.jsonl", chat_lines(3))
    before = source.read_bytes()

    with source.open("rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "producer", "submit", "-", "-o", str(source), *ECHO],
            stdin=stdin, env=workplace.environment, cwd=workplace.folder, capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    assert done.returncode == 2
    assert b"is the input" in done.stderr
    assert source.read_bytes() == before


def test_an_output_that_is_removed_while_it_grows_is_not_called_written(workplace: Workplace) -> None:
    """Its own exit code, and how to get the rows."""
    source = workplace.write(
        "in.jsonl", [*chat_lines(16), *(chat_line(f"s{k}", "s", echo={"latency_s": 3}) for k in range(4))]
    )
    output = workplace.folder / "out.jsonl"
    producer = workplace.start_producer("submit", str(source), "-o", str(output), *ECHO)
    wait_until(lambda: output.exists() and output.stat().st_size, 60, "the output grows")

    output.unlink()
    result = producer.wait(60)

    assert result.code == 5
    assert "was removed or replaced" in result.stderr
    assert "producer fetch --local" in result.stderr


def test_fetch_never_empties_the_stored_output(workplace: Workplace) -> None:
    source = workplace.write("in.jsonl", chat_lines(3))
    workplace.producer("submit", str(source), "-o", str(workplace.folder / "out.jsonl"), *ECHO)
    (stored,) = workplace.state.rglob("output.jsonl")
    link = workplace.folder / "link.jsonl"
    link.symlink_to(stored)

    result = workplace.producer("fetch", stored.parent.name, "-o", str(link), "--local")

    assert result.code == 2
    assert stored.stat().st_size


@pytest.mark.parametrize("flag", ["--queue=other", "--loglevel", "--engine"])
def test_the_local_fleets_own_options_do_not_go_to_the_engine(workplace: Workplace, flag: str) -> None:
    """`-- --queue other` would start a worker that nobody sends to."""
    source = workplace.write("in.jsonl", chat_lines(1))

    result = workplace.producer("submit", str(source), *ECHO, "--", flag, "x")

    assert result.code == 2
    assert flag.partition("=")[0] in result.stderr


def test_a_flag_that_the_worker_refuses_is_told_by_the_producer(workplace: Workplace) -> None:
    """The reason, not the name of a log that is gone."""
    source = workplace.write("in.jsonl", chat_lines(1))

    result = workplace.producer("submit", str(source), *ECHO, "--", "--max-inflight", "many")

    assert result.code == 2
    assert "--max-inflight" in result.stderr
    assert "its log is" not in result.stderr


def test_a_batch_that_completes_while_the_fleet_is_ended_is_written_whole(workplace: Workplace) -> None:
    """Ctrl-C in the last moments: nobody would run it again, so its rows must not stay behind."""
    source = workplace.write("in.jsonl", [chat_line(f"b{k}", "b", echo={"result_bytes": 4_000_000}) for k in range(16)])
    output = workplace.folder / "out.jsonl"
    producer = workplace.start_producer("submit", str(source), "-o", str(output), *ECHO)
    wait_until(lambda: any(workplace.state.rglob("parts/.tmp-*")) or not producer.running, 60, "a part is written")

    producer.send(signal.SIGINT)
    result = producer.wait(60)

    ended = any(workplace.state.rglob("end.json"))
    assert (result.code == 0) == ended, result.stderr
    if ended:
        assert output.read_bytes().count(b"\n") == 16


def test_a_worker_that_the_broker_refuses_says_so_and_exits_2(server: str, tmp_path: Path) -> None:
    from tests.servers import FleetServers, free_port

    fleet = FleetServers(tmp_path, port=free_port(), password="right")
    try:
        url = fleet.broker.url.replace("right", "wrong")
        worker = fleet.start_worker(FLEET_BROKER_URL=url)
        result = worker.wait(60)
    finally:
        fleet.close()

    assert result.code == 2
    assert "refuses the user or password" in result.stderr
    assert "wrong" not in result.stderr


def test_an_aggregator_over_another_store_keeps_the_batchs_messages(fleet: FleetServers) -> None:
    """Its messages go on until they reach an aggregator over the right one."""
    other = fleet.folder / "other"
    other.mkdir()
    fleet.worker()
    source = fleet.write("in.jsonl", chat_lines(20))
    # While it is there a submit is refused.
    producer = fleet.start_producer("submit", str(source), "-o", str(fleet.folder / "out.jsonl"))
    wait_until(fleet.batch_ids, 30, "it is submitted")
    wrong = fleet.aggregator(FLEET_STORE=other.as_uri())
    wait_until(lambda: "there is no batch" in wrong.stderr, 60, "the wrong aggregator took a message")

    wrong.stop()
    fleet.aggregator()

    assert producer.wait(90).code == 0
    assert_complete(input_lines(source), (fleet.folder / "out.jsonl").read_bytes())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_stdout_that_is_full_is_one_sentence(workplace: Workplace) -> None:
    """And no outage: the batch has closed, and the same submit would make a new one."""
    source = workplace.write("in.jsonl", [])
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "producer", "submit", str(source), "--json", *ECHO],
            stdout=full, stderr=subprocess.PIPE, env=workplace.environment, cwd=workplace.folder, timeout=60,
            check=False,
        )  # fmt: skip

    assert done.returncode == 5
    assert b"error: standard output cannot be written: No space left on device\n" in done.stderr
    assert b"Traceback" not in done.stderr


def test_two_submits_of_one_file_at_once_are_one_batch_with_two_outputs(fleet: FleetServers) -> None:
    fleet.aggregator()
    fleet.worker()
    source = fleet.write("in.jsonl", chat_lines(200, echo={"latency_s": 5.0}))
    outputs = [fleet.folder / f"out{number}.jsonl" for number in range(2)]

    producers = [fleet.start_producer("submit", str(source), "-o", str(output)) for output in outputs]

    assert [producer.wait(90).code for producer in producers] == [0, 0]
    assert len(fleet.batch_ids()) == 1
    for output in outputs:
        assert_complete(input_lines(source), output.read_bytes())


def test_of_many_batches_of_one_digest_one_is_pointed_at(tmp_path: Path) -> None:
    """Whoever comes second learns of the first one's batch, and leaves none of its own behind."""
    store, source = LocalStore(tmp_path / "store"), tmp_path / "in.jsonl"
    source.write_text("".join(line + "\n" for line in chat_lines(20)))

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: written(store, source), range(8)))

    assert found == set(store.names(layout.BATCHES))
    assert len(found) == 1
    assert control.find_open(store, "d") == read_manifest(store, found.pop())


def test_a_fresh_batch_is_pointed_at_from_then_on(tmp_path: Path) -> None:
    """`--new` beside an open batch: the next submit attaches to the fresh one."""
    store, source = LocalStore(tmp_path / "store"), tmp_path / "in.jsonl"
    source.write_text("".join(line + "\n" for line in chat_lines(20)))
    first = written(store, source)
    checked = intake.check(str(source), str(source))

    fresh = control.write_batch(store, checked, digest="d", max_shard_size=16, new=True)

    assert fresh.batch_id != first
    assert control.find_open(store, "d") == fresh


def test_a_submit_waits_for_room_in_a_full_broker_and_says_so(fleet: FleetServers) -> None:
    """`noeviction` at its limit refuses writes; when there is room again the watchdog publishes by itself."""
    fleet.client.config_set("maxmemory-policy", "noeviction")
    fleet.client.config_set("maxmemory", "1")
    source = fleet.write("in.jsonl", chat_lines(40))

    producer = fleet.start_producer("submit", str(source), "-o", str(fleet.folder / "out.jsonl"))
    wait_until(lambda: "waiting for room" in producer.stderr, 30, "it says what it waits for")
    assert fleet.waiting() == 0
    fleet.client.config_set("maxmemory", "0")
    fleet.aggregator()
    fleet.worker()

    assert producer.wait(60).code == 0
    assert_complete(input_lines(source), (fleet.folder / "out.jsonl").read_bytes())


#: An aggregator whose disk is full: it may write no file of more than 200 kB.
SHORT_OF_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
from workers.cli import main
main(sys.argv[1:])
"""


def test_a_waiting_producer_tells_of_a_full_disk_and_the_batch_goes_on(fleet: FleetServers) -> None:
    """The aggregator's log is not where somebody who waits would look."""
    fleet.environment |= {"FLEET_LEASE_S": "3", "FLEET_TEST_SHORT_LEASES": "1"}
    aggregator = fleet.start("aggregate", "-c", SHORT_OF_DISK, "aggregate")
    fleet.worker()
    lines = [chat_line(f"b{number}", "text", echo={"result_bytes": 50_000}) for number in range(8)]
    source, output = fleet.write("in.jsonl", lines), fleet.folder / "out.jsonl"
    producer = fleet.start_producer("submit", str(source), "-o", str(output))

    said = "waiting for the aggregator: the store failed"
    wait_until(lambda: said in producer.stderr or not producer.running, 60, "the producer says what it waits for")
    psutil.Process(aggregator.pid).rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))

    result = producer.wait(60)
    assert result.code == 0, result.stderr
    assert "File too large" in result.stderr
    assert_complete(lines, output.read_bytes())


def test_an_aggregator_warns_of_a_broker_that_forgets(fleet: FleetServers) -> None:
    fleet.client.config_set("maxmemory-policy", "allkeys-lru")
    aggregator = fleet.aggregator()

    wait_until(lambda: "may evict" in aggregator.stderr, 20, "the policy is warned of")
    assert "appendonly yes" in aggregator.stderr


#: A command with its stderr closed, as by `2>&-`; what follows are its arguments.
WITHOUT_STDERR = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, '-m', *sys.argv[1:]])"


def test_a_fleet_with_closed_stderrs_starts_serves_and_waits(fleet: FleetServers) -> None:
    source = fleet.write("in.jsonl", chat_lines(3))
    commands = (("workers", "aggregate"), ("workers", "serve", MODEL, "--engine", "echo"))
    serving = [fleet.start(command[1], "-c", WITHOUT_STDERR, *command) for command in commands]

    done = fleet.start("producer", "-c", WITHOUT_STDERR, "producer", "submit", str(source)).wait(60)

    assert done.code == 0
    assert_complete(input_lines(source), (fleet.folder / "in.out.jsonl").read_bytes())
    assert [process.stop().code for process in serving] == [0, 0]
