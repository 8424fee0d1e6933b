"""The engine host: one engine, the event loop that owns it, and the life of a request on it.

Owns: the loop's thread, starting and stopping the engine, its health, the worker's heartbeat, and `run_request`.
Must not know: Celery, kombu, the store.
On failure: a request's own fault becomes its row. Infrastructure never does: a dead engine calls `on_death` once and
every delivery is then held, unacknowledged, until the pool stops and the broker hands it to another worker.

One delivery on the host:

    begin ──DONE──▶ receipt                                (recorded, sealed, closed or ending: no engine call)
      │ PARKED (a live worker runs it): raised; the pool lets go of it, and its lease brings it back
      │ POISON (it killed too often): a `workers_lost` row
      │ a suspect: waits, unmarked, for its turn in the quarantine
      │ UNKNOWN: ask for a restore, try again; Redis away: try again
      ▼ OURS
    engine.run ──the engine is dead, or dies within 2 s of an abort──▶ held (never a row)
      │ any other exception: an `internal_error` row
      │ a retryable failure, an abort by a living engine: from `begin` again, a bounded number of times
      ▼
    record ──UNKNOWN or Redis away──▶ keep the row, try again
      ▼
    receipt (and, where it fell due, `seal_shard` or `feed`)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import redis

from common import tracing
from common.batch import LineError, custom_id_of, failed_row, model_of, parse_line
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import Failure, FailureKind
from common.ledger import Address, Begun, Claim, Recorded, Row, Verdict, WorkerBeat
from common.packs import may_be_short
from workers.engine import Reply, Request
from workers.engine.coalesce import Coalescer
from workers.engine.observer import Unobserved
from workers.engine.pace import Pace
from workers.engine.suspects import Quarantine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from common.ledger import Ledger
    from workers.engine import Engine
    from workers.engine.observer import Observer

logger = logging.getLogger("fleet.host")

#: Seconds between two looks at the engine's health (a dead engine may be idle, so nobody else would notice), at runs
#: that end, and between two ticks of the loop.
WATCH_INTERVAL_S = 1.0
#: Seconds after which a loop that does not turn counts as hung. A long prompt may hold it for a second or two.
STALE_S = 15.0
#: Engine calls of one delivery while its failure is retryable, and the wait before the second one (then doubled).
MAX_TRIES = 3
RETRY_WAIT_S = 0.5
#: Seconds after an aborted answer in which an engine that was told to stop is seen to die.
ABORT_WAIT_S = 2.0
#: Seconds between two lines of the log about a Redis that does not answer.
COMPLAIN_S = 5.0
#: Longest wait between tries to reach Redis.
MAX_REDIS_WAIT_S = 5.0


class Parked(Exception):  # noqa: N818 - a state, not an error
    """A live worker runs this request already: free the slot, let the lease bring the delivery back."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One hand-over of a request's message to this worker. `chorded`: its chord announces the shard's end.

    `traceparent` is what the message's header of that name holds: of a traced batch its root, else "".
    """

    host: EngineHost
    delivery_id: str
    chorded: bool
    traceparent: object = ""


@dataclass(slots=True)
class _InHand:
    """A request that is being run. `ending`: it was cancelled because its run ends."""

    at: Address
    task: asyncio.Task[Any]
    ending: bool = False


def _poison_message(strikes: int) -> str:
    return f"given up: {strikes} workers or engines died while they ran this request"


def _is_cancelled() -> bool:
    """Whether somebody cancelled the current task: the pool, a revoke, or the end of its run."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


#: The delivery that the current coroutine runs; set by the pool.
current_delivery: ContextVar[Delivery] = ContextVar("fleet_delivery")


async def _whatever_comes(work: Coroutine[Any, Any, None]) -> None:
    """Wait for what must be done although we are cancelled, and may be again.

    Celery and the pool each cancel what a cold shutdown finds running; the second time a mark would not be taken back.
    """
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


class EngineHost:
    """One engine on its own event loop, in a thread of its own.

    `on_death` is called once, from the loop's thread, when the engine is dead. `notify` sends one of the aggregator's
    messages (task kind, address) and is called from a thread of the host's executor.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        *,
        worker_id: str,
        queue: str,
        max_inflight: int,
        request_timeout_s: float | None = None,
        lease_s: float = 30.0,
        on_death: Callable[[], None],
        notify: Callable[[str, Address], None],
        observer: Observer | None = None,
    ) -> None:
        self.engine = engine
        #: Where its requests come from.
        self.queue = queue
        self.dead = False
        #: Requests on the engine now.
        self.on_engine = 0
        self.observer: Observer = observer or Unobserved()
        self.observer.watch(self)
        self.loop = asyncio.new_event_loop()
        #: For blocking work of the loop's coroutines. Two threads: the work is short and mostly waits for Redis.
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="fleet-host")
        self._ledger = ledger
        self._begin: Coalescer[Claim, Begun] = Coalescer(ledger.begin, self.executor)
        self._record: Coalescer[Row, Recorded] = Coalescer(ledger.record, self.executor)
        self._worker_id = worker_id
        self._max_inflight = max_inflight
        self._request_timeout_s = request_timeout_s
        #: Two thirds of a lease: when a dead worker's request comes back, its heartbeat is gone.
        self._beat_ttl_s = lease_s * 2 / 3
        self._quarantine = Quarantine()
        #: A place for each request that may run at once: the last message of a take may bring more than there are.
        self._places = asyncio.Semaphore(max(1, max_inflight))
        #: By delivery and index: a delivery may carry several requests.
        self._in_hand: dict[tuple[str, int], _InHand] = {}
        self._pace = Pace()
        #: Runs that it had requests of since the last look, and those before that were not published in full.
        self._recent: set[tuple[str, int]] = set()
        self._ticked = time.monotonic()
        self._complained = -COMPLAIN_S
        self._on_death = on_death
        self._notify = notify
        self._state = "loading"
        self._stopping = threading.Event()
        self._started = False
        self._thread = threading.Thread(target=self._run_loop, name="fleet-loop", daemon=True)
        self._beater = threading.Thread(target=self._beat, name="fleet-beat", daemon=True)
        self._watchers: list[asyncio.Task[None]] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """Requests to keep in flight: the user's word, else the engine's rule."""
        return self._max_inflight or self.engine.default_inflight

    @property
    def capacity(self) -> int:
        """Requests to keep in flight, as far as it is known: 0 while the engine loads and nobody said."""
        return self.inflight if self._started else self._max_inflight

    @property
    def in_hand(self) -> int:
        """Requests in hand."""
        return len(self._in_hand)

    @property
    def state(self) -> str:
        """loading, ready, draining or dead."""
        return "dead" if self.dead else self._state

    def drain(self) -> None:
        """From now on no more requests come."""
        if self._state != "draining":
            self._state = "draining"
            self.observer.draining(dead=self.dead)

    def start(self) -> Future[None]:
        """Start the loop, the heartbeat and the engine; the future resolves when the engine is ready.

        The future raises `EngineStartError`. Loading takes minutes: poll it, do not wait in it.
        """
        self._thread.start()
        self._beater.start()
        return self.submit(self._start_engine())

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the engine, the heartbeat and the loop. Requests must be done or cancelled before."""
        self._stopping.set()
        if not self._thread.is_alive():
            self.executor.shutdown(wait=False)
            return
        try:
            self.submit(self._stop_engine()).result(timeout_s)
        except Exception as exc:  # noqa: BLE001 - we are leaving; the engine's processes are tied to our life
            logger.warning("the engine did not stop cleanly: %s", type(exc).__name__)
        self.executor.shutdown(wait=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        self._beater.join(5.0)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start_engine(self) -> None:
        try:
            await self.engine.start()
        except EngineStartError:
            raise
        except Exception as exc:
            logger.debug("engine start", exc_info=True)
            raise EngineStartError(f"the engine could not be started: {type(exc).__name__}: {exc}") from exc
        self._places = asyncio.Semaphore(self.inflight)
        self._state = "ready"
        self._started = True
        self._ticked = time.monotonic()
        self._watchers = [self.loop.create_task(watch) for watch in (self._watch(), self._look())]
        logger.info(
            "engine %s ready, serves %s, %d in flight",
            self.engine.name,
            ", ".join(self.engine.models),
            self.inflight,
        )

    async def _stop_engine(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self.engine.stop()

    async def _watch(self) -> None:
        """Once a second: show that the loop turns, and look whether the engine lives. Waits for nobody else."""
        while not self.dead:
            self._ticked = time.monotonic()
            try:
                await self.engine.check_health()
            except EngineDeadError:
                self._die()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _look(self) -> None:
        """Once a second: ask Redis whether runs in hand end, and whether an idle engine could have something to do.

        A task of its own: a broker that hangs must not make the loop look as if it stood still.
        """
        looked = time.monotonic()
        while not self.dead:
            await asyncio.sleep(WATCH_INTERVAL_S)
            await self._stop_ending_runs()
            seconds, looked = time.monotonic() - looked, time.monotonic()
            await self._tell_idle(seconds)

    async def _tell_idle(self, seconds: float) -> None:
        """Tell how much of the last seconds' capacity is free, and whether there is something for it to do.

        That is what waits in the queue, or is not published yet: a feed that comes late must not look like no work.
        """
        runs = self._recent | {(each.at.batch_id, each.at.run) for each in self._in_hand.values()}
        free = self.inflight - self.on_engine
        if free <= 0 or self._state != "ready":
            self._recent = runs
            return
        self._recent = set()
        try:
            waiting, unpublished = await self.loop.run_in_executor(
                self.executor, self._ledger.backlog, self.queue, runs
            )
        except redis.RedisError:
            self._recent |= runs
            return  # an outage is neither a backlog nor none
        self._recent |= unpublished
        self.observer.idle(seconds * free / self.inflight, backlog=bool(waiting or unpublished))

    async def _stop_ending_runs(self) -> None:
        runs = list({(each.at.batch_id, each.at.run) for each in self._in_hand.values()})
        if not runs:
            return
        try:
            endings = await self.loop.run_in_executor(self.executor, self._ledger.endings, runs)
        except redis.RedisError:
            return  # asked again in a second
        ending = {run for run, how in zip(runs, endings, strict=True) if how}
        for each in self._in_hand.values():
            if (each.at.batch_id, each.at.run) in ending and not each.ending:
                each.ending = True
                each.task.cancel()

    @property
    def alive(self) -> bool:
        """False when the loop stands still: then the heartbeat and the leases lapse, and others take the requests.

        While the engine loads the loop may stand still for minutes, and nothing is in hand.
        """
        return not self._started or time.monotonic() - self._ticked < STALE_S

    def _die(self) -> None:
        if self.dead:
            return
        self.dead = True
        logger.error("the engine is dead; this worker hands its requests back and exits")
        self._on_death()

    def _beat(self) -> None:
        """Renew the heartbeat from a thread of its own: loading a model blocks the loop for many seconds."""
        while True:
            beat = WorkerBeat(
                worker_id=self._worker_id,
                state=self._state,
                engine=self.engine.name,
                models=tuple(self.engine.models),
                queue=self.queue,
                inflight=self.capacity,
                request_s=self._pace.request_s,
            )
            try:
                if self.alive:
                    self._ledger.beat(beat, self._beat_ttl_s)
            except redis.RedisError as exc:
                logger.warning("heartbeat not written: %s", type(exc).__name__)
            if self._wait_for_beat(beat.state):
                break
        try:
            self._ledger.forget_worker(self._worker_id)
        except redis.RedisError as exc:
            logger.warning("heartbeat not removed: %s", type(exc).__name__)

    def _wait_for_beat(self, state: str) -> bool:
        """Wait one interval, less when the state is no longer the one that was written; True when stopping."""
        waited_s = 0.0
        while waited_s < self._beat_ttl_s / 4 and self._state == state:
            if self._stopping.wait(0.25):
                return True
            waited_s += 0.25
        return False

    # -- one request --------------------------------------------------------------------------------------------------

    async def run_request(
        self, at: Address, count: int, line: str | Callable[[], Awaitable[str]], delivery: Delivery
    ) -> None:
        """Run one request of a delivery until its row is recorded, whoever recorded it.

        `line` is the request's line, or what fetches it once it is known that it is needed. `count` is the number of
        requests of the shard. Never raises for the request's own faults; is held until it is
        cancelled when the engine is dead.
        """
        traced = tracing.request(delivery.traceparent, at.index, batch_id=at.batch_id, run=at.run, shard=at.shard)
        with traced as span:
            await self._run_delivery(at, count, line, delivery, span)

    async def _run_delivery(
        self,
        at: Address,
        count: int,
        line: str | Callable[[], Awaitable[str]],
        delivery: Delivery,
        span: tracing.Span,
    ) -> None:
        mark, key = f"{self._worker_id}/{delivery.delivery_id}", (delivery.delivery_id, at.index)
        task = asyncio.current_task()
        assert task is not None
        self._in_hand[key] = _InHand(at, task)
        self._recent.add((at.batch_id, at.run))
        try:
            await self._run_request(at, mark, count, line, delivery, span)
        except Parked:
            span.set(outcome="parked")
            span.end()  # before it is left: this is no failure
            raise
        except asyncio.CancelledError:
            if self._in_hand[key].ending:
                # The run is being cancelled or has expired: its receipt goes out, the aggregator writes the row.
                span.set(outcome="ended")
                task.uncancel()
            else:
                span.set(outcome="handed_back")
                self.observer.handed_back()
                if not self.dead:
                    # Handed back, which is no strike. A dead engine's marks stay: what it ran may have killed it.
                    await _whatever_comes(self._in_thread(self._ledger.release, at, mark))
                raise
        finally:
            del self._in_hand[key]

    async def _run_request(
        self,
        at: Address,
        mark: str,
        count: int,
        line: str | Callable[[], Awaitable[str]],
        delivery: Delivery,
        span: tracing.Span,
    ) -> None:
        answer = await self._answer(at, mark, line, span)
        if answer is None:
            span.set(outcome="done_before")
            if not delivery.chorded:
                # Whoever recorded the last row may have died before it said so, and no chord says it for us.
                await self._send("seal", at)
            return
        text, reply = answer
        row = Row(
            at=at,
            row=reply.row,
            failed=reply.failure is not None,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            shard_count=count,
            model=self._model(text),
            queue=self.queue,
        )
        recorded = await self._until_known(at, lambda: self._record(row))
        first = recorded.verdict is Verdict.OURS
        self.observer.recorded(text, reply, first=first)
        if span.recording:
            self._describe(span, text, reply, first=first)
        if recorded.full and not delivery.chorded:
            await self._send("seal", at)
        if recorded.feed:
            await self._send("feed", at)

    async def _answer(
        self, at: Address, mark: str, line: str | Callable[[], Awaitable[str]], span: tracing.Span
    ) -> tuple[str, Reply] | None:
        """The request's line and the engine's reply, after a few tries where trying again may help.

        None when the row is there already.
        """
        wait_s, strikes = RETRY_WAIT_S, 0
        for tries_left in reversed(range(MAX_TRIES)):
            # Each try begins anew: it counts the engine calls across the fleet, and sees a row that somebody recorded.
            while True:
                async with self._places, self._quarantine.admit(strikes):
                    claim = Claim(at, mark, strikes)
                    begun = await self._until_known(at, partial(self._begin, claim))
                    if not isinstance(line, str) and begun.verdict in (Verdict.OURS, Verdict.POISON):
                        line = await line()
                    if begun.verdict is Verdict.OURS:
                        assert isinstance(line, str)
                        self.observer.begun(begun.strikes)
                        span.event("begun")
                        span.set(calls=begun.calls + 1, strikes=begun.strikes)
                        reply = await self._call_engine(Request(line, begun.calls))
                        break
                if begun.verdict is Verdict.DONE:
                    return None
                if begun.verdict is Verdict.POISON:
                    assert isinstance(line, str)
                    return line, self._failed(line, FailureKind.WORKERS_LOST, _poison_message(begun.strikes))
                if begun.verdict is Verdict.SUSPECT:
                    strikes = begun.strikes  # it waits for its turn, without a mark: it must not be struck meanwhile
                else:
                    raise Parked
            if reply.failure is None or not reply.failure.retryable or not tries_left:
                break
            await asyncio.sleep(wait_s)
            wait_s *= 2
        assert isinstance(line, str)
        return line, reply

    async def _call_engine(self, request: Request) -> Reply:
        try:
            if not self.dead and not self.engine.errored:
                async with asyncio.timeout(self._request_timeout_s) as limit:
                    return await self._run_on_engine(request)
        except EngineDeadError:
            pass
        except EngineAbortedError:
            # Mostly its engine is being stopped from outside, and its death comes within seconds: then this delivery
            # is held below. An engine that lives on has aborted this one request, which may be tried again.
            await asyncio.sleep(ABORT_WAIT_S)
            if not self.dead and not self.engine.errored:
                return self._failed(request.line, FailureKind.ENGINE_ABORTED, "the engine cut the answer short")
        except BaseException as exc:
            # A request must not take the loop, and its neighbours, along. A CancelledError that nobody asked for leaked
            # out of the engine and is an exception like any other: taken for ours, the delivery would be neither
            # answered nor handed back while this worker lives.
            if isinstance(exc, asyncio.CancelledError) and _is_cancelled():
                raise
            if not self.dead and not self.engine.errored:
                if isinstance(exc, TimeoutError) and limit.expired():
                    reason = f"not answered within {self._request_timeout_s:g} s (FLEET_REQUEST_TIMEOUT_S)"
                    return self._failed(request.line, FailureKind.TIMEOUT, reason)
                logger.error("the engine raised %s on a request", type(exc).__name__)
                # Only the type: an engine's message may quote the prompt.
                reason = f"the engine raised {type(exc).__name__} on this request"
                return self._failed(request.line, FailureKind.INTERNAL_ERROR, reason)
        self._die()
        return await self._hold()

    async def _run_on_engine(self, request: Request) -> Reply:
        started, reply = time.monotonic(), None
        self.on_engine += 1
        beside = self.on_engine
        try:
            with tracing.child("engine"):
                reply = await self.engine.run(request)
            return reply
        finally:
            seconds = time.monotonic() - started
            if reply is not None and reply.failure is None and may_be_short(request.line):
                # Of both, for at a batch's end the last ones finish alone that ran beside many.
                self._pace.note(seconds, beside=max(beside, self.on_engine))
            self.on_engine -= 1
            self.observer.called(request.line, seconds, reply)

    def _model(self, line: str) -> str:
        """The model whose tokens a row counts. Only an engine with several names has to look into the line."""
        if len(self.engine.models) == 1:
            return self.engine.models[0]
        model = model_of(line)
        return model if model is not None else self.engine.models[0]

    def _describe(self, span: tracing.Span, line: str, reply: Reply, *, first: bool) -> None:
        """Say of a request what its metrics say; what the engine does not serve is only a user's text, and not said."""
        try:
            url = parse_line(line.encode()).url
        except LineError:
            url = ""
        model = self._model(line)
        served = model in self.engine.models and reply.failure is not FailureKind.MODEL_NOT_FOUND
        outcome = "completed" if reply.failure is None else reply.failure.code
        span.set(
            outcome=outcome if first else "duplicate",
            url=url if url in self.engine.endpoints else "other",
            model=model if served else "other",
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
        )

    def _failed(self, line: str, kind: FailureKind, reason: str) -> Reply:
        return Reply(failed_row(custom_id_of(line), Failure(kind, reason), prefix=self.engine.name), kind)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Run a blocking call that may fail: a mark that stays is a strike at most, and that harms nobody."""
        try:
            await self.loop.run_in_executor(self.executor, call, *arguments)
        except redis.RedisError as exc:
            logger.warning("the ledger does not answer (%s)", type(exc).__name__)

    async def _until_known(self, at: Address, ask: Callable[[], Coroutine[Any, Any, Begun | Recorded]]) -> Any:
        """Ask the ledger until it answers and knows the run. Ends by cancellation only: nothing is lost meanwhile."""
        wait_s = 0.1
        while True:
            try:
                answer = await ask()
            except redis.RedisError as exc:
                self._complain(exc)
            else:
                if answer.verdict is not Verdict.UNKNOWN:
                    return answer
                logger.warning("Redis does not know run %s/%d; asking for a restore", at.batch_id, at.run)
                await self._send("feed", at)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_REDIS_WAIT_S)

    def _complain(self, exc: redis.RedisError) -> None:
        """Say that the ledger does not answer. Hundreds of requests find out at once, and try as long as it lasts."""
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_S:
            self._complained = now
            logger.warning("the ledger does not answer (%s); trying again", type(exc).__name__)

    async def _send(self, kind: str, at: Address) -> None:
        """Send a message to the aggregator. One that cannot be sent is logged: it must not cost the receipt."""
        try:
            await self.loop.run_in_executor(self.executor, self._notify, kind, at)
        except Exception as exc:  # noqa: BLE001 - kombu raises its transports' errors; none may cost the receipt
            logger.warning("%s of %s not sent: %s", kind, at.batch_id, type(exc).__name__)

    @staticmethod
    async def _hold() -> NoReturn:
        """Keep the delivery, unacknowledged, until the pool cancels it: then the broker hands it on."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("a held delivery ends by cancellation")
