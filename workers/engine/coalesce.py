"""Coalescing: many small calls of one kind become few large ones.

Owns: `Coalescer`. Must not know: what is called.
On failure: an exception of the large call is raised to every caller that was part of it.

While one large call runs in a thread, the callers that come meanwhile gather for the next one. Nobody waits for a
timer: a lone caller goes out at once, and under load the batches grow by themselves.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: Most items of one large call.
MAX_BATCH = 256


class Coalescer(Generic[Item, Answer]):
    """Turns `await coalescer(item)` into calls of `call_many(items)` in a thread. Lives on one event loop."""

    def __init__(self, call_many: Callable[[Sequence[Item]], Sequence[Answer]], executor: Executor) -> None:
        self._call_many = call_many
        self._executor = executor
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        """The answer to `item`. A caller that is cancelled while it waits may or may not have been called for."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, answer))
        if self._flusher is None:
            self._flusher = loop.create_task(self._flush())
        return await answer

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                try:
                    answers = await loop.run_in_executor(self._executor, self._call_many, [item for item, _ in batch])
                except Exception as exc:  # noqa: BLE001 - belongs to the callers, whatever it is
                    for _, answer in batch:
                        if not answer.done():
                            answer.set_exception(exc)
                else:
                    for (_, answer), value in zip(batch, answers, strict=True):
                        if not answer.done():
                            answer.set_result(value)
        finally:
            self._flusher = None
