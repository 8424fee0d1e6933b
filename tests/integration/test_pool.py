"""The life of a worker: what it takes, how it drains, and what it hands back when its engine dies."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from common import keys
from tests.invariants import assert_complete, chat_line, chat_lines
from tests.servers import MODEL, FleetServers, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Result

INFLIGHT = 8


def detach(servers: FleetServers, lines: list[str]) -> str:
    run = servers.producer("submit", str(servers.write("in.jsonl", lines)), "--detach")
    assert run.code == 0, run.stderr
    return run.stdout.decode().strip()


def assert_completes(servers: FleetServers, batch_id: str, lines: list[str]) -> None:
    wait_until(lambda: servers.is_closed(batch_id), 60, "the batch is closed")
    output: Path = servers.folder / "out.jsonl"
    assert servers.producer("fetch", batch_id, "-o", str(output)).code == 0
    assert_complete(lines, output.read_bytes())


def begun(servers: FleetServers, batch_id: str) -> dict[bytes, bytes]:
    """Engine calls so far by index, of shards that are not sealed."""
    progress = servers.ledger.progress(batch_id, 1)
    assert progress is not None
    calls: dict[bytes, bytes] = {}
    for shard in range(progress.shards):
        calls.update(servers.client.hgetall(keys.calls(batch_id, 1, shard)))
    return calls


def assert_one_sentence(result: Result) -> str:
    assert "Traceback" not in result.stderr
    assert "SecurityWarning" not in result.stderr  # of Celery's, where we are root
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    return said


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stopped_worker_finishes_what_runs_and_leaves_the_rest(fleet: FleetServers, signals: int) -> None:
    """C04. It takes no more than it may run at once; a second SIGTERM changes nothing."""
    lines = chat_lines(20, echo={"latency_s": 6.0})
    batch_id = detach(fleet, lines)
    worker = fleet.start_worker("--max-inflight", str(INFLIGHT), FLEET_DRAIN_S="30")
    wait_until(lambda: len(begun(fleet, batch_id)) == INFLIGHT, 30, "the worker runs what it may")
    assert (fleet.taken(), fleet.waiting()) == (INFLIGHT, 20 - INFLIGHT)

    for _ in range(signals):
        worker.send(signal.SIGTERM)
        wait_until(lambda: "told to stop" in worker.stderr or not worker.running, 10, "the signal arrived")
    result = worker.wait(40)

    assert result.code == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert fleet.finished(batch_id) == INFLIGHT
    assert (fleet.taken(), fleet.waiting()) == (0, 20 - INFLIGHT)
    assert set(begun(fleet, batch_id).values()) == {b"1"}
    assert len(begun(fleet, batch_id)) == INFLIGHT
    assert fleet.ledger.workers() == []

    fleet.aggregator()
    fleet.worker()
    assert_completes(fleet, batch_id, lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_process_writes_its_log_and_nothing_else(fleet: FleetServers, number: signal.Signals) -> None:
    """No bare lines of Celery's: neither its warning of root, where we are that, nor `Warm shutdown`."""
    for process in (fleet.start_worker(), fleet.start("aggregate", "-m", "workers", "aggregate")):
        wait_until(lambda each=process: " ready." in each.stderr, 30, "it takes messages")

        process.send(number)
        result = process.wait(30)

        assert result.code == 0, result.stderr
        assert b"Warm shutdown" not in result.stdout
        events = [json.loads(line) for line in result.stderr.splitlines()]
        assert [event["event"] for event in events].count("told to stop") == 1
        assert not any("superuser" in event["event"] or "SecurityWarning" in event["event"] for event in events)


def test_what_finishes_in_a_drain_is_acknowledged_then(fleet: FleetServers) -> None:
    """Not when the drain ends: an autoscaler would see finished work as leased, and a kill would deliver it again."""
    lines = [*chat_lines(3, echo={"latency_s": 1.0}), chat_line("long", "x", echo={"latency_s": 8.0})]
    batch_id = detach(fleet, lines)
    worker = fleet.start_worker("--max-inflight", "4", FLEET_DRAIN_S="30")
    wait_until(lambda: len(begun(fleet, batch_id)) == 4, 30, "the worker runs all")
    worker.send(signal.SIGTERM)

    wait_until(lambda: fleet.finished(batch_id) == 3, 10, "three are finished")
    wait_until(lambda: fleet.taken() == 1, 3, "and acknowledged")

    assert worker.running
    assert worker.wait(30).code == 0


def test_a_worker_hands_back_what_does_not_end_within_its_grace(fleet: FleetServers) -> None:
    """A03: what a platform sends before it kills; `tests/unit/test_grace.py` has the time that ours give."""
    lines = chat_lines(20, echo={"latency_s": 4.0})
    batch_id = detach(fleet, lines)
    worker = fleet.start_worker("--max-inflight", str(INFLIGHT), FLEET_DRAIN_S="0.5")
    wait_until(lambda: len(begun(fleet, batch_id)) == INFLIGHT, 30, "the worker runs what it may")

    started = time.monotonic()
    result = worker.stop()

    assert time.monotonic() - started < 0.5 + 20, "a drain takes little more than FLEET_DRAIN_S"
    assert result.code == 0, result.stderr
    assert "handing back" in result.stderr
    assert fleet.finished(batch_id) == 0
    assert (fleet.taken(), fleet.waiting()) == (0, 20)

    fleet.aggregator()
    fleet.worker()
    assert_completes(fleet, batch_id, lines)


def test_a_worker_whose_engine_dies_hands_its_requests_back_and_says_so(fleet: FleetServers) -> None:
    """No request becomes a row because an engine died: not the one that killed it, and not its neighbours."""
    lines = [
        *chat_lines(6),
        *(chat_line(f"slow{n}", "text", echo={"latency_s": 20.0}) for n in range(5)),
        chat_line("killer", "text", echo={"engine_dead": True, "latency_s": 1.0}),
    ]
    batch_id = detach(fleet, lines)

    result = fleet.start_worker().wait(40)

    assert result.code == 70, result.stderr
    assert "Traceback" not in result.stderr
    assert fleet.finished(batch_id) == 6
    progress = fleet.ledger.progress(batch_id, 1)
    assert progress is not None
    assert progress.failed == 0
    assert (fleet.taken(), fleet.waiting()) == (0, 6)
    assert fleet.ledger.workers() == []


def test_requests_of_a_dead_engine_are_completed_by_another_worker(fleet: FleetServers) -> None:
    """The killing request is aimed at one model name; the second worker does not serve it, so it is a row there."""
    lines = [
        *chat_lines(6, echo={"latency_s": 2.0}),
        chat_line("killer", "text", model="first", echo={"engine_dead": True, "latency_s": 0.5}),
    ]
    batch_id = detach(fleet, lines)
    assert fleet.start_worker("--served-model-name", MODEL, "first").wait(40).code == 70

    fleet.aggregator()
    fleet.worker()

    wait_until(lambda: fleet.is_closed(batch_id), 60, "the batch is closed")
    output = fleet.folder / "out.jsonl"
    assert fleet.producer("fetch", batch_id, "-o", str(output)).code == 3
    assert_complete(lines, output.read_bytes(), {"killer": "err"})


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "workers", "serve", MODEL, "--engine", "echo", "--no-such-flag"),
        ("-m", "workers", "serve", MODEL, "--engine", "echo", "--latency-s", "-1"),
        ("-m", "workers", "serve", "", "--engine", "echo"),
        ("-m", "celery", "-A", "workers", "worker", "-Q", "gpu"),
    ],
    ids=["unknown flag", "bad value", "empty model", "celery's command without a model"],
)
def test_a_worker_that_cannot_be_set_up_is_one_sentence(fleet: FleetServers, arguments: tuple[str, ...]) -> None:
    result = fleet.start("bad", *arguments, FLEET_ENGINE="echo").wait(30)

    assert result.code == 2, result.stderr
    assert_one_sentence(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-Q", "gpu", "-P", "threads"), "needs the fleet's own pool"),
        (("-Q", "gpu", "-P", "solo"), "needs the fleet's own pool"),
        (("-Q", "gpu,aggregate"), "cannot serve requests and 'aggregate'"),
        (("-Q", "aggregate"), "-P threads"),
    ],
    ids=["threads", "solo", "both queues", "aggregator"],
)  # fmt: skip
def test_a_pool_that_does_not_fit_its_queue_is_refused(
    fleet: FleetServers, arguments: tuple[str, ...], said: str
) -> None:
    """E05."""
    command = ("-m", "celery", "-A", "workers", "worker", *arguments)
    result = fleet.start("bad", *command, FLEET_ENGINE="echo", FLEET_MODEL=MODEL).wait(30)

    assert result.code == 2, result.stderr
    assert said in assert_one_sentence(result)


def test_a_worker_without_a_model_is_told_its_usage(fleet: FleetServers) -> None:
    result = fleet.start("bad", "-m", "workers", "serve").wait(30)

    assert result.code == 2
    assert "MODEL" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "environment",
    [{"FLEET_STORE": ""}, {"FLEET_STORE": "ftp://x/y"}, {"FLEET_WINDOW": "none"}, {"FLEET_BROKER_URL": "amqp://x"}],
    ids="".join,
)
def test_an_aggregator_that_cannot_be_set_up_is_one_sentence(fleet: FleetServers, environment: dict[str, str]) -> None:
    merged = {**fleet.environment, **environment}
    fleet.environment = {name: value for name, value in merged.items() if value}

    result = fleet.start("bad", "-m", "workers", "aggregate").wait(30)

    assert result.code == 2, result.stderr
    (name,) = environment
    assert name in assert_one_sentence(result)


@pytest.mark.parametrize("pool", [(), ("-P", "prefork", "-c", "4")], ids=["default", "prefork"])
def test_celerys_own_command_starts_the_same_worker(fleet: FleetServers, pool: tuple[str, ...]) -> None:
    """E05: with one engine, also where prefork is asked for; to Celery 5.7 that name means the default pool, ours.

    Each child of a real prefork pool would load an engine of its own, or fork one: apecloud/ApeRAG#331.
    """
    lines = chat_lines(20)
    batch_id = detach(fleet, lines)
    fleet.aggregator()
    command = ("-m", "celery", "-A", "workers", "worker", "-Q", "gpu", *pool)
    worker = fleet.start("celery", *command, FLEET_ENGINE="echo", FLEET_MODEL=MODEL)

    assert_completes(fleet, batch_id, lines)
    assert psutil.Process(worker.pid).children() == []
    assert worker.stop().code == 0


def test_a_message_whose_headers_are_nonsense_is_run_like_any_other(fleet: FleetServers) -> None:
    """Redis is open to more than the fleet; a message that is neither answered nor handed back would stay for ever."""
    lines = chat_lines(4)
    batch_id = detach(fleet, lines)
    for wrong in ("x", None, [], {"a": 1}):
        message = json.loads(fleet.client.rpop("gpu"))
        message["headers"] |= dict.fromkeys(("published_s", "requests", "traceparent"), wrong)
        fleet.client.lpush("gpu", json.dumps(message))

    fleet.aggregator()
    fleet.worker()

    assert_completes(fleet, batch_id, lines)
    wait_until(lambda: fleet.taken() == 0, 10, "all are acknowledged")


#: A worker whose collector never looks; at its end it says what there was to collect.
UNCOLLECTED = (
    "import gc, sys; import workers.pool as pool; settle = pool.settle; "
    "pool.settle = lambda: (settle(), print('seldom', gc.get_threshold()[0], file=sys.stderr), gc.disable()); "
    "close = pool.TaskPool._close; "
    "pool.TaskPool._close = lambda self: (print('left', gc.collect(), file=sys.stderr, flush=True), close(self)); "
    "from workers.cli import main; main(sys.argv[1:])"
)


def test_a_request_leaves_nothing_for_the_garbage_collector(fleet: FleetServers) -> None:
    """So the collector need not look at every 700th object, which is what makes requests cheap."""
    lines = chat_lines(400)
    fleet.aggregator()
    worker = fleet.start("worker", "-c", UNCOLLECTED, "serve", MODEL, "--engine", "echo")
    assert_completes(fleet, detach(fleet, lines), lines)

    worker.stop()

    said = dict(line.split() for line in worker.stderr.splitlines() if line.startswith(("seldom ", "left ")))
    assert int(said["seldom"]) > 700
    assert int(said["left"]) < 2 * len(lines), worker.stderr
