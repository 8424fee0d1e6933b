"""A broker that drops connections, stops, forgets, loses or repeats messages: the batch goes on by itself."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import pytest

from common import layout
from tests.chaos.chaosfleet import LEASE_S, ChaosFleet, base40, figures
from tests.invariants import chat_line, chat_lines
from tests.servers import MODEL, wait_until


def test_dropped_connections_run_nothing_again(chaos: ChaosFleet) -> None:
    chaos.aggregator()
    one, two = chaos.two_workers(32)
    batch = chaos.submit(chat_lines(96, echo={"latency_s": 2.0}))
    wait_until(lambda: len(chaos.marks(batch)) >= 60, 30, "both work")

    for _ in range(3):
        chaos.drop_connections()
        time.sleep(0.4)

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("CLIENT KILL", extra=executions - 96)
    assert executions == 96, chaos.calls.repeated(batch.batch_id)
    assert not chaos.calls.strikes
    assert one.running
    assert two.running


@pytest.mark.parametrize(
    ("seconds", "cut"),
    [
        pytest.param(LEASE_S + 1.5, False, marks=pytest.mark.chaos_long),
        (LEASE_S + 1.5, True),
        pytest.param(20.0, True, marks=pytest.mark.chaos_long),
    ],
    ids=["paused", "paused and cut", "for 20 s and cut"],
)
def test_a_paused_broker_delays_and_runs_nothing_again(chaos: ChaosFleet, seconds: float, cut: bool) -> None:
    """C08. Paused for longer than a lease, while requests end: rows and receipts wait, and are not lost with the
    connections that are cut then. When it is back, those who hold the leases come before those who sweep.
    """
    chaos.aggregator()
    chaos.two_workers(32)
    batch = chaos.submit(chat_lines(96, echo={"latency_s": 2.0}))
    wait_until(lambda: len(chaos.marks(batch)) >= 60, 30, "both work")

    if cut:
        chaos.drop_connections(paused_s=seconds)
    else:
        chaos.pause_broker(seconds)

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("CLIENT PAUSE", seconds=seconds, cut=cut, extra=executions - 96)
    assert executions == 96, chaos.calls.repeated(batch.batch_id)
    assert not chaos.calls.strikes


@pytest.mark.parametrize("works", [True, pytest.param(False, marks=pytest.mark.chaos_long)], ids=["in flight", "idle"])
def test_a_batch_survives_an_emptied_broker(chaos: ChaosFleet, works: bool) -> None:
    """FLUSHALL: the watchdog finds the batch in the store; finished parts are kept, the rest runs again."""
    chaos.aggregator()
    if works:
        chaos.two_workers()
    batch = chaos.submit(chat_lines(96, echo={"latency_s": 1.0}))
    if works:
        wait_until(lambda: list(chaos.store.names(layout.parts(batch.batch_id, 1))), 30, "a part is there")

    chaos.client.flushall()

    if not works:
        chaos.two_workers()
    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("FLUSHALL", works=works, extra=executions - 96)
    assert executions <= 2 * 96
    assert works or executions == 96


@pytest.mark.chaos_long
def test_without_the_watchdog_an_emptied_broker_is_the_end(chaos: ChaosFleet) -> None:
    """The safeguard off."""
    chaos.aggregator_without_watchdog()
    batch = chaos.submit(chat_lines(32))

    chaos.client.flushall()
    chaos.worker()

    with pytest.raises(AssertionError, match="is closed"):
        chaos.wait_closed(batch, 20)
    batch.producer.stop()
    chaos.stop_all()
    chaos.aggregator()
    chaos.worker()
    chaos.wait_closed(batch)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.chaos_long)])
def test_messages_that_come_twice_run_once(chaos: ChaosFleet, workers: int) -> None:
    chaos.aggregator()
    batch = chaos.submit(chat_lines(64, echo={"latency_s": 1.0}))
    assert chaos.duplicate() == 64

    started = [chaos.start_worker("--max-inflight", "32") for _ in range(workers)]

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("every message twice", workers=workers, extra=executions - 64)
    assert all(worker.running for worker in started)
    assert not any("fault of the fleet" in worker.stderr for worker in started)
    assert executions == 64, chaos.calls.repeated(batch.batch_id)


def test_a_message_that_is_copied_while_it_runs_runs_once(chaos: ChaosFleet) -> None:
    """C02. The copy comes while its request runs, is parked, and is answered as done when that has ended."""
    chaos.aggregator()
    worker = chaos.worker("--max-inflight", "16")
    batch = chaos.submit(base40(0.7, r000=5.0, r001=5.0))
    chaos.wait_running(batch, worker, 16)

    held: Any = chaos.client.hvals("unacked")
    messages = [message for message, *_ in map(json.loads, held)]
    copied = [message for message in messages if json.loads(message["body"])[1]["index"] in (0, 1)]
    assert len(copied) == 2
    chaos.client.rpush("gpu", *map(json.dumps, copied))

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("a copy of what runs", copies=len(copied), extra=executions - 40)
    assert executions == 40, chaos.calls.repeated(batch.batch_id)
    assert not chaos.calls.strikes


#: Celery's own expiry of results, set in a process of the fleet: nothing of a batch may hang on it.
RESULT_EXPIRES = """
import sys
value = {"none": None}.get(sys.argv[1], sys.argv[1]); del sys.argv[1]
from common import broker
make = broker.make_app
def making(*args, **options):
    app = make(*args, **options)
    app.conf.result_expires = value and int(value)
    return app
broker.make_app = making
from workers.cli import main
main(sys.argv[1:])
"""


@pytest.mark.chaos_long
@pytest.mark.parametrize("expires", ["5", "0", "none"])
def test_a_batch_outlives_the_expiry_of_results(chaos: ChaosFleet, expires: str) -> None:
    """C09, as reported: receipts wait in the chord for days, and rows in the ledger."""
    chaos.start("aggregate", "-c", RESULT_EXPIRES, expires, "aggregate")
    chaos.start("worker", "-c", RESULT_EXPIRES, expires, "serve", MODEL, "--engine", "echo")
    batch = chaos.submit(base40(0.1, r007=14.0))

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 40
    assert not any("full and not sealed" in process.stderr for process in chaos.processes), "every chord has fired"


def test_lost_messages_are_sent_again(chaos: ChaosFleet) -> None:
    """As when a worker is killed between taking a message and noting it: nobody but the watchdog would miss it."""
    chaos.aggregator()
    batch = chaos.submit(chat_lines(64, echo={"latency_s": 0.3}))
    for _ in range(3):
        assert chaos.client.lpop("gpu") is not None
    assert chaos.client.rpop("gpu") is not None

    chaos.worker()

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("lost messages", extra=executions - 64)
    assert executions == 64, chaos.calls.repeated(batch.batch_id)


@pytest.mark.chaos_long
def test_without_the_watchdog_a_lost_message_is_silence(chaos: ChaosFleet) -> None:
    """The safeguard off."""
    chaos.aggregator_without_watchdog()
    batch = chaos.submit(chat_lines(32))
    assert chaos.client.lpop("gpu") is not None
    chaos.worker()

    with pytest.raises(AssertionError, match="is closed"):
        chaos.wait_closed(batch, 25)

    chaos.aggregator()
    chaos.assert_right(batch)


@pytest.mark.chaos_long
def test_a_queue_without_workers_is_not_taken_for_a_loss(chaos: ChaosFleet) -> None:
    """Nothing is sent again while nobody works."""
    chaos.aggregator()
    batch = chaos.submit(chat_lines(48, echo={"latency_s": 0.3}))
    time.sleep(4 * LEASE_S)
    assert chaos.waiting() == 48

    chaos.worker()

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 48
    assert not any("got lost" in process.stderr for process in chaos.processes)


def test_two_sealers_at_once_write_one_part(chaos: ChaosFleet) -> None:
    """Every message to the aggregator three times, to two aggregators at once: each shard has six would-be sealers."""
    batch = chaos.submit(chat_lines(64))
    worker = chaos.worker()
    chaos.wait_finished(batch, 64)
    wait_until(lambda: chaos.waiting("aggregate") >= 4, 30, "the shards are to be sealed")
    assert worker.stop().code == 0
    chaos.duplicate("aggregate", copies=2)

    one = chaos.start("aggregate", "-m", "workers", "aggregate", "--loglevel", "INFO")
    two = chaos.start("aggregate", "-m", "workers", "aggregate", "--loglevel", "INFO")

    chaos.assert_right(batch)
    sealed = [process.stderr.count("sealed shard") for process in (one, two)]
    figures("two sealers at once", shards=4, messages=12, sealed_by_each=sealed)
    assert "Traceback" not in one.stderr + two.stderr


#: An aggregator that sleeps when it has written its first part.
SLEEPS_SEALING = """
import sys, time
from common.ledger import Ledger
mark, slept = Ledger.mark_sealed, []
def sleeping(*args):
    if not slept:
        slept.append(print("asleep", file=sys.stderr, flush=True))
        time.sleep(2)
    mark(*args)
Ledger.mark_sealed = sleeping
from workers.cli import main
main(sys.argv[1:])
"""


def test_a_sealer_that_sleeps_through_a_flush_changes_nothing(chaos: ChaosFleet) -> None:
    lines = chat_lines(64, echo={"latency_s": 4.0})
    batch = chaos.submit([*chat_lines(16), *lines[16:]])
    chaos.worker()
    chaos.wait_finished(batch, 16)
    sleeper = chaos.start("aggregate", "-c", SLEEPS_SEALING, "aggregate", "--loglevel", "INFO")
    wait_until(lambda: "asleep" in sleeper.stderr, 30, "a part is written and not noted")

    chaos.client.flushall()

    chaos.assert_right(batch)
    executions = chaos.calls.total(batch.batch_id)
    figures("FLUSHALL under a seal", extra=executions - 64)
    assert executions <= 2 * 64
    assert "Traceback" not in sleeper.stderr


def test_shards_whose_chords_fired_nothing_are_sealed(chaos: ChaosFleet) -> None:
    """The bodies are lost with everything else that waited for the aggregator."""
    batch = chaos.submit(chat_lines(64))
    chaos.worker()
    chaos.wait_finished(batch, 64)
    wait_until(lambda: chaos.waiting("aggregate") >= 4, 30, "the shards are to be sealed")
    chaos.client.delete("aggregate")

    chaos.aggregator()

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 64


@pytest.mark.chaos_long
def test_without_the_watchdog_a_chord_that_fired_nothing_is_silence(chaos: ChaosFleet) -> None:
    """The safeguard off."""
    batch = chaos.submit(chat_lines(32))
    chaos.worker()
    chaos.wait_finished(batch, 32)
    wait_until(lambda: chaos.waiting("aggregate") >= 2, 30, "the shards are to be sealed")
    chaos.client.delete("aggregate")
    chaos.aggregator_without_watchdog()

    with pytest.raises(AssertionError, match="is closed"):
        chaos.wait_closed(batch, 20)

    chaos.aggregator()
    chaos.assert_right(batch)


def test_requests_that_run_or_wait_for_several_leases_run_once(chaos: ChaosFleet) -> None:
    """C01. Whoever runs one renews its lease, and a long queue is not taken for a loss."""
    chaos.aggregator()
    chaos.two_workers(4)
    batch = chaos.submit(
        [chat_line("long", "text", echo={"latency_s": 3 * LEASE_S + 1}), *chat_lines(47, echo={"latency_s": 1.5})]
    )

    chaos.assert_right(batch)
    assert chaos.calls.total(batch.batch_id) == 48
    for said in ("got lost", "put back"):
        assert not any(said in process.stderr for process in chaos.processes), said


@pytest.mark.chaos_long
@pytest.mark.parametrize("broken", ["manifest", "input"])
def test_one_broken_batch_does_not_blind_the_watchdog(chaos: ChaosFleet, broken: str) -> None:
    """It goes on looking after the others, whatever lies in the store."""
    victim = chaos.submit(chat_lines(16))
    victim.producer.stop()
    # Several: in which order a folder is listed is not ours to say.
    for number in range(8):
        other = f"batch_{number:024x}"
        shutil.copytree(chaos.store_root / layout.batch(victim.batch_id), chaos.store_root / layout.batch(other))
        manifest = chaos.store_root / layout.manifest(other)
        text = manifest.read_text().replace(victim.batch_id, other)
        manifest.write_text("{}" if broken == "manifest" else text)
        if broken == "input":
            (chaos.store_root / layout.shard_input(other, 0)).unlink()
    shutil.rmtree(chaos.store_root / layout.batch(victim.batch_id))
    chaos.client.flushall()
    aggregator = chaos.aggregator()
    batch = chaos.submit(chat_lines(32))
    assert chaos.client.lpop("gpu") is not None

    chaos.worker()

    rows = chaos.assert_right(batch)
    assert len(rows) == 32
    assert aggregator.running
