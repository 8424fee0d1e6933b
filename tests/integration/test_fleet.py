"""A fleet of a broker, an aggregator and workers, and the producer's commands around it."""

from __future__ import annotations

import json
import pickle
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from common import layout
from tests.conftest import CASES
from tests.invariants import assert_complete, chat_line, chat_lines, input_lines, rows_of
from tests.servers import FleetServers, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Result

#: Requests that may be unfinished, and requests of a shard: small, so that a batch needs many feeds.
WINDOW, SHARD = 32, 16

OPENAI_BATCH = {
    "id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window", "status", "output_file_id",
    "error_file_id", "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at", "request_counts", "usage", "metadata",
}  # fmt: skip


@pytest.fixture(scope="module")
def paced(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServers]:
    """A fleet with a small window: an aggregator and two workers."""
    servers = FleetServers(
        tmp_path_factory.mktemp("paced"), FLEET_WINDOW=str(WINDOW), FLEET_SHARD_SIZE=str(SHARD), FLEET_DRAIN_S="0"
    )
    try:
        servers.aggregator()
        # Few in flight: a window is never less than twice what the live workers take.
        servers.worker("--max-inflight", "8")
        servers.worker("--max-inflight", "8")
        yield servers
    finally:
        servers.close()


def one_line(run: Result) -> str:
    """The one line that a command printed for people, which is no traceback."""
    assert "Traceback" not in run.stderr
    (line,) = run.stderr.splitlines()
    return line


def detach(servers: FleetServers, path: Path, *options: str) -> str:
    """Submit and leave; returns the batch id, which is all that stdout holds."""
    run = servers.producer("submit", str(path), "--detach", *options)
    assert run.code == 0, run.stderr
    batch_id = run.stdout.decode().removesuffix("\n")
    return layout.checked_batch_id(batch_id)


def fetched(servers: FleetServers, batch_id: str) -> bytes:
    wait_until(lambda: servers.is_closed(batch_id), 60, "the batch is closed")
    output = servers.folder / f"{batch_id}.fetched"
    assert servers.producer("fetch", batch_id, "-o", str(output)).code in (0, 3, 4)
    return output.read_bytes()


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_detached_batch_is_listed_and_fetched(paced: FleetServers) -> None:
    lines = [
        *chat_lines(20),
        chat_line("bad", "x", model="no-such-model"),
        chat_line("slow", "y", echo={"latency_s": 3}),
    ]
    path = paced.write("detached.jsonl", lines)
    batch_id = detach(paced, path, "--new")
    assert not (paced.folder / "detached.out.jsonl").exists()

    # While it runs, it is open and cannot be fetched.
    output, errors = paced.folder / "detached.fetched", paced.folder / "detached.errors"
    early = paced.producer("fetch", batch_id, "-o", str(output))
    if not paced.is_closed(batch_id):  # A busy machine may be late.
        assert early.code == 1
        assert "open" in early.stderr
        assert not output.exists()

    wait_until(lambda: paced.is_closed(batch_id), 60, "the batch is closed")
    listed = paced.producer("list")
    status = paced.producer("status", batch_id)
    shown = paced.producer("status", batch_id, "--json")
    run = paced.producer("fetch", batch_id, "-o", str(output), "--errors", str(errors))

    assert (listed.code, status.code, shown.code, run.code) == (0, 0, 0, 3)
    (mine,) = (line for line in listed.stdout.decode().splitlines() if batch_id in line)
    for line in (mine, status.stdout.decode()):
        assert "completed" in line
        assert "22/22" in line
        assert "1 failed" in line
    batch = json.loads(shown.stdout)
    assert set(batch) == OPENAI_BATCH
    assert batch["request_counts"] == {"total": 22, "completed": 21, "failed": 1}
    rows = assert_complete(lines, output.read_bytes(), {"bad": "err"})
    assert [row["custom_id"] for row in rows_of(errors.read_bytes())] == ["bad"]
    assert rows[20]["error"]["code"] == "model_not_found"
    # And it goes where other commands read on.
    piped = paced.producer("fetch", batch_id, "-o", "-")
    assert (piped.code, piped.stdout) == (3, output.read_bytes())
    fetch = f"{sys.executable} -m producer fetch {batch_id} -o /dev/stdout"
    for command, expected in (
        (f"echo first > o; {fetch} >> o; cat o", b"first\n" + piped.stdout),
        (f"set -o pipefail; {fetch} | head -n 0; echo $?", b"141\n"),
    ):
        shell = subprocess.run(
            ["bash", "-c", command], cwd=paced.folder, env=paced.environment, capture_output=True, check=False
        )
        assert shell.stdout == expected, shell.stderr
        assert b"error" not in shell.stderr
    # A closed one takes nothing; /dev/null, which stands in for it, does.
    for name, code, said in (
        ("-", 5, "error: - cannot be written: the standard output is closed"),
        ("/dev/fd/1", 5, "error: /dev/fd/1 cannot be written: the standard output is closed"),
        ("/dev/null", 3, ""),
    ):
        command = f"exec {sys.executable} -m producer fetch {batch_id} -o {name} >&-"
        closed = subprocess.run(
            ["bash", "-c", command], cwd=paced.folder, env=paced.environment, stderr=subprocess.PIPE, check=False
        )
        assert (closed.returncode, said in closed.stderr.decode()) == (code, True), closed.stderr


def test_the_final_batch_object_is_all_that_stdout_holds(paced: FleetServers) -> None:
    lines = [*chat_lines(3), chat_line("bad", "x", model="no-such-model")]
    path, output = paced.write("object.jsonl", lines), paced.folder / "object.out"
    errors = paced.folder / "object.errors"

    run = paced.producer("submit", str(path), "-o", str(output), "--errors", str(errors), "--json")

    assert run.code == 3, run.stderr
    batch = json.loads(run.stdout)
    assert set(batch) == OPENAI_BATCH
    assert (batch["object"], batch["status"], batch["endpoint"]) == ("batch", "completed", "/v1/chat/completions")
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert batch["created_at"] <= batch["completed_at"]
    assert (batch["output_file_id"], batch["error_file_id"]) == (str(output), str(errors))
    usage = [row["response"]["body"]["usage"] for row in rows_of(output.read_bytes()) if row["error"] is None]
    assert batch["usage"]["input_tokens"] == sum(each["prompt_tokens"] for each in usage)
    assert batch["usage"]["output_tokens"] == sum(each["completion_tokens"] for each in usage)
    assert [row["custom_id"] for row in rows_of(errors.read_bytes())] == ["bad"]


def test_status_shows_the_fleet(paced: FleetServers) -> None:
    run = paced.producer("status")

    assert run.code == 0
    workers = [line for line in run.stdout.decode().splitlines() if line.startswith("worker ")]
    assert len(workers) == 2
    assert all("ready" in line and "test-model" in line for line in workers)
    assert json.loads(paced.producer("status", "--json").stdout)["object"] == "list"


def test_check_validates_and_does_nothing_else(paced: FleetServers) -> None:
    before = paced.batch_ids()

    good = paced.producer("check", str(CASES / "base40.jsonl"), FLEET_BROKER_URL="", FLEET_STORE="")
    bad = paced.producer("check", str(CASES / "I05.jsonl"))

    assert (good.code, bad.code) == (0, 2)
    assert "40 requests" in one_line(good)
    assert ":3: " in one_line(bad)
    assert paced.batch_ids() == before


def test_a_batch_that_does_not_exist_is_one_sentence(paced: FleetServers) -> None:
    for unknown in (layout.new_batch_id(), "../../etc/passwd"):
        for command in (("status", unknown), ("fetch", unknown, "-o", str(paced.folder / "never.out"))):
            run = paced.producer(*command)
            assert run.code in (1, 2)
            assert unknown in one_line(run)
    assert not (paced.folder / "never.out").exists()


def test_without_a_broker_the_address_and_both_ways_out_are_named(paced: FleetServers) -> None:
    port, before = free_port(), paced.batch_ids()
    path, output = paced.write("nobroker.jsonl", chat_lines(1)), paced.folder / "nobroker.out"

    run = paced.producer(
        "submit", str(path), "-o", str(output), FLEET_BROKER_URL=f"redis://user:hunter2@127.0.0.1:{port}/0"
    )

    assert run.code == 1
    said = one_line(run)
    assert f"127.0.0.1:{port}" in said
    assert "redis-server" in said
    assert "--local" in said
    assert "hunter2" not in run.stderr
    assert not output.exists()
    assert paced.batch_ids() == before


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@127.0.0.1:port/0", "http://u:hunter2@h/", "hunter2", "redis://:hun#ter2@h"]
)
def test_a_broker_url_that_cannot_be_used_is_refused_without_its_password(paced: FleetServers, url: str) -> None:
    path = paced.write("badurl.jsonl", chat_lines(1))

    run = paced.producer("submit", str(path), FLEET_BROKER_URL=url)

    assert run.code in (1, 2)
    one_line(run)
    assert "hunter2" not in run.stderr
    assert ":hun" not in run.stderr


def test_without_a_store_a_submit_is_refused(paced: FleetServers) -> None:
    path = paced.write("nostore.jsonl", chat_lines(1))

    run = paced.producer("submit", str(path), FLEET_STORE="")

    assert run.code == 2
    assert "FLEET_STORE" in one_line(run)


def test_options_of_local_mode_are_refused_in_a_fleet(paced: FleetServers) -> None:
    path = paced.write("localonly.jsonl", chat_lines(1))

    for options in (("--model", "m"), ("--engine", "echo"), ("--workers", "2"), ("--", "--dtype", "float32")):
        run = paced.producer("submit", str(path), *options)
        assert run.code == 2
        assert "--local" in one_line(run)


# -- attaching ---------------------------------------------------------------------------------------------------------


def test_who_attaches_is_told_which_limits_are_not_the_batchs(paced: FleetServers) -> None:
    """The batch keeps what it was submitted with; whoever asks for a deadline must not think that there is one."""
    path = paced.write("limits.jsonl", chat_lines(40, echo={"latency_s": 3.0}))
    first = paced.producer("submit", str(path), "--detach", "--fail-after", "10%")
    same = paced.producer("submit", str(path), "--detach", "--fail-after", "4")
    others = paced.producer("submit", str(path), "--detach", "--fail-after", "5", "--expires", "1h")

    assert (first.code, same.code, others.code) == (0, 0, 0), others.stderr
    assert first.stdout == same.stdout == others.stdout
    assert "not applied" not in first.stderr + same.stderr
    assert "--expires is not applied: the batch was submitted without it" in others.stderr
    assert "--fail-after is not applied: the batch was submitted with 4 rows" in others.stderr
    paced.producer("cancel", first.stdout.decode().strip())


def test_ctrl_c_leaves_the_batch_to_the_fleet_and_the_same_submit_attaches(paced: FleetServers) -> None:
    lines = [*chat_lines(20), chat_line("slow", "y", echo={"latency_s": 5.0})]
    path, output = paced.write("attach.jsonl", lines), paced.folder / "attach.out"
    process = paced.start_producer("submit", str(path), "-o", str(output))
    wait_until(lambda: output.exists() and output.stat().st_size > 0, 60, "the first shard is in the output")

    process.send(signal.SIGINT)
    first = process.wait(10)

    assert first.code == 130, first.stderr
    assert "Traceback" not in first.stderr
    batch_id = first.stderr.split(":")[0]
    assert f"producer fetch {batch_id}" in first.stderr
    before = paced.batch_ids()
    assert batch_id in before

    second = paced.producer("submit", str(path), "-o", str(output))

    assert second.code == 0, second.stderr
    assert batch_id in second.stderr
    assert paced.batch_ids() == before
    assert_complete(lines, output.read_bytes())


def test_a_batch_of_a_moment_shows_no_rate(paced: FleetServers) -> None:
    """Nor does one that was ended: its other rows nobody ran."""
    short = paced.producer("submit", str(paced.write("short.jsonl", chat_lines(2))), "-o", str(paced.folder / "s.out"))
    lines = chat_lines(40, echo={"latency_s": 3.0})
    ended = paced.producer(
        "submit", str(paced.write("ended.jsonl", lines)), "-o", str(paced.folder / "e.out"), "--expires", "2s"
    )

    assert (short.code, ended.code) == (0, 4)
    for run in (short, ended):
        (said,) = (line for line in run.stderr.splitlines() if " in all" in line)
        took_s = float(re.search(r"([0-9.]+) s in all", said)[1])
        assert "requests/s" not in said or (run is short and took_s >= 1.0), said  # a busy machine


def test_new_forces_a_fresh_batch(paced: FleetServers) -> None:
    path = paced.write("new.jsonl", [*chat_lines(1), chat_line("slow", "y", echo={"latency_s": 300.0})])

    first, second, third = detach(paced, path), detach(paced, path), detach(paced, path, "--new")

    assert first == second
    assert first != third
    for batch_id in (first, third):
        assert paced.producer("cancel", batch_id).code == 0
        assert len(fetched(paced, batch_id).splitlines()) == 2


def test_a_completed_batch_is_never_reused(paced: FleetServers) -> None:
    path = paced.write("again.jsonl", chat_lines(2))
    first = detach(paced, path)
    wait_until(lambda: paced.is_closed(first), 60, "the batch is closed")

    second = detach(paced, path)

    assert first != second
    assert_complete(input_lines(path), fetched(paced, second))


def test_two_producers_do_not_mix_their_rows_in_one_output(paced: FleetServers) -> None:
    path = paced.write("lock.jsonl", [*chat_lines(1), chat_line("slow", "y", echo={"latency_s": 4.0})])
    other, output = paced.write("lock2.jsonl", chat_lines(2)), paced.folder / "lock.out"
    process = paced.start_producer("submit", str(path), "-o", str(output))
    wait_until(output.exists, 60, "the output is open")

    run = paced.producer("submit", str(other), "-o", str(output))

    assert run.code == 2, run.stderr
    assert "another producer" in one_line(run)
    assert process.wait(30).code == 0
    assert_complete(input_lines(path), output.read_bytes())


def test_batches_with_equal_ids_do_not_mix_their_answers(paced: FleetServers) -> None:
    files = [[chat_line(f"same{n}", f"{name} {n}") for n in range(60)] for name in ("red", "blue")]
    outputs = [paced.folder / f"equal{number}.out" for number in range(2)]
    processes = [
        paced.start_producer("submit", str(paced.write(f"equal{number}.jsonl", lines)), "-o", str(outputs[number]))
        for number, lines in enumerate(files)
    ]

    for process, lines, output in zip(processes, files, outputs, strict=True):
        assert process.wait(60).code == 0
        assert_complete(lines, output.read_bytes())


# -- pacing ------------------------------------------------------------------------------------------------------------


def test_workers_and_aggregator_feed_a_batch_whose_producer_left(paced: FleetServers) -> None:
    lines = chat_lines(400)

    batch_id = detach(paced, paced.write("feed.jsonl", lines))

    assert_complete(lines, fetched(paced, batch_id))


def test_never_more_requests_are_out_than_the_window_allows(paced: FleetServers) -> None:
    # Long enough to be seen: a producer takes a second to leave.
    lines = chat_lines(200, echo={"latency_s": 0.5})
    batch_id = detach(paced, paced.write("window.jsonl", lines))
    seen = []

    def look() -> bool:
        progress = paced.ledger.progress(batch_id, 1)
        assert progress is not None
        seen.append(min(progress.frontier * SHARD, progress.total) - progress.finished)
        return paced.is_closed(batch_id)

    wait_until(look, 60, "the batch is closed")

    # A whole shard is published while the window has room for one request.
    assert WINDOW // 2 < max(seen) < WINDOW + SHARD
    assert_complete(lines, fetched(paced, batch_id))


def test_a_straggler_does_not_stop_the_requests_behind_its_shard(paced: FleetServers) -> None:
    lines = [chat_line("straggler", "late", echo={"latency_s": 8.0}), *chat_lines(200)]
    batch_id = detach(paced, paced.write("straggler.jsonl", lines))

    wait_until(lambda: paced.finished(batch_id) == 200, 60, "all others are recorded")

    assert not paced.store.exists(layout.part(batch_id, 1, 0))
    assert_complete(lines, fetched(paced, batch_id))


# -- safety ------------------------------------------------------------------------------------------------------------


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_a_pickled_message_runs_no_code_and_stops_no_worker(fleet: FleetServers) -> None:
    fleet.aggregator()
    worker = fleet.worker()
    made = fleet.folder / "made-by-pickle"
    lines = chat_lines(3)
    batch_id = detach(fleet, fleet.write("p.jsonl", lines))
    assert_complete(lines, fetched(fleet, batch_id))
    message = {
        "body": pickle.dumps(((), {"x": Touch(made)}, {}), protocol=0).decode("ascii"),
        "content-encoding": "utf-8",
        "content-type": "application/x-python-serialize",
        "headers": {"lang": "py", "task": "fleet.run_request", "id": "p", "argsrepr": "-", "kwargsrepr": "-"},
        "properties": {
            "delivery_tag": "p",
            "delivery_info": {"exchange": "", "routing_key": "gpu"},
            "body_encoding": "utf-8",
        },
    }

    fleet.client.lpush("gpu", json.dumps(message))

    wait_until(lambda: fleet.waiting() == 0 and fleet.taken() == 0, 30, "the message is gone")
    batch_id = detach(fleet, fleet.write("q.jsonl", lines))
    assert_complete(lines, fetched(fleet, batch_id))
    assert worker.running
    assert not made.exists()
