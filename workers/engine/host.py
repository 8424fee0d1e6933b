"""The engine host: one engine, the event loop that owns it, and the life of a request on it.

Owns: the loop's thread, starting and stopping the engine, its health, the worker's heartbeat, and `run_request`.
Must not know: Celery, kombu, the store.
On failure: a request's own fault becomes its row. Infrastructure never does: a dead engine calls `on_death` once and
every delivery is then held, unacknowledged, until the pool stops and the broker hands it to another worker.

One delivery on the host:

    begin ──DONE──▶ receipt                                (recorded, sealed or closed: no engine call)
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
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import redis

from common.batch import custom_id_of, failed_row
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import Failure, FailureKind
from common.ledger import Address, Begun, Recorded, Row, Verdict, WorkerBeat
from workers.engine import Reply, Request
from workers.engine.coalesce import Coalescer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from common.ledger import Ledger
    from workers.engine import Engine

logger = logging.getLogger("fleet.host")

#: Seconds between two looks at the engine's health. A dead engine may be idle, so nobody else would notice.
HEALTH_INTERVAL_S = 1.0
#: Seconds between heartbeats, and for how long one counts.
BEAT_INTERVAL_S = 5.0
BEAT_TTL_S = 20.0
#: Engine calls of one delivery while its failure is retryable, and the wait before the second one (then doubled).
MAX_TRIES = 3
RETRY_WAIT_S = 0.5
#: Seconds after an aborted answer in which an engine that was told to stop is seen to die.
ABORT_WAIT_S = 2.0
#: Longest wait between tries to reach Redis.
MAX_REDIS_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """One hand-over of a request's message to this worker. `chorded`: its chord announces the shard's end."""

    host: EngineHost
    delivery_id: str
    chorded: bool


#: The delivery that the current coroutine runs; set by the pool.
current_delivery: ContextVar[Delivery] = ContextVar("fleet_delivery")


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
        on_death: Callable[[], None],
        notify: Callable[[str, Address], None],
    ) -> None:
        self.engine = engine
        self.dead = False
        self.loop = asyncio.new_event_loop()
        #: For blocking work of the loop's coroutines. Two threads: the work is short and mostly waits for Redis.
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="fleet-host")
        self._ledger = ledger
        self._begin: Coalescer[tuple[Address, str], Begun] = Coalescer(ledger.begin, self.executor)
        self._record: Coalescer[Row, Recorded] = Coalescer(ledger.record, self.executor)
        self._worker_id = worker_id
        self._queue = queue
        self._max_inflight = max_inflight
        self._on_death = on_death
        self._notify = notify
        self._state = "loading"
        self._stopping = threading.Event()
        self._started = False
        self._thread = threading.Thread(target=self._run_loop, name="fleet-loop", daemon=True)
        self._beater = threading.Thread(target=self._beat, name="fleet-beat", daemon=True)
        self._watch: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """Requests to keep in flight: the user's word, else the engine's rule."""
        return self._max_inflight or self.engine.default_inflight

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
        self._state = "ready"
        self._started = True
        self._watch = self.loop.create_task(self._watch_health())
        logger.info(
            "engine %s ready, serves %s, %d in flight",
            self.engine.name,
            ", ".join(self.engine.models),
            self.inflight,
        )

    async def _stop_engine(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self.engine.stop()

    async def _watch_health(self) -> None:
        while not self.dead:
            try:
                await self.engine.check_health()
            except EngineDeadError:
                self._die()
            await asyncio.sleep(HEALTH_INTERVAL_S)

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
                queue=self._queue,
                inflight=self.inflight if self._started else self._max_inflight,
            )
            try:
                self._ledger.beat(beat, BEAT_TTL_S)
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
        while waited_s < BEAT_INTERVAL_S and self._state == state:
            if self._stopping.wait(0.25):
                return True
            waited_s += 0.25
        return False

    # -- one request --------------------------------------------------------------------------------------------------

    async def run_request(self, at: Address, count: int, line: str, delivery: Delivery) -> None:
        """Run one delivery to its receipt. Returns when the row is recorded, whoever recorded it.

        `count` is the number of requests of the shard. Never raises for the request's own faults; is held until it is
        cancelled when the engine is dead or cut the answer short.
        """
        mark = f"{self._worker_id}/{delivery.delivery_id}"
        reply = await self._answer(at, mark, line)
        if reply is None:
            if not delivery.chorded:
                # Whoever recorded the last row may have died before it said so, and no chord says it for us.
                await self._send("seal", at)
            return
        row = Row(
            at=at,
            row=reply.row,
            failed=reply.failure is not None,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            shard_count=count,
        )
        recorded = await self._until_known(at, lambda: self._record(row))
        if recorded.full and not delivery.chorded:
            await self._send("seal", at)
        if recorded.feed:
            await self._send("feed", at)

    async def _answer(self, at: Address, mark: str, line: str) -> Reply | None:
        """The engine's reply, after a few tries where trying again may help; None when the row is there already."""
        wait_s = RETRY_WAIT_S
        for tries_left in reversed(range(MAX_TRIES)):
            # Each try begins anew: it counts the engine calls across the fleet, and sees a row that somebody recorded.
            begun = await self._until_known(at, lambda: self._begin((at, mark)))
            if begun.verdict is Verdict.DONE:
                return None
            reply = await self._call_engine(Request(line, begun.calls))
            if reply.failure is None or not reply.failure.retryable or not tries_left:
                break
            await asyncio.sleep(wait_s)
            wait_s *= 2
        return reply

    async def _call_engine(self, request: Request) -> Reply:
        try:
            if not self.dead and not self.engine.errored:
                return await self.engine.run(request)
        except asyncio.CancelledError:
            raise
        except EngineDeadError:
            pass
        except EngineAbortedError:
            # Mostly its engine is being stopped from outside, and its death comes within seconds: then this delivery
            # is held below. An engine that lives on has aborted this one request, which may be tried again.
            await asyncio.sleep(ABORT_WAIT_S)
            if not self.dead and not self.engine.errored:
                return self._failed(request, FailureKind.ENGINE_ABORTED, "the engine cut the answer short")
        except BaseException as exc:  # noqa: BLE001 - a request must not take the loop, and its neighbours, along
            if not self.engine.errored:
                logger.error("the engine raised %s on a request", type(exc).__name__)
                # Only the type: an engine's message may quote the prompt.
                reason = f"the engine raised {type(exc).__name__} on this request"
                return self._failed(request, FailureKind.INTERNAL_ERROR, reason)
        self._die()
        return await self._hold()

    def _failed(self, request: Request, kind: FailureKind, reason: str) -> Reply:
        row = failed_row(custom_id_of(request.line), Failure(kind, reason), prefix=self.engine.name)
        return Reply(row, kind)

    async def _until_known(self, at: Address, ask: Callable[[], Coroutine[Any, Any, Begun | Recorded]]) -> Any:
        """Ask the ledger until it answers and knows the run. Ends by cancellation only: nothing is lost meanwhile."""
        wait_s = 0.1
        while True:
            try:
                answer = await ask()
            except redis.RedisError as exc:
                logger.warning("the ledger does not answer (%s); trying again", type(exc).__name__)
            else:
                if answer.verdict is not Verdict.UNKNOWN:
                    return answer
                logger.warning("Redis does not know run %s/%d; asking for a restore", at.batch_id, at.run)
                await self._send("feed", at)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_REDIS_WAIT_S)

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
