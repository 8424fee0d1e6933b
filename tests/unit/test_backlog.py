"""The measured rate, and the number of workers that follows from it."""

from __future__ import annotations

import pytest

from common.ledger import Progress, WorkerBeat
from workers.backlog import Rate, Run, Sample, desired_replicas, drain_s


def sample(finished: int, *, total: int = 1000, ready: int = 1, head: str = "fleet:b:1:head", **run: bool) -> Sample:
    workers = tuple(WorkerBeat(f"w{i}", "ready", "echo", ("m",), "gpu", 8) for i in range(ready))
    progress = Progress(
        total, 1, 1, finished, 0, "" if run.get("open", True) else "completed", "cancelled" if run.get("ending") else ""
    )
    counters = Run("b", progress, "gpu")
    return Sample({"gpu": 0}, 0, 0.0, 0, {head: counters}, workers, {})


def rate_of(*samples: tuple[float, Sample]) -> Rate:
    rate = Rate("gpu")
    for at, each in samples:
        rate.add(at, each)
    return rate


def test_a_rate_is_not_known_before_something_was_finished() -> None:
    assert rate_of((0, sample(100)), (5, sample(100))).per_second is None


def test_what_was_finished_before_the_first_sample_is_no_rate() -> None:
    rate = rate_of((0, sample(100)), (10, sample(120)))

    assert rate.per_second == 2.0
    assert rate.finished_total == 20


def test_the_rate_of_a_worker_is_by_the_workers_that_were_ready() -> None:
    rate = rate_of((0, sample(0, ready=4)), (10, sample(80, ready=4)))

    assert (rate.per_second, rate.per_worker) == (8.0, 2.0)


def test_time_without_work_or_without_workers_does_not_slow_the_rate_down() -> None:
    rate = rate_of(
        (0, sample(0)),
        (10, sample(50)),
        (20, sample(1000)),
        (5000, sample(1000)),
        (5010, sample(0, head="fleet:c:1:head")),
    )

    assert rate.per_second == 1000 / 20


def test_a_restored_head_counts_nothing_twice() -> None:
    """Redis was emptied: the head comes back with what the parts hold, and the rest is finished again."""
    rate = rate_of((0, sample(0)), (10, sample(100)), (20, sample(60)), (30, sample(110)))

    assert rate.finished_total == 110


def test_an_outage_does_not_count() -> None:
    rate = Rate("gpu")
    rate.add(0, sample(0))
    rate.add(10, sample(100))
    rate.skip()
    rate.add(1000, sample(100))

    assert rate.per_second == 10.0


def test_a_fleet_that_stands_still_has_the_rate_zero_after_a_minute() -> None:
    assert rate_of((0, sample(0)), (61, sample(0))).per_second == 0.0
    assert drain_s(10, 0.0) is None


def test_the_rate_forgets_what_is_older_than_its_window() -> None:
    rate = rate_of((0, sample(0, total=10**6)), (300, sample(300, total=10**6)), (600, sample(3300, total=10**6)))

    assert rate.per_second == 10.0


@pytest.mark.parametrize("run", [{"open": False}, {"ending": True}])
def test_a_run_that_is_over_or_ending_has_nothing_remaining(run: dict[str, bool]) -> None:
    assert sample(10, **run).remaining("gpu") == 0


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (0, {"remaining": 0, "waiting": 0}),
        (1, {"remaining": 0, "waiting": 3}),  # the last acknowledgements
        (1, {"remaining": 1}),
        (4, {"remaining": 7200}),
        (5, {"remaining": 7201}),
        (3, {"remaining": 7201, "most": 3}),
        (2, {"remaining": 0, "waiting": 0, "least": 2}),
        (1, {"remaining": 7200, "per_worker": None}),
        (6, {"remaining": 7200, "per_worker": None, "workers": 6}),
    ],
)
def test_workers_are_as_many_as_do_the_rest_in_time(expected: int, given: dict[str, int]) -> None:
    assert expected == desired_replicas(
        **{"waiting": 1, "workers": 0, "per_worker": 1.0, "target_s": 1800.0, "least": 0, "most": 0, **given}
    )


def routed(**counts: tuple[int, int]) -> Run:
    """A run of 100 requests over queues: published, and finished, by queue."""
    published = {queue: count for queue, (count, _) in counts.items()}
    finished = {queue: count for queue, (_, count) in counts.items()}
    return Run("b", Progress(100, 1, 1, sum(finished.values()), 0, "", "", {"m": (30, 60)}, published, finished), "gpu")


def test_what_is_not_published_yet_falls_to_the_queues_as_the_rest_did() -> None:
    run = routed(big=(10, 4), small=(40, 40))

    assert run.remaining == 56
    assert run.remaining_of("big") == 6 + 50 * 10 / 50
    assert run.remaining_of("small") == 50 * 40 / 50
    assert run.remaining_of("gpu") == 0
    assert run.finished_of("small") == 40


def test_tokens_are_estimated_by_those_of_the_finished_requests() -> None:
    assert routed(big=(100, 30)).tokens_per_request == 3.0


def test_a_run_of_one_queue_is_counted_for_the_default_one() -> None:
    run = sample(100).runs["fleet:b:1:head"]

    assert (run.remaining_of("gpu"), run.remaining_of("other")) == (900, 0)
    assert (run.finished_of("gpu"), run.finished_of("other")) == (100, 0)
