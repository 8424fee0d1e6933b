"""Requests of one message: none of them harms the others, and the message goes back if one must."""

from __future__ import annotations

import asyncio

import pytest

from workers.engine.host import Parked
from workers.together import run_together


async def ends() -> None:
    """Ends."""
    await asyncio.sleep(0)


async def raises(exc: BaseException) -> None:
    """Raises."""
    await asyncio.sleep(0)
    raise exc


def test_all_run_at_once() -> None:
    async def main() -> None:
        met = asyncio.Barrier(3)
        await asyncio.wait_for(run_together(met.wait() for _ in range(3)), 5)  # type: ignore[misc]  # returns a number

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        ([], None),
        ([Parked()], Parked),
        ([Parked(), RuntimeError()], RuntimeError),
        ([RuntimeError(), Parked()], RuntimeError),
    ],
)
def test_the_others_end_before_one_is_told(raised: list[Exception], wanted: type[Exception] | None) -> None:
    async def main() -> bool:
        ended = False

        async def slow() -> None:
            nonlocal ended
            await asyncio.sleep(0.05)
            ended = True

        together = run_together([*(raises(exc) for exc in raised), slow(), ends()])
        if wanted is None:
            await together
        else:
            with pytest.raises(wanted):
                await together
        return ended

    assert asyncio.run(main())


def test_who_is_cancelled_waits_until_all_have_cleaned_up() -> None:
    async def main() -> list[int]:
        cleaned = []

        async def held(number: int) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0.02)
                cleaned.append(number)

        together = asyncio.ensure_future(run_together(held(number) for number in range(3)))
        await asyncio.sleep(0.01)
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        return cleaned

    assert sorted(asyncio.run(main())) == [0, 1, 2]
