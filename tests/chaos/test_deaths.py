"""Processes that are killed, stopped or frozen while they work: nothing is lost, nothing is written twice."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from common import layout
from tests.chaos.chaosfleet import LEASE_S, TAKEN_OVER_S, Batch, ChaosFleet, base40, figures
from tests.invariants import assert_complete, chat_line, chat_lines
from tests.servers import MODEL, wait_until

if TYPE_CHECKING:
    from tests.servers import Process


def test_a_killed_workers_requests_run_on_another_one(chaos: ChaosFleet) -> None:
    """C03. Nothing is lost, and only what it was running is run again."""
    chaos.aggregator()
    doomed, _ = chaos.two_workers()
    batch = chaos.submit(chat_lines(64, echo={"latency_s": 1.0}))
    doomed_id = chaos.wait_running(batch, doomed, 16)

    doomed.kill()
    killed_at, in_flight = time.monotonic(), len(chaos.marks(batch, doomed_id))
    wait_until(lambda: not chaos.marks(batch, doomed_id), TAKEN_OVER_S, "another worker runs what was left")
    taken_over_s = time.monotonic() - killed_at

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("kill -9 worker", in_flight=in_flight, taken_over_s=round(taken_over_s, 1), extra=executions - 64)
    assert executions == 64 + in_flight, chaos.calls.repeated(batch.batch_id)
    assert sum(chaos.calls.begins.values()) == executions, "the ledger counts engine calls that were none"


@pytest.mark.chaos_long
def test_a_killed_workers_requests_wait_for_the_next_one(chaos: ChaosFleet) -> None:
    """C03, with nobody else and the default lease: the aggregator takes them back, whoever is started runs them."""
    chaos.environment |= {"FLEET_LEASE_S": "30", "FLEET_TEST_SHORT_LEASES": ""}
    chaos.aggregator()
    doomed = chaos.worker("--max-inflight", "3")
    batch = chaos.submit(base40(0.5))
    chaos.wait_running(batch, doomed, 3)

    doomed.kill()
    killed_at, finished = time.monotonic(), chaos.finished(batch.batch_id)
    wait_until(lambda: chaos.waiting() >= 40 - finished, 60, "the leases have run out")
    back_s = time.monotonic() - killed_at
    chaos.worker("--max-inflight", "16")

    chaos.assert_right(batch)
    figures("kill -9 the only worker", lease_s=30, back_after_s=round(back_s, 1))
    assert back_s < 45
    assert 40 < chaos.calls.total(batch.batch_id) <= 43


@pytest.mark.chaos_long
@pytest.mark.parametrize(("lease_s", "within_s"), [(10, 20), (30, 45)])
def test_real_leases_are_taken_over_in_time(chaos: ChaosFleet, lease_s: int, within_s: int) -> None:
    """`kill -9` of one of two workers with 100 requests in flight there: until all of them run elsewhere."""
    chaos.environment |= {"FLEET_LEASE_S": str(lease_s), "FLEET_TEST_SHORT_LEASES": "", "FLEET_WINDOW": "16384"}
    chaos.aggregator()
    doomed, _ = chaos.two_workers(100)
    path = chaos.write("in.jsonl", chat_lines(200, echo={"latency_s": 3.0}))
    lines = path.read_text().splitlines()
    batch = Batch("", lines, chaos.start_producer("submit", str(path), "-o", "out.jsonl"), chaos.folder / "out.jsonl")
    wait_until(chaos.batch_ids, 30, "the batch is submitted")
    (batch.batch_id,) = chaos.batch_ids()
    doomed_id = chaos.wait_running(batch, doomed, 100)

    doomed.kill()
    killed_at, in_flight = time.monotonic(), len(chaos.marks(batch, doomed_id))
    wait_until(lambda: not chaos.marks(batch, doomed_id), within_s, "another worker runs what was left")
    taken_over_s = time.monotonic() - killed_at

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures(
        "kill -9 worker", lease_s=lease_s, in_flight=in_flight, taken_over_s=round(taken_over_s, 1),
        extra=executions - 200,
    )  # fmt: skip
    assert executions == 200 + in_flight


@pytest.mark.chaos_long
def test_without_leases_a_killed_workers_requests_wait(server: str, chaos: ChaosFleet) -> None:
    """The safeguard off: with a lease of an hour, as stock Celery has it, the batch stands still."""
    chaos.environment["FLEET_LEASE_S"] = "3600"
    chaos.aggregator()
    doomed, _ = chaos.two_workers()
    batch = chaos.submit(chat_lines(64, echo={"latency_s": 1.5}))
    chaos.wait_running(batch, doomed, 16)

    doomed.kill()

    with pytest.raises(AssertionError, match="is closed"):
        chaos.wait_closed(batch, 25)
    assert chaos.producer("cancel", batch.batch_id).code == 0
    assert batch.producer.wait(30).code == 4


@pytest.mark.parametrize(
    ("aof", "away_s"),
    [
        (True, LEASE_S),
        pytest.param(True, 60.0, marks=pytest.mark.chaos_long),
        pytest.param(False, 1.0, marks=pytest.mark.chaos_long),
    ],
    ids=["aof", "aof, a minute away", "empty"],
)
def test_a_killed_broker_comes_back(chaos: ChaosFleet, aof: bool, away_s: float) -> None:
    """C06. With its append-only file each request runs once; without it the batch goes on from the store by itself."""
    chaos.environment["FLEET_WINDOW"] = "256"
    chaos.aggregator()
    one, two = chaos.two_workers(50)
    batch = chaos.submit(chat_lines(150, echo={"latency_s": 2.5}))
    wait_until(lambda: len(chaos.marks(batch)) == 100, 30, "both work")

    chaos.kill_broker()
    time.sleep(away_s)
    chaos.start_broker(empty=not aof)

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("kill -9 broker", aof=aof, away_s=away_s, in_flight=100, extra=executions - 150)
    assert one.running
    assert two.running
    assert not aof or not chaos.calls.repeated(batch.batch_id)
    assert not chaos.calls.strikes


@pytest.mark.parametrize("knob", ["kill", pytest.param("engine_dead", marks=pytest.mark.chaos_long)])
def test_a_poison_becomes_one_failed_row(chaos: ChaosFleet, knob: str) -> None:
    """E03. Among 60 neighbours on two supervised workers: it costs four deaths at most, and no neighbour its row."""
    chaos.aggregator()
    neighbours = chat_lines(60, echo={"latency_s": 0.7})
    poison = chat_line("poison", "text", echo={"latency_s": 0.3, knob: True})
    lines = [*neighbours[:20], poison, *neighbours[20:]]

    def start() -> Process:
        return chaos.start_worker("--max-inflight", "16")

    workers = [start(), start()]
    batch = chaos.submit(lines)
    started = time.monotonic()
    deaths = chaos.supervise(batch, workers, start, 100)

    rows = chaos.assert_right(batch, 3, {"poison": "err"}, timeout_s=1)
    figures("poison", knob=knob, deaths=deaths, seconds=round(time.monotonic() - started, 1))
    assert rows[20]["error"]["code"] == "workers_lost"
    assert 2 <= deaths <= 4


@pytest.mark.chaos_long
def test_without_a_limit_a_poison_goes_on_killing(chaos: ChaosFleet) -> None:
    """The safeguard off: strikes are counted, but no number of them is too many."""
    chaos.environment["FLEET_MAX_DELIVERIES"] = "1000"
    chaos.aggregator()
    batch = chaos.submit([*chat_lines(20), chat_line("poison", "text", echo={"engine_dead": True})])
    workers = [chaos.start_worker()]

    deaths = chaos.supervise(batch, workers, chaos.start_worker, 40)

    assert deaths > 4
    assert chaos.producer("cancel", batch.batch_id).code == 0
    assert batch.producer.wait(30).code == 4


def test_a_drained_workers_requests_run_on_another_one(chaos: ChaosFleet) -> None:
    """C04. SIGTERM in the middle: what does not end in time is handed back at once, which is no strike."""
    chaos.aggregator()
    leaving, staying = chaos.two_workers(FLEET_DRAIN_S="0.3")
    batch = chaos.submit(chat_lines(48, echo={"latency_s": 2.0}))
    leaving_id = chaos.wait_running(batch, leaving, 16)

    in_flight = len(chaos.marks(batch, leaving_id))
    started = time.monotonic()
    result = leaving.stop()
    assert result.code == 0, result.stderr
    assert "Traceback" not in result.stderr
    drained_s = time.monotonic() - started
    assert not chaos.marks(batch, leaving_id)

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("SIGTERM worker", drained_s=round(drained_s, 1), in_flight=in_flight, extra=executions - 48)
    assert executions <= 48 + in_flight
    assert staying.running
    assert not chaos.calls.strikes


@pytest.mark.parametrize("drains", [pytest.param(False, marks=pytest.mark.chaos_long), True], ids=["goes on", "drains"])
def test_a_worker_that_slept_beyond_its_lease_writes_nothing_twice(chaos: ChaosFleet, drains: bool) -> None:
    """SIGSTOP, and SIGCONT once another worker runs its requests: it can take nothing back from that one."""
    chaos.aggregator()
    sleeper, _ = chaos.two_workers()
    batch = chaos.submit(chat_lines(48, echo={"latency_s": 2.5}))
    sleeper_id = chaos.wait_running(batch, sleeper, 16)

    chaos.freeze(sleeper)
    in_flight = len(chaos.marks(batch, sleeper_id))
    wait_until(lambda: not chaos.marks(batch, sleeper_id), TAKEN_OVER_S, "another worker runs what was left")
    chaos.thaw()
    if drains:
        result = sleeper.stop()
        assert result.code == 0, result.stderr
        assert "Traceback" not in result.stderr

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("SIGSTOP worker", drains=drains, in_flight=in_flight, extra=executions - 48)
    assert executions == 48 + in_flight
    assert drains or sleeper.running


@pytest.mark.chaos_long
def test_a_worker_that_slept_alone_takes_its_requests_up_again(chaos: ChaosFleet) -> None:
    """With nobody else to run them they come back to the same worker, whose own marks are no strikes."""
    chaos.aggregator()
    sleeper = chaos.worker("--max-inflight", "16")
    batch = chaos.submit(chat_lines(32, echo={"latency_s": 1.5}))
    chaos.wait_running(batch, sleeper, 16)

    chaos.freeze(sleeper)
    time.sleep(2 * LEASE_S)
    chaos.thaw()

    chaos.assert_right(batch)
    assert sleeper.running
    assert "Traceback" not in sleeper.stderr
    assert not chaos.calls.strikes


@pytest.mark.chaos_long
def test_a_worker_that_slept_does_not_run_beside_itself(chaos: ChaosFleet) -> None:
    """Its requests are still running when they come back to it, as new deliveries."""
    chaos.aggregator()
    sleeper = chaos.worker("--max-inflight", "64")
    batch = chaos.submit(chat_lines(16, echo={"latency_s": 16.0}))
    chaos.wait_running(batch, sleeper, 16)

    chaos.freeze(sleeper)
    wait_until(lambda: chaos.waiting() == 16, TAKEN_OVER_S, "the leases have run out")
    chaos.thaw()

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 16, chaos.calls.repeated(batch.batch_id)
    assert not chaos.calls.strikes
    assert "fault of the fleet" not in sleeper.stderr


def test_a_killed_aggregator_is_replaced(chaos: ChaosFleet) -> None:
    aggregator = chaos.aggregator()
    chaos.two_workers(8)
    batch = chaos.submit(chat_lines(128, echo={"latency_s": 0.8}))
    wait_until(lambda: list(chaos.store.names(layout.parts(batch.batch_id, 1))), 30, "a part is there")

    aggregator.kill()
    chaos.aggregator()

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 128


@pytest.mark.chaos_long
def test_a_killed_producer_is_no_loss(chaos: ChaosFleet) -> None:
    """The batch goes on without it; the same command attaches to it and gets the whole output."""
    chaos.aggregator()
    chaos.two_workers()
    batch = chaos.submit(chat_lines(96, echo={"latency_s": 1.5}))
    chaos.wait_finished(batch, 10)

    batch.producer.kill()
    again = chaos.start_producer("submit", str(chaos.folder / "in1.jsonl"), "-o", str(batch.output))
    batch.producer = again

    chaos.assert_right(batch)
    assert chaos.batch_ids() == {batch.batch_id}
    assert chaos.calls.total(batch.batch_id) == 96


#: A producer that is killed when it has taken two shards and sent none, or some, of their messages.
DIES_PUBLISHING = """
import os, signal, sys
from common import dispatch, messages
fill, left = messages.RequestMessages.fill, [20]
def dying(*args, **options):
    left[0] -= 1
    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
    return fill(*args, **options)
messages.RequestMessages.fill, dispatch.PUBLISH_BATCH = dying, int(sys.argv.pop(1))
from producer.cli import main
main()
"""


@pytest.mark.chaos_long
@pytest.mark.parametrize(("flushed", "sent"), [(500, 0), (2, 18)], ids=["two shards unsent", "half a shard"])
def test_a_producer_that_is_killed_while_it_publishes_is_no_loss(chaos: ChaosFleet, flushed: int, sent: int) -> None:
    """The batch is durable: what it did not send, the watchdog sends."""
    lines = chat_lines(48, echo={"latency_s": 0.3})
    path, output = chaos.write("in.jsonl", lines), chaos.folder / "out.jsonl"
    dying = chaos.start("producer", "-c", DIES_PUBLISHING, str(flushed), "submit", str(path), "-o", str(output))
    assert dying.wait(30).code == -signal.SIGKILL
    (batch_id,) = chaos.batch_ids()
    assert chaos.waiting() == sent

    chaos.aggregator()
    chaos.worker()
    chaos.wait_closed(Batch(batch_id, lines, dying, output))

    assert chaos.producer("fetch", batch_id, "-o", str(output)).code == 0
    assert_complete(lines, output.read_bytes())
    assert chaos.calls.total(batch_id) == 48


#: An aggregator that is killed before its n-th call of a method: once, so that the next one gets on.
DIES_SEALING = """
import os, signal, sys
from common.ledger import Ledger
name, left = sys.argv.pop(1), [2]
method = getattr(Ledger, name)
def dying(*args, **options):
    left[0] -= 1
    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
    return method(*args, **options)
if name == "close": left[0] = 1
setattr(Ledger, name, dying)
from workers.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("mark_sealed", marks=pytest.mark.chaos_long),
        pytest.param("drop_shard", marks=pytest.mark.chaos_long),
        pytest.param("close", marks=pytest.mark.chaos_long),
    ],
)
def test_an_aggregator_that_dies_between_two_steps_is_no_loss(chaos: ChaosFleet, step: str) -> None:
    """Part created, shard marked, rows dropped; output and end written, run closed: it may die before each."""
    batch = chaos.submit(chat_lines(48))
    chaos.worker()
    chaos.wait_finished(batch, 48)
    dying = chaos.start("aggregate", "-c", DIES_SEALING, step, "aggregate", "--loglevel", "INFO")
    assert dying.wait(30).code == -signal.SIGKILL

    chaos.aggregator()

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 48


def test_a_dead_engines_requests_are_completed_by_the_restarted_worker(chaos: ChaosFleet) -> None:
    """The killing request is aimed at a name that the restarted worker does not serve, so it is a failed row there."""
    chaos.aggregator()
    lines = [
        *chat_lines(30, echo={"latency_s": 1.5}),
        chat_line("killer", "text", model="first", echo={"engine_dead": True, "latency_s": 0.5}),
    ]
    batch = chaos.submit(lines)

    result = chaos.start_worker("--served-model-name", MODEL, "first").wait(40)
    assert result.code == 70, result.stderr
    assert "Traceback" not in result.stderr
    progress = chaos.ledger.progress(batch.batch_id, 1)
    assert progress is not None
    assert (progress.finished, progress.failed) == (0, 0)
    assert chaos.taken() == 0

    chaos.worker()
    rows = chaos.assert_right(batch, 3, {"killer": "err"})
    assert rows[-1]["error"]["code"] == "model_not_found"


#: A worker whose engine dies at a signal, as a real one does when its process is killed. "untold": as if nobody asked
#: whether it is dead, so that its answer to every request, an error at once, is taken for an answer.
MORTAL = """
import asyncio, signal, sys
from common.errors import EngineDeadError
from workers.engine.echo import EchoEngine
start, run, serving = EchoEngine.start, EchoEngine.run, []
async def starting(engine):
    await start(engine)
    serving.append((engine, asyncio.get_running_loop()))
def die(*_):
    engine, loop = serving[0]
    engine._errored = True
    loop.call_soon_threadsafe(engine._wake_all)
async def answering(engine, request):
    try:
        return await run(engine, request)
    except EngineDeadError:
        raise RuntimeError from None
async def healthy(engine):
    pass
EchoEngine.start = starting
if sys.argv.pop(1) == "untold":
    EchoEngine.run, EchoEngine.check_health, EchoEngine.errored = answering, healthy, property(lambda _: False)
signal.signal(signal.SIGRTMIN, die)
from workers.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.chaos_long)], ids=["told", "untold"])
def test_a_dead_engine_does_not_drain_the_queue_into_failed_rows(chaos: ChaosFleet, told: bool) -> None:
    """E01: one of two workers loses its engine after five rows. "untold" is the safeguard off."""
    chaos.aggregator()
    serve = ("serve", MODEL, "--engine", "echo", "--max-inflight", "8")
    mortal = chaos.start("worker", "-c", MORTAL, "told" if told else "untold", *serve)
    other = chaos.start_worker("--max-inflight", "8")
    wait_until(lambda: chaos.is_ready(mortal) and chaos.is_ready(other), 60, "two workers are ready")
    batch = chaos.submit(base40(0.7))
    chaos.wait_finished(batch, 5)
    mortal_id = chaos.wait_running(batch, mortal, 1)
    in_flight = len(chaos.marks(batch, mortal_id))

    mortal.send(signal.SIGRTMIN)

    if not told:
        result = batch.producer.wait(60)
        assert result.code == 3, "rows failed, though only an engine did"
        return
    result = mortal.wait(30)
    assert result.code == 70, result.stderr
    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("engine death", in_flight=in_flight, extra=executions - 40)
    assert executions <= 40 + 8
    assert other.running


@pytest.mark.chaos_long
def test_no_signal_is_needed_twice(chaos: ChaosFleet) -> None:
    """Every process ends within seconds of one SIGTERM while it works, and a second one is harmless."""
    aggregator = chaos.aggregator()
    one, two = chaos.two_workers(FLEET_DRAIN_S="1")
    batch = chaos.submit(chat_lines(64, echo={"latency_s": 3.0}))
    wait_until(lambda: len(chaos.marks(batch)) >= 32, 30, "both work")

    for process in (one, two, aggregator):
        process.send(signal.SIGTERM)
    one.send(signal.SIGTERM)
    assert [process.wait(15).code for process in (one, two, aggregator)] == [0, 0, 0]
    assert chaos.messages() == {"gpu": 64, "aggregate": 0, "unacked": 0, "unacked_index": 0}

    chaos.aggregator()
    chaos.two_workers()
    chaos.assert_right(batch)
