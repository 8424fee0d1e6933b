"""Random sequences of harm, by seed: whatever happens in whatever order, the batch completes and its rows are right."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.chaosfleet import LEASE_S, ChaosFleet, figures
from tests.chaos.conftest import SEQUENCES
from tests.invariants import chat_line, embedding_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers import Process

COUNT = 192
#: A request that four killed workers ran is taken for a poison; so many kills are not had in one sequence.
MOST_KILLS = 2


class Harm:
    """A fleet with two workers and an aggregator, and what may happen to it."""

    def __init__(self, fleet: ChaosFleet, dice: random.Random) -> None:
        self._fleet = fleet
        self._dice = dice
        self._kills = 0
        self._aggregator = fleet.aggregator()
        self.workers = list(fleet.two_workers(24, FLEET_DRAIN_S="1"))
        self.kinds: dict[str, Callable[[], object]] = {
            "kill worker": self._kill_worker,
            "stop worker": self._stop_worker,
            "freeze worker": self._freeze_worker,
            "kill aggregator": self._kill_aggregator,
            "restart broker": self._restart_broker,
            "empty broker": fleet.client.flushall,
            "drop connections": fleet.drop_connections,
            "pause broker": lambda: fleet.pause_broker(2.0),
            "lose a message": lambda: fleet.client.lpop("gpu"),
            "lose the aggregator's messages": lambda: fleet.client.delete("aggregate"),
            "repeat messages": fleet.duplicate,
            "repeat the aggregator's messages": lambda: fleet.duplicate("aggregate"),
        }

    def happen(self, steps: int) -> list[str]:
        """So many of these, with pauses between; returns which."""
        happened = []
        for _ in range(steps):
            time.sleep(self._dice.uniform(0.1, 1.5))
            kind = self._dice.choice(list(self.kinds))
            happened.append(kind)
            self.kinds[kind]()
        return happened

    def _worker(self) -> Process:
        return self._fleet.start_worker("--max-inflight", "24", FLEET_DRAIN_S="1")

    def _kill_worker(self) -> None:
        if self._kills < MOST_KILLS:
            self._kills += 1
            number = self._dice.randrange(2)
            self.workers[number].kill()
            self.workers[number] = self._worker()

    def _stop_worker(self) -> None:
        number = self._dice.randrange(2)
        self.workers[number].send(signal.SIGTERM)
        self.workers[number] = self._worker()

    def _freeze_worker(self) -> None:
        if self._kills < MOST_KILLS:  # to the others a frozen worker is a dead one
            self._kills += 1
            self._fleet.freeze(self._dice.choice(self.workers))
            time.sleep(self._dice.uniform(0.5, 2 * LEASE_S))
            self._fleet.thaw()

    def _kill_aggregator(self) -> None:
        self._aggregator.kill()
        self._aggregator = self._fleet.start("aggregate", "-m", "workers", "aggregate", "--loglevel", "INFO")

    def _restart_broker(self) -> None:
        self._fleet.kill_broker()
        time.sleep(self._dice.uniform(0.0, 1.0))
        self._fleet.start_broker()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(int(os.environ.get(SEQUENCES) or 1)))
def test_a_batch_survives_a_random_sequence(chaos: ChaosFleet, seed: int) -> None:
    """Every second sequence has several requests in a message."""
    dice = random.Random(seed)
    line = embedding_line if seed % 2 else chat_line
    if seed % 2:
        chaos.environment["FLEET_WINDOW"] = str(COUNT)  # all are published before it shows that they are slow
    harm = Harm(chaos, dice)
    if seed % 2:
        chaos.warm_up(*harm.workers)
    latencies = [dice.choice([0.2, 1.0, 2.5, 4.0]) for _ in range(COUNT)]
    batch = chaos.submit(
        [line(f"r{n}", f"text {n}", echo={"latency_s": latency}) for n, latency in enumerate(latencies)]
    )
    assert (max(chaos.packed()) > 1) == bool(seed % 2)
    started = time.monotonic()

    happened = harm.happen(5)

    try:
        chaos.assert_right(batch, timeout_s=100)
    except AssertionError as exc:
        raise AssertionError(f"seed {seed}: {happened}: {exc}") from None
    took_s = time.monotonic() - started
    figures("sequence", seed=seed, happened=happened, seconds=round(took_s, 1), calls=chaos.calls.total(batch.batch_id))
