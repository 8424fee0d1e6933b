"""The ledger on a real server: the first row wins, and nothing is written for a run that Redis does not know."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import keys, layout
from common.ledger import Address, Begun, Claim, Ledger, Recorded, Row, Verdict, WorkerBeat
from tests.servers import wait_until

if TYPE_CHECKING:
    from tests.servers import BrokerServer


@pytest.fixture
def ledger(broker_server: BrokerServer) -> Ledger:
    return Ledger(broker_server.client)


@pytest.fixture
def batch() -> str:
    return layout.new_batch_id()


def restored(ledger: Ledger, batch: str, *, total: int = 4, shards: int = 1, step: int = 1000, **known: Any) -> str:
    ledger.restore(batch, 1, total=total, shards=shards, step=step, **known)
    return batch


def at(batch: str, index: int = 0, *, shard: int = 0, run: int = 1) -> Address:
    return Address(batch, run, shard, index)


def row(address: Address, text: bytes = b"row", *, failed: bool = False, tokens: int = 0, count: int = 4) -> Row:
    return Row(address, text, failed, tokens, 2 * tokens, count, model="m", queue="gpu")


def rows_of(ledger: Ledger, batch: str, count: int = 4) -> list[bytes | None]:
    return list(ledger.rows(batch, 1, 0, range(count)))


def all_keys(server: BrokerServer, batch: str) -> set[bytes]:
    return set(server.client.scan_iter(f"fleet:{batch}:*"))


# -- rows --------------------------------------------------------------------------------------------------------------


def test_the_first_row_of_an_index_wins_and_counts_once(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)

    (first,) = ledger.record([row(at(batch), b"first", tokens=3)])
    (second,) = ledger.record([row(at(batch), b"second", failed=True, tokens=5)])

    assert (first.verdict, second.verdict) == (Verdict.OURS, Verdict.DONE)
    assert rows_of(ledger, batch)[0] == b"first"
    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert (progress.finished, progress.failed, progress.tokens) == (1, 0, {"m": (3, 6)})


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_any_sequence_of_duplicates_keeps_first_rows_and_true_counters(
    broker_server: BrokerServer, deliveries: list[tuple[int, bool]]
) -> None:
    ledger, batch = Ledger(broker_server.client), layout.new_batch_id()
    restored(ledger, batch)
    first: dict[int, tuple[bytes, bool]] = {}
    for number, (index, failed) in enumerate(deliveries):
        text = b"%d" % number
        (answer,) = ledger.record([row(at(batch, index), text, failed=failed)])
        assert answer.verdict is (Verdict.DONE if index in first else Verdict.OURS)
        first.setdefault(index, (text, failed))
        assert answer.full == (len(first) == 4)

    assert rows_of(ledger, batch) == [first[index][0] if index in first else None for index in range(4)]
    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert progress.finished == len(first)
    assert progress.failed == sum(failed for _, failed in first.values())


def test_of_many_threads_that_record_one_index_one_wins(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch, total=50)
    start = threading.Barrier(8)

    def record_all(worker: int) -> list[Recorded]:
        start.wait()
        return [ledger.record([row(at(batch, index), b"%d" % worker, count=50)])[0] for index in range(50)]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(record_all, range(8)))

    for index in range(50):
        assert [each[index].verdict for each in answers].count(Verdict.OURS) == 1
    for index, recorded in enumerate(rows_of(ledger, batch, 50)):
        (winner,) = (worker for worker, each in enumerate(answers) if each[index].verdict is Verdict.OURS)
        assert recorded == b"%d" % winner
    assert sum(each[index].full and each[index].verdict is Verdict.OURS for each in answers for index in range(50)) == 1


def test_many_rows_in_one_call_are_answered_one_by_one(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)

    answers = ledger.record([row(at(batch, 0)), row(at(batch, 0)), row(at(batch, 1))])

    assert [answer.verdict for answer in answers] == [Verdict.OURS, Verdict.DONE, Verdict.OURS]


def test_recording_says_when_the_shard_is_full(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)

    answers = ledger.record([row(at(batch, index)) for index in (2, 0, 3, 1)])

    assert [answer.full for answer in answers] == [False, False, False, True]


def test_a_full_shard_is_announced_again_to_whoever_comes_late(ledger: Ledger, batch: str) -> None:
    """The one who filled it may have died before it sent `seal_shard`."""
    restored(ledger, batch)
    ledger.record([row(at(batch, index)) for index in range(4)])

    (late,) = ledger.record([row(at(batch, 2), b"late")])

    assert late == Recorded(Verdict.DONE, full=True)


@pytest.mark.parametrize("strange", ["no json", "{}", "[]", "7"])
def test_a_heartbeat_that_cannot_be_read_is_nobodys(ledger: Ledger, strange: str) -> None:
    beat = WorkerBeat("w", "ready", "echo", ("m",), "gpu", 4)
    ledger.beat(beat, 30)
    ledger._client.set(keys.worker("x"), strange)
    ledger._client.zadd(keys.WORKERS, {"x": 1.0})
    try:
        assert ledger.workers() == [beat]
    finally:
        ledger.forget_worker("w")
        ledger.forget_worker("x")


def test_recording_asks_for_a_feed_at_every_step_while_shards_are_unpublished(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch, total=8, shards=2, step=2)
    answers = ledger.record([row(at(batch, index)) for index in range(4)])
    assert [answer.feed for answer in answers] == [False, True, False, True]

    assert ledger.claim_shard(batch, 1, 0)
    assert ledger.claim_shard(batch, 1, 1)

    answers = ledger.record([row(at(batch, index, shard=1)) for index in range(4, 8)])
    assert not any(answer.feed for answer in answers)


def test_rows_of_two_runs_do_not_meet(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)
    ledger.restore(batch, 2, total=4, shards=1, step=10)

    ledger.record([row(at(batch, run=2), b"second run")])

    assert rows_of(ledger, batch) == [None] * 4


def test_rows_are_read_in_order_across_slices(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch, total=1100)
    ledger.record([row(at(batch, index), b"%d" % index, count=1100) for index in reversed(range(1100)) if index != 700])

    found = rows_of(ledger, batch, 1100)

    assert found == [None if index == 700 else b"%d" % index for index in range(1100)]


# -- begin -------------------------------------------------------------------------------------------------------------


def test_begin_counts_the_engine_calls_of_a_request(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)

    answers = ledger.begin([Claim(at(batch), "w1/a"), Claim(at(batch), "w2/b"), Claim(at(batch, 1), "w1/c")])

    assert answers == [Begun(Verdict.OURS, 0), Begun(Verdict.OURS, 1, strikes=1), Begun(Verdict.OURS, 0)]


def test_begin_marks_who_runs_and_record_clears_the_mark(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    restored(ledger, batch)
    ledger.begin([Claim(at(batch, 2), "w1/a")])
    assert broker_server.client.hgetall(keys.marks(batch, 1, 0)) == {b"2": b"w1/a"}

    ledger.record([row(at(batch, 2))])

    assert broker_server.client.hgetall(keys.marks(batch, 1, 0)) == {}


def test_begin_on_a_recorded_request_is_done(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)
    ledger.record([row(at(batch))])

    assert ledger.begin([Claim(at(batch), "w/a"), Claim(at(batch, 1), "w/b")]) == [
        Begun(Verdict.DONE),
        Begun(Verdict.OURS),
    ]


def test_begin_and_record_on_a_sealed_shard_are_done_and_write_nothing(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    restored(ledger, batch)
    ledger.mark_sealed(batch, 1, 0, 4)
    ledger.drop_shard(batch, 1, 0)

    assert ledger.begin([Claim(at(batch), "w/a")]) == [Begun(Verdict.DONE)]
    assert ledger.record([row(at(batch))]) == [Recorded(Verdict.DONE)]
    assert not broker_server.client.exists(keys.rows(batch, 1, 0), keys.marks(batch, 1, 0), keys.calls(batch, 1, 0))


def test_begin_and_record_on_a_closed_run_are_done_and_write_nothing(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    restored(ledger, batch)
    ledger.close(batch, 1, "completed")

    assert ledger.begin([Claim(at(batch), "w/a")]) == [Begun(Verdict.DONE)]
    assert ledger.record([row(at(batch))]) == [Recorded(Verdict.DONE)]
    assert not broker_server.client.exists(keys.rows(batch, 1, 0), keys.marks(batch, 1, 0), keys.calls(batch, 1, 0))


def test_nothing_is_written_for_a_run_that_redis_does_not_know(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    assert ledger.begin([Claim(at(batch), "w/a")]) == [Begun(Verdict.UNKNOWN)]
    assert ledger.record([row(at(batch))]) == [Recorded(Verdict.UNKNOWN)]
    assert ledger.claim_shard(batch, 1, 0) is False
    ledger.mark_sealed(batch, 1, 0, 4)
    ledger.close(batch, 1, "completed")

    assert ledger.progress(batch, 1) is None
    assert all_keys(broker_server, batch) == set()


# -- runs --------------------------------------------------------------------------------------------------------------


def test_of_many_feeders_one_wins_each_shard(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch, total=400, shards=100)
    start = threading.Barrier(6)

    def claim_all(_: int) -> list[int]:
        start.wait()
        return [shard for shard in range(100) if ledger.claim_shard(batch, 1, shard)]

    with ThreadPoolExecutor(6) as threads:
        won = [shard for each in threads.map(claim_all, range(6)) for shard in each]

    assert sorted(won) == sorted(set(won))
    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert progress.frontier == len(won)


def test_a_shard_is_claimed_only_when_the_frontier_stands_there(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch, shards=3)

    assert [ledger.claim_shard(batch, 1, shard) for shard in (1, 0, 0, 2, 1)] == [False, True, False, False, True]


def test_a_closed_run_gives_out_no_shard(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch, shards=3)
    ledger.close(batch, 1, "cancelled")

    assert ledger.claim_shard(batch, 1, 0) is False


def test_restore_writes_once_and_leaves_a_run_in_flight_alone(ledger: Ledger, batch: str) -> None:
    assert ledger.restore(batch, 1, total=8, shards=2, step=5, sealed=[1], finished=4, failed=1, tokens={"m": (7, 0)})
    before = ledger.progress(batch, 1)
    assert before is not None
    assert (before.total, before.shards, before.finished, before.failed, before.tokens) == (8, 2, 4, 1, {"m": (7, 0)})
    assert (before.frontier, before.closed) == (0, "")
    assert [ledger.is_sealed(batch, 1, shard) for shard in (0, 1)] == [False, True]

    assert not ledger.restore(batch, 1, total=99, shards=99, step=99, sealed=[0])

    assert ledger.progress(batch, 1) == before
    assert ledger.sealed_count(batch, 1) == 1


def test_restore_drops_what_an_expired_head_left_behind(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    restored(ledger, batch, sealed=[0])
    broker_server.client.delete(keys.head(batch, 1))

    restored(ledger, batch)

    assert not ledger.is_sealed(batch, 1, 0)


def test_closing_gives_every_key_a_ttl_and_open_runs_have_none(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    restored(ledger, batch, sealed=[0])
    client = broker_server.client
    assert {client.ttl(key) for key in all_keys(broker_server, batch)} == {-1}

    ledger.close(batch, 1, "completed")

    assert all(0 < client.ttl(key) <= keys.CLOSED_TTL_S for key in all_keys(broker_server, batch))
    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert progress.closed == "completed"


def test_rows_of_a_shard_that_was_never_sealed_get_a_ttl_when_the_run_closes(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    """A run that is cancelled, or restored after its end, closes with rows in Redis: no key of it may stay for ever."""
    restored(ledger, batch)
    ledger.begin([Claim(at(batch, 1), "w/a")])
    ledger.record([row(at(batch))])

    ledger.close(batch, 1, "cancelled")

    client = broker_server.client
    assert [key for key in all_keys(broker_server, batch) if client.ttl(key) == -1] == []


def test_scripts_survive_a_server_that_forgot_them(ledger: Ledger, batch: str, broker_server: BrokerServer) -> None:
    restored(ledger, batch)
    ledger.record([row(at(batch))])
    ledger.begin([Claim(at(batch, 1), "w/a")])

    broker_server.client.script_flush()

    assert ledger.record([row(at(batch, 1))])[0].verdict is Verdict.OURS
    assert ledger.begin([Claim(at(batch, 2), "w/a")])[0].verdict is Verdict.OURS
    assert ledger.claim_shard(batch, 1, 0)
    ledger.close(batch, 1, "completed")
    assert ledger.restore(batch, 2, total=1, shards=1, step=1)


# -- workers -----------------------------------------------------------------------------------------------------------


def test_a_worker_lives_as_long_as_its_heartbeat(ledger: Ledger, broker_server: BrokerServer) -> None:
    alive = WorkerBeat("alive", "ready", "echo", ("m", "n"), "gpu", 256, "file:///store", "id")
    ledger.beat(alive, 60)
    ledger.beat(WorkerBeat("dying", "ready", "echo", ("m",), "gpu", 1), 0.05)

    wait_until(lambda: [beat.worker_id for beat in ledger.workers()] == ["alive"], 5, "a heartbeat ends")

    assert ledger.workers() == [alive]
    assert broker_server.client.zscore(keys.WORKERS, "dying") is None
    assert broker_server.client.ttl(keys.WORKERS) > 0
    ledger.forget_worker("alive")
    assert ledger.workers() == []


# -- deaths and early ends ---------------------------------------------------------------------------------------------


def alive(ledger: Ledger, worker: str, ttl_s: float = 60.0) -> None:
    ledger.beat(WorkerBeat(worker, "ready", "echo", ("m",), "gpu", 1), ttl_s)


def test_a_request_that_a_live_worker_runs_is_parked(ledger: Ledger, batch: str) -> None:
    """Also another delivery of it to the same worker; its own delivery may begin again."""
    restored(ledger, batch)
    alive(ledger, "w1")
    ledger.begin([Claim(at(batch), "w1/a")])

    answers = ledger.begin([Claim(at(batch), "w2/b"), Claim(at(batch), "w1/c"), Claim(at(batch), "w1/a")])

    ledger.forget_worker("w1")
    assert [answer.verdict for answer in answers] == [Verdict.PARKED, Verdict.PARKED, Verdict.OURS]
    assert answers[2].strikes == 0


def test_each_death_is_a_strike_until_the_request_is_poison(broker_server: BrokerServer, batch: str) -> None:
    """With three deliveries allowed the fourth death fails it: poison is not begun, and marks nobody."""
    ledger = Ledger(broker_server.client, max_deliveries=3)
    restored(ledger, batch)

    found = [ledger.begin([Claim(at(batch), f"dead{number}/x", number)])[0] for number in range(5)]

    assert [(answer.verdict, answer.strikes) for answer in found] == [
        (Verdict.OURS, 0),
        (Verdict.OURS, 1),
        (Verdict.OURS, 2),
        (Verdict.OURS, 3),
        (Verdict.POISON, 4),
    ]
    assert broker_server.client.hlen(keys.marks(batch, 1, 0)) == 0


def test_a_suspect_that_nobody_admitted_is_not_marked(ledger: Ledger, batch: str, broker_server: BrokerServer) -> None:
    """A worker that dies while it waits for its turn must not strike it."""
    restored(ledger, batch)
    for number in range(2):
        ledger.begin([Claim(at(batch), f"dead{number}/x", number)])

    (waiting,) = ledger.begin([Claim(at(batch), "dead2/x")])

    assert (waiting.verdict, waiting.strikes) == (Verdict.SUSPECT, 2)
    assert broker_server.client.hlen(keys.marks(batch, 1, 0)) == 0


def test_a_delivery_that_was_handed_back_is_no_strike(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)
    ledger.begin([Claim(at(batch), "gone1/a")])

    ledger.release(at(batch), "gone2/other")
    (struck,) = ledger.begin([Claim(at(batch), "gone3/b")])
    ledger.release(at(batch), "gone3/b")
    (after,) = ledger.begin([Claim(at(batch), "gone4/c")])

    assert struck.strikes == 1, "somebody else's release does not take the mark away"
    assert after.strikes == 1, "our own does"


def test_nothing_is_begun_of_a_run_that_ends_early_and_rows_still_count(ledger: Ledger, batch: str) -> None:
    """What was running when the cancel came may still be recorded, until its shard is sealed."""
    restored(ledger, batch)
    ledger.set_ending(batch, 1, "cancelled")
    ledger.set_ending(batch, 1, "expired")

    (begun,) = ledger.begin([Claim(at(batch), "w/a")])
    (recorded,) = ledger.record([row(at(batch))])

    assert begun.verdict is Verdict.DONE
    assert recorded.verdict is Verdict.OURS
    assert ledger.endings([(batch, 1), (layout.new_batch_id(), 1)]) == ["cancelled", ""]


def test_the_backlog_is_what_waits_and_what_is_not_published(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    queue, published, ending, closed = f"queue-{batch}", *(layout.new_batch_id() for _ in range(3))
    for each in (batch, published, ending, closed):
        restored(ledger, each, shards=2)
    for shard in range(2):
        ledger.claim_shard(published, 1, shard)
    ledger.claim_shard(batch, 1, 0)
    ledger.set_ending(ending, 1, "cancelled")
    ledger.close(closed, 1, "completed")
    broker_server.client.rpush(queue, "a", "b", "c")
    runs = [(each, 1) for each in (batch, published, ending, closed, layout.new_batch_id())]

    assert ledger.backlog(queue, runs) == (3, {(batch, 1)})
    assert ledger.backlog(f"no-{queue}", []) == (0, set())


def test_only_marks_of_live_workers_count_as_running(ledger: Ledger, batch: str) -> None:
    restored(ledger, batch)
    alive(ledger, "w1")
    ledger.begin([Claim(at(batch, 0), "w1/a"), Claim(at(batch, 1), "gone/b")])

    running = ledger.running(batch, 1, 0)
    ledger.forget_worker("w1")

    assert running == {0}


def test_one_watchdog_at_a_time_and_the_next_one_when_it_is_silent(ledger: Ledger, broker_server: BrokerServer) -> None:
    broker_server.client.delete(keys.WATCHDOG)

    assert ledger.be_watchdog("a", 60)
    assert ledger.be_watchdog("a", 5.0)
    assert not ledger.be_watchdog("b", 60)
    wait_until(lambda: ledger.be_watchdog("b", 60), 20, "the lock runs out")


def test_keys_of_an_open_run_lose_a_ttl_that_somebody_gave_them(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    restored(ledger, batch)
    ledger.record([row(at(batch))])
    for key in all_keys(broker_server, batch):
        broker_server.client.expire(key, 1000)

    ledger.keep_open(batch, 1, [0])

    assert {broker_server.client.ttl(key) for key in all_keys(broker_server, batch)} == {-1}


def test_all_that_was_let_expire_is_kept_when_the_batch_comes_back(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    """Marks of spilled rows, too, of shards that are not published yet; not those of the run that has closed."""
    restored(ledger, batch)
    ledger.close(batch, 1, "completed")
    ledger.restore(batch, 2, total=12, shards=3, step=5, spilled={0: [1], 2: [9, 10]})
    assert ledger.let_expire(batch) == 3
    assert all(broker_server.client.ttl(key) > 0 for key in all_keys(broker_server, batch))

    ledger.keep_open(batch, 2, [0])

    ttls = {key: broker_server.client.ttl(key) for key in all_keys(broker_server, batch)}
    assert {key for key, ttl_s in ttls.items() if ttl_s == -1} == {
        keys.head(batch, 2).encode(), keys.rows(batch, 2, 0).encode(), keys.rows(batch, 2, 2).encode(),
    }  # fmt: skip
    assert ttls[keys.head(batch, 1).encode()] > 0


def test_a_run_that_closed_meanwhile_is_not_kept(ledger: Ledger, batch: str, broker_server: BrokerServer) -> None:
    """Else its keys would stay for ever."""
    restored(ledger, batch)
    ledger.close(batch, 1, "completed")

    ledger.keep_open(batch, 1, [0])

    assert all(broker_server.client.ttl(key) > 0 for key in all_keys(broker_server, batch))


def test_missing_are_the_indexes_without_a_row_and_no_row_is_read_for_it(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    """The watchdog asks this of every open shard every few seconds, and rows may be large."""
    restored(ledger, batch)
    ledger.record([row(at(batch, 1), b"x" * 1_000_000), row(at(batch, 3))])
    sent = int(broker_server.client.info("stats")["total_net_output_bytes"])

    missing = ledger.missing(batch, 1, 0, range(4))

    assert missing == {0, 2}
    assert int(broker_server.client.info("stats")["total_net_output_bytes"]) - sent < 100_000


def test_a_failure_at_the_limit_asks_for_a_feed(ledger: Ledger, batch: str) -> None:
    """Where the aggregator ends the batch; a success does not, and neither does a failure before."""
    ledger.restore(batch, 1, total=40, shards=1, step=1000, fail_after=2)

    answers = ledger.record([row(at(batch, n), failed=n in (1, 3), count=40) for n in range(5)])

    assert [answer.feed for answer in answers] == [False, False, False, True, False]


def test_finished_requests_are_counted_by_queue_where_they_were_published_by_queue(ledger: Ledger, batch: str) -> None:
    ledger.restore(batch, 1, total=40, shards=1, step=1000)
    ledger.record([row(at(batch, 0), count=40)])
    ledger.note_published(batch, 1, {"gpu": 3, "other": 2})

    ledger.record([row(at(batch, 1), count=40)])

    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert (progress.unfinished("gpu"), progress.unfinished("other"), progress.unfinished("no")) == (2, 2, 0)


def test_rows_that_were_sealed_while_redis_lost_them_count_as_finished(ledger: Ledger, batch: str) -> None:
    """Else the window stays smaller by them for ever, and nothing may be published again. Noted twice, counted once."""
    ledger.restore(batch, 1, total=8, shards=2, step=5)
    ledger.record([row(at(batch, 0), tokens=1)])

    for _ in range(2):
        ledger.note_sealed(batch, 1, 0, 4)

    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert (progress.finished, progress.exact) == (4, False)


def test_rows_that_were_recorded_are_not_counted_again_when_they_are_sealed(ledger: Ledger, batch: str) -> None:
    ledger.restore(batch, 1, total=8, shards=2, step=5)
    ledger.record([row(at(batch, n)) for n in range(4)])

    ledger.note_sealed(batch, 1, 0, 4)

    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert (progress.finished, progress.exact) == (4, True)


def test_a_run_that_has_ended_comes_back_closed_and_expires(
    ledger: Ledger, batch: str, broker_server: BrokerServer
) -> None:
    """In one step: whoever dies after it must not leave a head that reads as open."""
    ledger.close(batch, 1, "completed")
    broker_server.client.delete(keys.head(batch, 1))

    assert ledger.restore(batch, 1, total=8, shards=2, step=5, sealed=[0, 1], closed="completed")

    progress = ledger.progress(batch, 1)
    assert progress is not None
    assert progress.closed == "completed"
    assert broker_server.client.ttl(keys.head(batch, 1)) > 0
    assert broker_server.client.ttl(keys.sealed(batch, 1)) > 0


def test_a_late_close_of_a_run_leaves_the_next_one_announced(ledger: Ledger, batch: str) -> None:
    ledger.note_reopened(batch, 2)

    ledger.close(batch, 1, "completed")

    assert ledger.reopened() == {batch}
    ledger.restore(batch, 2, total=1, shards=1, step=1)
    ledger.close(batch, 2, "completed")
    assert ledger.reopened() == set()
