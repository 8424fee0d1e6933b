"""What the aggregator's tasks do with an error: outages are waited for, and nothing that can be healed is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore

from common.errors import NoSuchBatchError, StoreUnavailableError, UsageError
from workers.tasks import GIVE_UP_TRIES, MAX_WAIT_S, OUTAGES, _later


class Task:
    """The part of a bound Celery task that `_later` uses."""

    name = "fleet.seal_shard"

    def __init__(self, retries: int) -> None:
        self.request = SimpleNamespace(retries=retries)
        self.countdown: float | None = None

    def retry(self, *, countdown: float, **_: Any) -> Exception:
        self.countdown = countdown
        return RuntimeError("retry")


@pytest.mark.parametrize("error", [NoSuchBatchError, StoreUnavailableError, UsageError])
def test_a_store_that_is_missing_wrong_or_away_is_waited_for(error: type[Exception]) -> None:
    """An aggregator that looks at another store must not eat the message of a batch that exists elsewhere."""
    assert issubclass(error, OUTAGES)
    task = Task(retries=2)

    assert isinstance(_later(task, error("x")), RuntimeError)
    assert task.countdown == 4


def test_waits_grow_and_stay_bounded() -> None:
    task = Task(retries=50)
    _later(task, StoreUnavailableError("x"))

    assert task.countdown == MAX_WAIT_S


def test_only_a_batch_that_nobody_has_for_an_hour_is_given_up() -> None:
    """An outage is waited for without end."""
    assert isinstance(_later(Task(GIVE_UP_TRIES + 1), NoSuchBatchError("x")), Ignore)
    assert not isinstance(_later(Task(GIVE_UP_TRIES + 1), StoreUnavailableError("x")), Ignore)
