"""The asyncio pool: Celery hands a request to it, a coroutine on the engine host's loop runs it.

Owns: running coroutine tasks the way Celery's tracer runs ordinary ones, the receipts to the chord, the drain.
Must not know: engines, batches.
On failure: a coroutine that raises is a fault of ours, never the request's (its faults are rows): it is logged
without its arguments and handed back. A cancelled coroutine is not reported at all; its message stays
unacknowledged, and the transport puts it back when the worker shuts down (`Leases.hand_back`).

    on_apply ─▶ coroutine on the loop ─▶ finish, in a thread, with what finishes meanwhile:
                     │                   receipts to the chords ─▶ callbacks: acknowledge, event
                     │ cancelled (drain is over, engine dead): nothing; the message goes back to the queue

Celery 5.7 and kombu 5.7: the argument list of `on_apply` is that of `celery.worker.request.Request`
(`execute_using_pool`), what `_finish_many` does is what `celery.app.trace` does for a task without results.
`tests/contract/test_celery.py` holds both.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from billiard.einfo import ExceptionInfo
from celery import bootsteps
from celery.app.task import Context
from celery.concurrency import get_implementation
from celery.concurrency.base import BasePool, apply_target
from celery.exceptions import Reject
from celery.worker import state
from celery.worker.request import Request
from kombu.serialization import loads, prepare_accept_content

from common.errors import FleetError
from common.garbage import settle
from common.messages import PUBLISHED_S
from common.settings import AGGREGATE_QUEUE
from common.tracing import TRACEPARENT
from common.transport import Transport
from workers.engine.coalesce import Coalescer
from workers.engine.host import Delivery, Parked, current_delivery
from workers.receipts import Receipts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.engine.host import EngineHost

logger = logging.getLogger("fleet.pool")

#: How the answers of a server begin that takes no writes now; redis-py cuts "OOM " off.
_REFUSALS = ("command not allowed when used memory", "OOM ", "READONLY ", "MISCONF ", "NOREPLICAS ", "You can't write")

#: Seconds before a delivery is handed back whose coroutine failed by a fault of ours.
HAND_BACK_WAIT_S = 5.0


class QuietRequest(Request):  # type: ignore[misc]  # Celery has no types
    """A request that never tells its arguments: `celery inspect active`, which Flower asks too, would show prompts.

    Celery has read the body once, for itself; what it does not pass on (the chord) is kept for the pool.
    """

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self.request_dict["embed"] = self._payload[2]

    def info(self, safe: bool = True) -> dict[str, Any]:  # noqa: ARG002, FBT002 - Celery's signature
        """What is shown of a running request: its ids, as `argsrepr` and `kwargsrepr` have them."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown


class _Run:
    """One delivery on its way through the pool; Celery keeps a weak reference to it while the request runs."""

    __slots__ = ("__weakref__", "accept_callback", "args", "callback", "cancelled", "coroutine", "loop", "task")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        task: Any,
        args: tuple[Any, ...],
        callback: Callable[..., Any] | None,
        accept_callback: Callable[..., Any] | None,
    ) -> None:
        self.loop = loop
        self.task = task
        self.args = args
        self.callback = callback
        self.accept_callback = accept_callback
        self.coroutine: asyncio.Task[None] | None = None
        self.cancelled = False

    def terminate(self, signal: int | None = None) -> None:  # noqa: ARG002 - Celery's signature
        """Cancel, from any thread, also before it was started."""
        self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self.cancelled = True
        if self.coroutine is not None:
            self.coroutine.cancel()


class _InThread:
    """Celery's hold on a task that runs in a thread, which cannot be ended."""

    __slots__ = ("__weakref__", "_future")

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def terminate(self, signal: int | None = None) -> None:  # noqa: ARG002 - Celery's signature
        """Cancel it if it has not begun."""
        self._future.cancel()


@dataclass(slots=True)
class _Finished:
    """A delivery whose coroutine has returned. `failure`: it is handed back, and has no receipt."""

    task_id: str
    context: Context
    receipt: Any
    failure: Exception | None
    callback: Callable[..., Any] | None
    runtime_s: float


class TaskPool(BasePool):  # type: ignore[misc]  # Celery has no types
    """Runs coroutine tasks on the loop of an engine host; other tasks (Celery's own) in a thread."""

    body_can_be_buffer = True
    #: The pool waits for threads, which a signal handler must not do.
    signal_safe = False
    task_join_will_block = False

    def on_start(self) -> None:
        """Start the host and wait until its engine is ready, listening for a shutdown meanwhile.

        A start that fails is one sentence and exit 2; Celery alone would print a traceback and exit 1.
        """
        self._coroutines: set[asyncio.Task[None]] = set()
        #: Acknowledges what Celery put off; set once there is a consumer.
        self.acknowledge_deferred: Callable[[], None] = lambda: None
        self._finishers = ThreadPoolExecutor(2, thread_name_prefix="fleet-finish")
        self._finish: Coalescer[_Finished, None] = Coalescer(self._finish_many, self._finishers)
        self._receipts = Receipts(self.app.backend)
        self._accept = prepare_accept_content(self.app.conf.accept_content)
        #: Deliveries that Celery's thread has handed over and the loop has not taken up yet.
        self._handed_over: deque[_Run] = deque()
        self._is_woken = False
        self.drain_s: float = self.app.fleet.settings.drain_s
        try:
            self.host: EngineHost = self.app.fleet.make_host()
            self._wait_until_ready(self.host.start())
        except FleetError as exc:
            print(f"error: {exc}", file=sys.stderr, flush=True)
            raise SystemExit(exc.exit_code) from None
        self.limit = self.host.inflight
        settle()

    @staticmethod
    def _wait_until_ready(ready: Future[None]) -> None:
        while True:
            try:
                return ready.result(0.25)
            except TimeoutError:
                state.maybe_shutdown()

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **_: Any,
    ) -> _Run | _InThread:
        """Run one request. `args` is (task name, id, request, body, content type, content encoding)."""
        task = self.app.tasks[args[0]]
        if not inspect.iscoroutinefunction(task.run):
            return _InThread(self._finishers.submit(apply_target, target, args, kwargs, callback, accept_callback))
        run = _Run(self.host.loop, task, args, callback, accept_callback)
        self._handed_over.append(run)
        # One wake-up for all that is handed over before the loop turns: Celery receives many messages at once.
        if not self._is_woken:
            self._is_woken = True
            self.host.loop.call_soon_threadsafe(self._take_up)
        return run

    def _take_up(self) -> None:
        self._is_woken = False
        while self._handed_over:
            run = self._handed_over.popleft()
            run.coroutine = self.host.loop.create_task(self._run(run))
            self._coroutines.add(run.coroutine)
            run.coroutine.add_done_callback(self._coroutines.discard)
            if run.cancelled:
                run.coroutine.cancel()

    async def _run(self, run: _Run) -> None:
        _, task_id, request, body, content_type, content_encoding = run.args
        if run.accept_callback is not None:
            run.accept_callback(id(run.coroutine), time.monotonic())
        started = time.monotonic()
        embed = request.get("embed")
        if embed is None:  # one of Celery's own tasks
            positional, keywords, embed = loads(body, content_type, content_encoding, accept=self._accept)
        else:
            positional, keywords = request["args"], request["kwargs"]
        # Headers of others are of no use here, and looking for them takes Celery longer than all the rest.
        context = Context(
            {**request, "args": positional, "kwargs": keywords, "is_eager": False, "headers": {}, **(embed or {})}
        )
        tag = context.properties["delivery_tag"]
        published_s = request.get(PUBLISHED_S)
        self.host.observer.taken(
            redelivered=bool((context.delivery_info or {}).get("redelivered")),
            waited_s=time.time() - published_s if isinstance(published_s, (int, float)) else None,
        )
        traced = request.get(TRACEPARENT, "")
        current_delivery.set(Delivery(self.host, tag, chorded=bool(context.chord), traceparent=traced))
        failure: Exception | None = None
        receipt: Any = None
        try:
            receipt = await run.task.run(*positional, **keywords)
        except Parked:
            Transport.leases.park(tag)
            self.host.observer.parked()
            # Celery only frees the slot now: what is parked is not ours to acknowledge any more.
            if run.callback is not None:
                await self.host.loop.run_in_executor(self._finishers, run.callback, (False, None, 0.0))
            return
        except Exception as exc:
            logger.error("delivery %s failed by a fault of the fleet: %s", task_id, type(exc).__name__)
            logger.debug("delivery %s", task_id, exc_info=True)
            await asyncio.sleep(HAND_BACK_WAIT_S)
            failure = Reject("handed back", requeue=True)
        await self._finish(_Finished(task_id, context, receipt, failure, run.callback, time.monotonic() - started))

    def _finish_many(self, finished: Sequence[_Finished]) -> list[None]:
        """Count the receipts in the chords, then acknowledge. In this order: a crash between repeats both, harmlessly.

        What cannot be counted because the worker stops is not acknowledged either.
        """
        answers = [None] * len(finished)
        try:
            self._count([(each.task_id, each.receipt, each.context) for each in finished if each.failure is None])
        except Exception as exc:
            logger.error("%d receipts not counted: %s", len(finished), type(exc).__name__)
            logger.debug("receipts", exc_info=True)
            if state.should_stop is not None or state.should_terminate is not None:
                finished = [each for each in finished if each.failure is not None]
            # Else acknowledged all the same: the rows are recorded, the watchdog seals what no chord announces, and an
            # unacknowledged message would stay with this worker, and its slot be taken, until it stops.
        for each in finished:
            self._acknowledge(each)
        return answers

    @staticmethod
    def _acknowledge(each: _Finished) -> None:
        if each.callback is None:
            return
        try:
            if each.failure is None:
                each.callback((False, each.receipt, each.runtime_s))
                return
            try:
                raise each.failure
            except Reject:
                each.callback((True, ExceptionInfo(), each.runtime_s))
        except Exception as exc:
            logger.error("delivery %s not acknowledged: %s", each.task_id, type(exc).__name__)
            logger.debug("delivery %s", each.task_id, exc_info=True)

    def _count(self, parts: list[tuple[str, Any, Context]]) -> None:
        """Count receipts, again while Redis is away or takes no writes: Celery itself does not."""
        wait_s = 0.2
        while True:
            try:
                self._receipts.count(parts)
            except (*self.app.backend.connection_errors, redis.ResponseError) as exc:
                # A server that is full, read-only or cannot persist refuses writes for a while, as one that is away.
                if isinstance(exc, redis.ResponseError) and not str(exc).startswith(_REFUSALS):
                    raise
                logger.warning("%d receipts not counted yet: %s", len(parts), type(exc).__name__)
                if state.should_stop is not None or state.should_terminate is not None:
                    raise
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 5.0)
            else:
                return

    def terminate_job(self, pid: int, signal: int | None = None) -> None:  # noqa: ARG002 - Celery's signature
        """Cancel the coroutine that `accept_callback` announced under this number."""
        for coroutine in list(self._coroutines):
            if id(coroutine) == pid:
                self.host.loop.call_soon_threadsafe(coroutine.cancel)

    def on_stop(self) -> None:
        """Drain: let running requests finish for `drain_s`, cancel the rest, stop the engine."""
        if not hasattr(self, "host"):
            return
        self.host.drain()
        deadline = time.monotonic() + self.drain_s
        while self._coroutines and not self.host.dead and time.monotonic() < deadline:
            # Celery defers acknowledgements to the consumer's loop, which turns no more (celery 5.7,
            # worker/consumer/consumer.py, `call_soon`): what is finished would count as leased until the drain ends.
            self.acknowledge_deferred()
            time.sleep(0.02)
        left = len(self._coroutines)
        if left:
            logger.warning("handing back %d requests", left)
        self._close()

    def on_terminate(self) -> None:
        """A cold shutdown: hand everything back at once."""
        if hasattr(self, "host"):
            self.host.drain()
            self._close()

    def _close(self) -> None:
        for coroutine in list(self._coroutines):
            self.host.loop.call_soon_threadsafe(coroutine.cancel)
        deadline = time.monotonic() + 5.0
        while self._coroutines and time.monotonic() < deadline:
            time.sleep(0.01)
        self._finishers.shutdown(wait=True)
        self.host.stop()

    def _get_info(self) -> dict[str, Any]:
        return {**super()._get_info(), "in-flight": len(self._coroutines)}


def refuse_wrong_pool(worker: Any) -> None:
    """Refuse a worker whose pool cannot do what its queues ask for, before it takes a message and loses it.

    Requests are coroutines on an engine's loop; the aggregator's tasks wait for disk and Redis, in threads.
    Raises `SystemExit` with one sentence: inside Celery's signal any other exception would only be logged.
    """
    queues = worker.app.amqp.queues.consume_from
    aggregates = AGGREGATE_QUEUE in queues
    serves = len(queues) > aggregates
    ours = issubclass(get_implementation(worker.pool_cls), TaskPool)
    if serves and aggregates:
        reason = f"one worker cannot serve requests and {AGGREGATE_QUEUE!r}: name its queue with -Q"
    elif serves and not ours:
        reason = "a worker that serves requests needs the fleet's own pool: leave -P away"
    elif aggregates and ours:
        reason = f"the aggregator (-Q {AGGREGATE_QUEUE}) needs threads: -P threads"
    else:
        return
    print(f"error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _perform_deferred(consumer: Any) -> None:
    """Do what Celery put off for the consumer's loop (kombu 5.7, asynchronous/hub.py, `call_soon` and `_pop_ready`)."""
    if consumer.hub is None:
        consumer.perform_pending_operations()
        return
    for put_off in consumer.hub._pop_ready():  # noqa: SLF001 - the hub's own loop does the same
        put_off()


class EngineCapacity(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Sizes the prefetch by what the engine wants in flight, which is known only once it is loaded.

    A step between Celery's Pool and its Consumer (which is marked `last`).
    """

    requires = ("celery.worker.components:Pool",)

    def start(self, parent: Any) -> None:
        """Set the consumer's prefetch before it starts."""
        if isinstance(parent.pool, TaskPool):
            parent.concurrency = parent.pool.limit
            parent.pool.acknowledge_deferred = partial(_perform_deferred, parent.consumer)
            parent.consumer.initial_prefetch_count = parent.pool.limit * parent.prefetch_multiplier
