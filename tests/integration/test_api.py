"""The producer from Python: the same batches, rows and errors as from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import producer
from common import layout
from common.errors import InputRefusedError, NoSuchBatchError, UsageError
from common.store import LocalStore
from producer import Batch, control, submit
from producer.local import LocalFleetError
from tests.invariants import assert_complete, chat_line, chat_lines
from tests.servers import BrokerServer, FleetServers, Workplace, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def fleet(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetServers]:
    """A fleet with an aggregator and a worker; its addresses are in our own environment."""
    servers = FleetServers(tmp_path, FLEET_SHARD_SIZE="16", FLEET_DRAIN_S="0")
    for name in ("FLEET_BROKER_URL", "FLEET_STORE", "FLEET_SHARD_SIZE"):
        monkeypatch.setenv(name, servers.environment[name])
    try:
        servers.aggregator()
        servers.worker()
        yield servers
    finally:
        servers.close()


@pytest.fixture
def alone(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A place for local fleets. Their processes run where we do, so that none can be left unseen."""
    workplace = Workplace(tmp_path)
    for name in ("HOME", "TMPDIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, workplace.environment[name])
    monkeypatch.chdir(tmp_path)
    yield workplace
    monkeypatch.undo()
    workplace.close()


def as_output(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode() + b"\n" for row in rows)


def test_lines_go_in_and_rows_come_out_in_order(fleet: FleetServers) -> None:
    """Text, bytes and objects alike."""
    lines = [*chat_lines(40), chat_line("bad", "x", model="no-such-model")]
    mixed = [json.loads(line) if n % 3 == 0 else line.encode() if n % 3 == 1 else line for n, line in enumerate(lines)]

    batch = submit(mixed)
    rows = list(batch.results())

    assert_complete(lines, as_output(rows), {"bad": "err"})
    status = batch.status()
    assert (status["id"], status["status"]) == (batch.id, "completed")
    assert status["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
    assert batch.wait() == status
    assert list(Batch.find(batch.id).results()) == rows


def test_rows_come_before_the_batch_is_done(fleet: FleetServers) -> None:
    lines = [*chat_lines(16), *(chat_line(f"late{n}", "x", echo={"latency_s": 300}) for n in range(16))]
    batch = submit(lines)

    rows = batch.results()
    first = [next(rows) for _ in range(16)]

    assert [row["custom_id"] for row in first] == [json.loads(line)["custom_id"] for line in lines[:16]]
    assert batch.status()["status"] == "in_progress"
    with pytest.raises(TimeoutError):
        batch.wait(timeout_s=0.5)
    batch.cancel()
    assert {row["error"]["code"] for row in rows} == {"cancelled"}
    assert batch.wait()["status"] == "cancelled"


def test_the_same_requests_attach_to_their_open_batch(fleet: FleetServers) -> None:
    path = fleet.write("in.jsonl", [chat_line("held", "x", echo={"latency_s": 300})])

    one, two = submit(path), submit(str(path))
    three = submit(path, new=True)

    assert one.id == two.id != three.id
    for batch in (one, three):
        batch.cancel()
        batch.wait(timeout_s=30)


def test_a_retried_batch_has_the_rows_of_its_newest_run(fleet: FleetServers) -> None:
    lines = [chat_line(f"r{n}", "x", model="later" if n % 2 else "test-model") for n in range(4)]
    batch = submit(lines)
    batch.wait()
    fleet.worker(model="later")
    for process in fleet.processes[1:2]:
        process.stop()
    assert fleet.producer("retry", batch.id, "-o", str(fleet.folder / "out")).code == 0

    assert [row["error"] for row in Batch.find(batch.id).results()] == [None] * 4


def test_a_batch_that_is_purged_is_not_waited_for(fleet: FleetServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PRESENCE_S", 0.1)
    batch = submit(chat_lines(40))
    rows = batch.results()
    assert next(rows)["custom_id"] == "c00000"
    wait_until(lambda: fleet.is_closed(batch.id), 30, "the batch is closed")

    assert list(control.purge(fleet.store, 0)) == [batch.id]

    for look in (lambda: list(rows), batch.wait, batch.status):
        with pytest.raises(NoSuchBatchError, match="removed"):
            look()


def test_a_broker_that_is_away_is_no_error(server: str, tmp_path: Path) -> None:
    """The store knows the state, and keeps the wish."""
    store = LocalStore(tmp_path / "store")
    with BrokerServer(tmp_path / "b", {"PATH": os.environ.get("PATH", os.defpath)}) as broker:
        batch = submit(chat_lines(3), settings={"store": store.uri, "broker_url": broker.url})

    assert batch.status()["status"] == "in_progress"
    batch.cancel()
    assert store.exists(layout.ending(batch.id, 1))
    with pytest.raises(TimeoutError):
        batch.wait(timeout_s=0.5)


def test_what_the_command_says_is_an_exception(fleet: FleetServers) -> None:
    with pytest.raises(InputRefusedError) as refused:
        submit([chat_line("a", "x"), chat_line("a", "y"), "no json"])
    assert len(refused.value.problems) == 2
    with pytest.raises(UsageError, match="needs local"):
        submit(chat_lines(1), model="m")
    with pytest.raises(UsageError, match="needs a model"):
        submit(chat_lines(1), local=True)
    with pytest.raises(UsageError, match="no settings queue"):
        submit(chat_lines(1), settings={"queue": "gpu"})
    with pytest.raises(NoSuchBatchError):
        Batch.find("batch_" + "0" * 24)
    assert fleet.batch_ids() == set()


def looped() -> dict[str, object]:
    loop: dict[str, object] = {}
    loop["body"] = loop
    return loop


@pytest.mark.parametrize(
    "source",
    [
        123, None, {"custom_id": "a"}, b"in.jsonl", bytearray(b"in.jsonl"), [1], [("custom_id", "a")], [None],
        [{"body": object()}], [looped()], [{"custom_id": "\ud800"}], ["\ud800"],
    ],
    ids=lambda source: type(source).__name__,
)  # fmt: skip
def test_what_is_no_source_is_refused_in_a_sentence(tmp_path: Path, source: Any) -> None:
    """Not as an exception of Python's, and not as the keys of a dict or the numbers in bytes."""
    with pytest.raises(UsageError, match=r"source (must be|cannot be|holds)"):
        submit(source, settings={"store": (tmp_path / "store").as_uri()})
    assert not list(tmp_path.glob("store/batches/*"))


@pytest.mark.parametrize("engine_args", ["--latency-s 1", b"--latency-s", {"--latency-s": "1"}, 1, ["--latency-s", 1]])
def test_flags_of_the_engine_are_a_list_of_words(alone: Workplace, engine_args: Any) -> None:
    """A text would be its letters, each of them a flag."""
    with pytest.raises(UsageError, match="engine_args must"):
        submit(chat_lines(1), local=True, model="test-model", engine="echo", engine_args=engine_args)
    assert kept(alone) == []


@pytest.mark.parametrize("options", [{"settings": 5}, {"settings": []}, {"workers": "2"}])
def test_an_option_of_another_type_is_refused_in_a_sentence(alone: Workplace, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be a"):
        submit(chat_lines(1), local=True, model="test-model", engine="echo", **options)


def test_nothing_needs_no_fleet(tmp_path: Path) -> None:
    batch = submit([], settings={"store": (tmp_path / "store").as_uri(), "broker_url": "redis://127.0.0.1:1/0"})

    assert list(batch.results()) == []
    assert batch.wait()["status"] == "completed"


def test_a_local_fleet_ends_with_its_batch(alone: Workplace) -> None:
    lines = chat_lines(40)
    with submit(lines, local=True, model="test-model", engine="echo", workers=2) as batch:
        rows = list(batch.results())
        # It is complete, so nothing runs any more.
        wait_until(lambda: len(alone.alive()) <= 1, 20, "the local fleet has ended")

    assert_complete(lines, as_output(rows))
    assert batch.status()["request_counts"]["completed"] == 40


def test_a_closed_local_batch_goes_on_with_the_same_submit(alone: Workplace) -> None:
    lines = [*chat_lines(20), chat_line("slow", "x", echo={"latency_s": 4})]
    with submit(lines, local=True, model="test-model", engine="echo") as batch:
        assert next(batch.results())["custom_id"] == "c00000"
    with pytest.raises(UsageError, match="was closed"):
        batch.wait()
    wait_until(lambda: len(alone.alive()) <= 1, 20, "the local fleet has ended")

    with submit(lines, local=True, model="test-model", engine="echo") as again:
        assert again.id == batch.id
        assert_complete(lines, as_output(list(again.results())))


def kept(alone: Workplace) -> list[Path]:
    """What local batches have left: batch directories, and folders of local fleets with their locks."""
    return [*alone.state.glob("batch-fleet/batches/*"), *alone.state.glob("batch-fleet/local/*")]


def test_a_local_worker_that_cannot_start_leaves_no_batch(alone: Workplace) -> None:
    """Nothing has run, and a corrected submit makes another batch."""
    for ask in (Batch.wait, lambda batch: list(batch.results())):
        flags = ["--no-such-flag"]
        with submit(chat_lines(3), local=True, model="test-model", engine="echo", engine_args=flags) as batch:
            with pytest.raises(UsageError, match="no-such-flag"):
                ask(batch)
            assert len(alone.alive()) <= 1

        assert kept(alone) == []
        with pytest.raises(NoSuchBatchError):
            batch.status()


def test_a_local_worker_that_cannot_start_leaves_no_batch_that_is_closed_unasked(alone: Workplace) -> None:
    with submit(chat_lines(3), local=True, model="m", engine="echo", engine_args=["--no-such-flag"]):
        # The broker, the aggregator and we: the worker has ended.
        wait_until(lambda: len(alone.alive()) <= 3, 30, "the worker has refused its flags")

    assert kept(alone) == []


def test_an_engine_that_there_is_not_is_refused_before_anything_is_done(alone: Workplace) -> None:
    with pytest.raises(UsageError, match="'bogus' is none: there are vllm and echo"):
        submit(chat_lines(3), local=True, model="m", engine="bogus")

    assert kept(alone) == []


def test_a_local_batch_that_was_taken_up_outlives_a_worker_that_cannot_start(alone: Workplace) -> None:
    """It was there before: closing it leaves it for the same submit."""
    lines = [*chat_lines(3), chat_line("slow", "x", echo={"latency_s": 300})]
    with submit(lines, local=True, model="m", engine="echo", engine_args=["--no-such-flag"]) as batch:
        pass  # closed before anything was refused

    before = kept(alone)
    with submit(lines, local=True, model="m", engine="echo", engine_args=["--no-such-flag"]) as again:
        assert again.id == batch.id
        wait_until(lambda: len(alone.alive()) <= 3, 30, "the worker has refused its flags")

    assert kept(alone) == before
    assert len(before) == 2


def test_a_local_fleet_that_cannot_start_leaves_no_folder(alone: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.local.find_broker", refuse)

    with pytest.raises(UsageError, match="no broker here"):
        submit(chat_lines(3), local=True, model="test-model", engine="echo")

    assert kept(alone) == []


def refuse() -> str:
    raise UsageError("no broker here")


def test_an_open_local_batch_outlives_a_fleet_that_cannot_start(
    alone: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows so far are there, and so is the broker's file: the same submit goes on with it, somewhere else."""
    lines = [chat_line("slow", "x", echo={"latency_s": 300})]
    with submit(lines, local=True, model="test-model", engine="echo"):
        before = kept(alone)
    monkeypatch.setattr("producer.local.find_broker", refuse)

    with pytest.raises(UsageError, match="no broker here"):
        submit(lines, local=True, model="test-model", engine="echo")

    assert kept(alone) == before
    assert len(before) == 2


@pytest.mark.parametrize("started", [False, True], ids=["while the engine loads", "while it serves"])
@pytest.mark.parametrize("ask", [Batch.wait, lambda batch: list(batch.results())], ids=["wait", "results"])
def test_a_local_broker_that_dies_is_an_error_of_the_fleet(
    alone: Workplace, ask: Callable[[Batch], object], started: bool
) -> None:
    lines = [*chat_lines(48), *(chat_line(f"slow{n}", "x", echo={"latency_s": 3}) for n in range(32))]
    with submit(lines, local=True, model="test-model", engine="echo") as batch:
        if started:
            next(batch.results())
        (pid,) = (process.pid for process in alone.alive("valkey", "redis"))
        os.kill(pid, signal.SIGKILL)

        with pytest.raises(LocalFleetError, match=r"broker died .signal 9.*the same submit goes on"):
            ask(batch)
        assert len(alone.alive()) <= 1

    with submit(lines, local=True, model="test-model", engine="echo") as again:
        assert again.id == batch.id
        assert_complete(lines, as_output(list(again.results())))


def test_a_program_that_forgets_its_batch_leaves_no_process(alone: Workplace) -> None:
    """Killed, or at its end."""
    program = (
        "import sys, time; from producer import submit; from tests.invariants import chat_line\n"
        "b = submit([chat_line('a', 'x', echo={'latency_s': 300})], local=True, model='test-model', engine='echo')\n"
        "print('up', flush=True); time.sleep(300 if sys.argv[1] == 'killed' else 0)\n"
    )
    environment = {**alone.environment, "PYTHONPATH": str(README.parent)}
    for end in ("left", "killed"):
        running = subprocess.Popen(
            [sys.executable, "-c", program, end], cwd=alone.folder, env=environment, stdout=subprocess.PIPE
        )
        assert running.stdout is not None
        assert running.stdout.readline() == b"up\n"
        if end == "killed":
            os.kill(running.pid, signal.SIGKILL)
        running.wait(60)
        running.stdout.close()
        wait_until(lambda: len(alone.alive()) <= 1, 30, "only we are left")
    for folder in alone.temp.glob("fleet-*"):
        shutil.rmtree(folder)  # the socket's folder: nobody removes a temporary folder of a program that was killed


def test_the_readme_s_example_runs(alone: Workplace) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 10

    run = subprocess.run(
        [sys.executable, "-c", example],
        cwd=alone.folder,
        env={**alone.environment, "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert run.stdout.splitlines() == [
        *(f"q{n} What is 2 plus 2?" for n in range(3)),
        "{'total': 3, 'completed': 3, 'failed': 0}",
    ]


def test_the_command_line_does_not_load_the_interface() -> None:
    """Half a second more of imports before Ctrl-C is heard, for nothing."""
    code = "import sys; import producer.__main__; assert 'producer.api' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError):
        _ = producer.nothing  # type: ignore[attr-defined]  # that is the point
