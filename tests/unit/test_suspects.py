"""The quarantine: who may run beside whom, by strikes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from workers.engine.suspects import ALONE, SUSPECT, Quarantine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Requests:
    """Requests that run until they are let go."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, strikes: int) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()
        task = asyncio.ensure_future(self._run(name, strikes))
        self.tasks.append(task)
        return task

    async def _run(self, name: str, strikes: int) -> None:
        async with self._quarantine.admit(strikes):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    def end(self, name: str) -> None:
        self._ends[name].set()


def run(scenario: Callable[[Requests], Awaitable[None]]) -> None:
    async def main() -> None:
        requests = Requests(Quarantine())
        await scenario(requests)
        for task in requests.tasks:
            task.cancel()
        await asyncio.wait(requests.tasks)

    asyncio.run(main())


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("strikes", [0, 1])
def test_one_strike_changes_nothing(strikes: int) -> None:
    """Everything that ran beside a request that killed its worker has one."""

    async def scenario(requests: Requests) -> None:
        for name in "abc":
            requests.start(name, strikes)
        await turns()
        assert requests.running == ["a", "b", "c"]

    run(scenario)


def test_suspects_run_one_at_a_time_beside_the_innocent() -> None:
    async def scenario(requests: Requests) -> None:
        requests.start("innocent", 0)
        requests.start("first", SUSPECT)
        requests.start("second", SUSPECT)
        await turns()
        assert requests.running == ["innocent", "first"]
        requests.end("first")
        await turns()
        assert requests.running == ["innocent", "second"]

    run(scenario)


def test_with_more_strikes_a_request_runs_alone() -> None:
    """It waits for those who run, and those who come wait for it."""

    async def scenario(requests: Requests) -> None:
        requests.start("before", 0)
        await turns()
        requests.start("deadly", ALONE)
        await turns()
        requests.start("after", 0)
        await turns()
        assert requests.running == ["before"]
        requests.end("before")
        await turns()
        assert requests.running == ["deadly"]
        requests.end("deadly")
        await turns()
        assert requests.running == ["after"]

    run(scenario)


def test_a_cancelled_request_reopens_what_it_closed() -> None:
    """Also one that was still waiting for its turn."""

    async def scenario(requests: Requests) -> None:
        requests.start("before", 0)
        await turns()
        waiting = requests.start("deadly", ALONE)
        await turns()
        waiting.cancel()
        requests.start("after", 0)
        await turns()
        assert requests.running == ["before", "after"]

    run(scenario)
