"""Inputs from anywhere and outputs to anywhere, through the command line and a real fleet."""

from __future__ import annotations

import gzip
import json
import signal
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from common import layout
from common.store import open_store
from tests import objectstores
from tests.invariants import assert_complete, chat_line, chat_lines
from tests.objectstores import CREDENTIALS
from tests.servers import START_S, FleetServers, wait_until
from tests.webserver import Exchange, RawServer, Uploads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.objectstores import ObjectServer
    from tests.servers import Workplace

SECRET = "X-Amz-Signature=0sEcReT0%2f%3d"

LINES = [*chat_lines(40), chat_line("wrong", "text", model="no-such-model")]
PACKED = gzip.compress("".join(f"{line}\n" for line in LINES).encode())
WANTED = {"wrong": "err"}


def serving(data: bytes) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(200, body=data)


def assert_secret_nowhere(folder: Path) -> None:
    """Neither in what processes wrote nor in the store."""
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"0sEcReT0" not in path.read_bytes(), path


def test_from_a_url_to_presigned_urls(shared_fleet: FleetServers) -> None:
    uploads = Uploads(201)
    with RawServer(serving(PACKED)) as source, RawServer(uploads) as server:
        run = shared_fleet.producer(
            "submit", f"{source.url}/in.jsonl.gz?{SECRET}", "--json",
            "-o", f"{server.url}/out?{SECRET}", "--errors", f"{server.url}/errors?{SECRET}",
        )  # fmt: skip

    assert run.code == 3, run.stderr
    (out, output), (errors, failed) = uploads.stored
    assert (out, errors) == (f"/out?{SECRET}", f"/errors?{SECRET}")
    rows = assert_complete(LINES, output, WANTED)
    assert json.loads(failed) == rows[-1]
    assert len(server.seen) == 2
    batch = json.loads(run.stdout)
    assert batch["input_file_id"] == f"{source.url}/in.jsonl.gz"
    assert batch["output_file_id"] == f"{server.url}/out"
    assert batch["error_file_id"] == f"{server.url}/errors"
    assert_secret_nowhere(shared_fleet.folder)


def test_O07_an_upload_that_fails_after_the_work_keeps_the_output(shared_fleet: FleetServers) -> None:
    """O07: rows that cost GPU time are kept, their place is said, and `fetch` sends them again."""
    uploads, lines = Uploads(), chat_lines(3)
    source = shared_fleet.write("kept.jsonl", lines)
    with RawServer(lambda exchange: exchange.answer(403)) as server:
        run = shared_fleet.producer("submit", str(source), "-o", f"{server.url}/out?{SECRET}", "--json")

    assert run.code == 5, run.stderr
    assert run.stdout == b""
    assert "the server answered 403" in run.stderr
    batch_id = run.stderr.partition(":")[0]
    kept = f"{shared_fleet.store.uri}/{layout.output(batch_id, 1)}"
    assert f"is kept as {kept}" in run.stderr
    assert f"producer fetch {batch_id} -o {server.url}/out" in run.stderr
    assert_secret_nowhere(shared_fleet.folder)

    with RawServer(uploads) as server:
        again = shared_fleet.producer("fetch", batch_id, "-o", f"{server.url}/out?{SECRET}")
    assert again.code == 0, again.stderr
    ((_, output),) = uploads.stored
    assert_complete(lines, output)


def test_ctrl_c_during_an_upload_tells_the_way_to_the_rows(shared_fleet: FleetServers) -> None:
    begun, over = threading.Event(), threading.Event()

    def never_answer(exchange: Exchange) -> None:
        begun.set()
        over.wait(START_S)

    source = shared_fleet.write("interrupted.jsonl", chat_lines(2))
    with RawServer(never_answer) as server:
        producer = shared_fleet.start_producer("submit", str(source), "-o", f"{server.url}/out?{SECRET}")
        assert begun.wait(START_S)
        producer.send(signal.SIGINT)
        run = producer.wait(START_S)
        over.set()

    assert run.code == 130, run.stderr
    batch_id = run.stderr.partition(":")[0]
    assert f"{batch_id} is completed; get its rows with" in run.stderr
    assert f"producer fetch {batch_id} -o {server.url}/out" in run.stderr
    assert_secret_nowhere(shared_fleet.folder)


@pytest.mark.parametrize("name", ["s3://no-such-bucket/out", "http://127.0.0.1:1/out?sig=0sEcReT0", "s3://bucket"])
def test_O07_a_remote_destination_that_cannot_work_is_refused_at_submit(
    shared_fleet: FleetServers, moto: ObjectServer, name: str
) -> None:
    """O07: before anything is queued."""
    before = shared_fleet.batch_ids()
    source = shared_fleet.write("refused.jsonl", chat_lines(1))

    run = shared_fleet.producer("submit", str(source), "-o", name, FLEET_S3_ENDPOINT=moto.endpoint, **CREDENTIALS)

    assert run.code == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert shared_fleet.batch_ids() == before
    assert_secret_nowhere(shared_fleet.folder)


def test_an_input_that_cannot_be_read_is_one_sentence(shared_fleet: FleetServers) -> None:
    before = shared_fleet.batch_ids()
    bomb = shared_fleet.write("bomb.gz", gzip.compress(b"\0" * 2**24))
    with RawServer(lambda exchange: exchange.answer(403)) as server:
        for name, reason in (
            (f"{server.url}/in?{SECRET}", f"error: {server.url}/in: the server answered 403\n"),
            (str(bomb), f"{bomb}:1: the line is longer than 1000000 bytes (FLEET_MAX_LINE_BYTES)\n"),
        ):
            for command in ("submit", "check"):
                run = shared_fleet.producer(command, name, FLEET_MAX_LINE_BYTES="1000000")
                assert run.code == 2
                assert run.stderr.removeprefix(f"reading {server.url}/in\n") == reason
    assert shared_fleet.batch_ids() == before
    assert not (shared_fleet.folder / "bomb.out.jsonl").exists()


def test_local_mode_sends_its_output_too(workplace: Workplace) -> None:
    uploads, lines = Uploads(), chat_lines(3)
    with RawServer(serving("".join(f"{line}\n" for line in lines).encode())) as source, RawServer(uploads) as server:
        run = workplace.producer(
            "submit", f"{source.url}/in.jsonl", "--local", "--engine", "echo", "--model", "test-model",
            "-o", f"{server.url}/out?{SECRET}",
        )  # fmt: skip
        assert run.code == 0, run.stderr
        empty = workplace.producer(
            "submit", str(workplace.write("empty.jsonl", b"\n")), "--local", "--engine", "echo",
            "--model", "test-model", "-o", f"{server.url}/empty",
        )  # fmt: skip
        assert empty.code == 0, empty.stderr

    (first, second) = uploads.stored
    assert_complete(lines, first[1])
    assert second == ("/empty", b"")
    assert_secret_nowhere(workplace.folder)


def test_retried_rows_go_to_a_url_as_one_complete_output(shared_fleet: FleetServers) -> None:
    """The output of a later run is the batch's whole output, in order."""
    source = shared_fleet.write("retry.jsonl", LINES)
    first = shared_fleet.producer("submit", str(source), "-o", str(shared_fleet.folder / "retry.out"))
    batch_id = first.stderr.partition(":")[0]
    uploads = Uploads()
    with RawServer(uploads) as server:
        again = shared_fleet.producer("retry", batch_id, "-o", f"{server.url}/out?{SECRET}")

    assert again.code == 3, again.stderr
    ((_, output),) = uploads.stored
    assert_complete(LINES, output, WANTED)
    assert output.splitlines()[:-1] == (shared_fleet.folder / "retry.out").read_bytes().splitlines()[:-1]


def test_an_outage_of_s3_in_the_middle_of_a_batch_is_waited_for(
    server: str, tmp_path: Path, s3_environment: None, rclone: ObjectServer
) -> None:
    """Neither the aggregator nor the producer takes the silence for absence, and no row is lost."""
    with objectstores.rclone(tmp_path / "s3") as objects:
        bucket = objects.new_bucket()
        store = f"s3://{bucket}/fleet"
        environment = {**CREDENTIALS, "FLEET_S3_ENDPOINT": objects.endpoint, "AWS_MAX_ATTEMPTS": "1"}
        with closing(FleetServers(tmp_path / "fleet", FLEET_STORE=store, **environment)) as fleet:
            fleet.store = open_store(store, s3_endpoint=objects.endpoint)
            fleet.aggregator()
            fleet.worker("--latency-s", "4", "--max-inflight", "64")
            lines = chat_lines(48)
            producer = fleet.start_producer("submit", str(fleet.write("in.jsonl", lines)))
            wait_until(lambda: fleet.taken() == 48, START_S, "every request is running, published from the store")
            (batch_id,) = fleet.batch_ids()

            objects.kill()
            wait_until(lambda: fleet.finished(batch_id) == 48, START_S, "all rows are recorded")
            wait_until(lambda: "waiting for the store" in producer.stderr, START_S, "the producer says so")
            assert producer.running
            objects.start_again()

            assert producer.wait(60).code == 0, producer.stderr
            assert_complete(lines, (fleet.folder / "in.out.jsonl").read_bytes())


@pytest.mark.parametrize("name", ["moto", "rclone"])
def test_from_s3_to_s3_with_the_store_in_s3_and_no_folder_shared(
    server: str, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """A compressed input of S3, rows back to S3; producer, aggregator and worker share Redis and a bucket alone."""
    objects: ObjectServer = request.getfixturevalue(name)
    request.getfixturevalue("s3_environment")
    bucket = objects.new_bucket()
    objects.client.put_object(Bucket=bucket, Key="in/requests.jsonl.gz", Body=PACKED)
    environment = {
        **CREDENTIALS,
        "FLEET_STORE": f"s3://{bucket}/fleet",
        "FLEET_S3_ENDPOINT": objects.endpoint,
    }
    with closing(FleetServers(tmp_path / "fleet", **environment)) as fleet:
        fleet.store = open_store(environment["FLEET_STORE"], s3_endpoint=objects.endpoint)
        aggregator = fleet.aggregator()
        # A worker needs neither the store nor its credentials.
        fleet.worker(FLEET_STORE="", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
        producers = fleet.folder.parent / "producers"
        producers.mkdir()

        run = fleet.producer(
            "submit", f"s3://{bucket}/in/requests.jsonl.gz", "-o", f"s3://{bucket}/out.jsonl",
            "--errors", str(producers / "errors.jsonl"), TMPDIR=str(producers),
        )  # fmt: skip

        assert run.code == 3, run.stderr
        rows = assert_complete(LINES, objects.bytes_of(bucket, "out.jsonl"), WANTED)
        assert json.loads((producers / "errors.jsonl").read_bytes()) == rows[-1]
        assert not fleet.store_root.joinpath("batches").exists()
        assert ("does not keep to If-None-Match" in aggregator.stderr) == (name == "rclone")

        batch_id = next(iter(fleet.batch_ids()))
        fetched = fleet.producer("fetch", batch_id, "-o", str(producers / "again.jsonl"))
        assert fetched.code == 3, fetched.stderr
        assert (producers / "again.jsonl").read_bytes() == objects.bytes_of(bucket, "out.jsonl")
        listed = fleet.producer("list")
        assert batch_id.encode() in listed.stdout
