"""The fleet's Celery tasks: thin shells over the engine host and the aggregator.

Owns: the tasks' names, arguments and what each does with an error.
Must not know: how a request is run or a shard is sealed.
On failure: `run_request` never raises for a request's own fault, since one header task that raises stops its chord's
body for ever. The aggregator's tasks are tried again while the store or Redis is away; a hole is left alone, for
whoever fills it sends `seal_shard` again.

Arguments are ids, numbers and the request's line; a task's name, `argsrepr` and result never hold a prompt.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from celery.exceptions import Ignore
from kombu.exceptions import OperationalError

from common import broker
from common.dispatch import send
from common.errors import HoleError, NoSuchBatchError, StoreUnavailableError, UsageError
from common.layout import STORE_ID, checked_batch_id
from common.ledger import PURGED, Address
from workers import logs
from workers.engine.host import current_delivery
from workers.lines import Place, read_line
from workers.together import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.app import WorkerApp

logger = logging.getLogger("fleet.tasks")

#: Outages: the aggregator's work waits for these to pass. The wait grows to the last number of seconds.
#: So is a store that does not have the batch: it is another one than the producer's, or not mounted here.
OUTAGES = (StoreUnavailableError, NoSuchBatchError, UsageError, OperationalError, redis.RedisError)
MAX_WAIT_S = 30
#: Seconds of tries after which a batch that a store does not have counts as purged, so that its messages may go.
BURY_AFTER_S = 60
#: Tries, most of them MAX_WAIT_S apart, after which a batch that the store does not have was removed from it.
GIVE_UP_TRIES = 120


def register(app: WorkerApp) -> None:
    """Register the tasks with an app, and with no other one of the process (`shared`)."""

    @app.task(name=broker.RUN_REQUEST, shared=False, Request="workers.pool:QuietRequest")  # type: ignore[untyped-decorator]  # Celery has no types
    async def run_request(
        *,
        batch_id: str,
        run: int,
        shard: int,
        index: int,
        count: int,
        line: str | Sequence[int],
        more: Sequence[str] = (),
    ) -> int:
        """Run requests on the engine and record their rows: mostly one. `count` is the number of those of the shard.

        `line` is the first one's line, or of a large one where it lies (`Place`); `more` are the lines of those that
        follow it in a pack.
        """
        delivery = current_delivery.get()

        async def run_one(index: int, line: str | Sequence[int]) -> None:
            at = Address(batch_id, run, shard, index)
            logs.bind(batch_id=batch_id, run=run, shard=shard, index=index)  # for this coroutine alone
            text = line if isinstance(line, str) else partial(app.fleet.lines.fetch, at, Place(*line))
            await delivery.host.run_request(at, count, text, delivery)

        if more:
            await run_together(run_one(number, each) for number, each in enumerate((line, *more), start=index))
        else:
            await run_one(index, line)
        return broker.RECEIPT

    @app.task(name=broker.MARKER, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    async def marker(*, marker: str) -> None:
        """Say that the queue has passed everything that was sent to it before this message."""
        host = current_delivery.get().host
        await host.loop.run_in_executor(host.executor, app.fleet.ledger.pass_marker, marker)

    for name, work in _AGGREGATOR_TASKS.items():
        _register_aggregator_task(app, name, work)


def _register_aggregator_task(app: WorkerApp, name: str, work: Callable[..., None]) -> None:
    @app.task(name=name, bind=True, max_retries=None, ignore_result=True, shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
    def aggregate(task: Any, *_receipts: object, **ids: Any) -> None:
        if not _are_ids(ids):
            logger.error("dropped a message for %s: what it names is no batch", name)
            return
        try:
            with logs.bound(**ids):
                work(app, **ids)
        except HoleError as exc:
            logger.warning("not sealed: %s", exc)
        except OUTAGES as exc:
            if isinstance(exc, NoSuchBatchError) and _is_gone(app, task, **ids):
                raise Ignore from None
            if isinstance(exc, StoreUnavailableError):
                app.fleet.watchdog.note_trouble(str(exc))
            raise _later(task, exc) from None
        else:
            app.fleet.watchdog.note_trouble("")


def _are_ids(ids: dict[str, Any]) -> bool:
    """Whether a message names a batch, and numbers in it: they become names in the store, and Redis is open to more."""
    numbers = [ids[name] for name in ("run", "shard", "index") if name in ids]
    try:
        checked_batch_id(str(ids.get("batch_id")))
    except UsageError:
        return False
    return all(type(number) is int and number >= 0 for number in numbers)


def _seal_shard(app: WorkerApp, *, batch_id: str, run: int, shard: int) -> None:
    """Seal a shard; sent by its chord, by whoever recorded the shard's last row, or by the watchdog."""
    if app.fleet.aggregator.seal_shard(batch_id, run, shard):
        send(app, broker.ASSEMBLE_BATCH, batch_id=batch_id, run=run)
    else:
        app.fleet.aggregator.feed(batch_id, run)


def _assemble_batch(app: WorkerApp, *, batch_id: str, run: int) -> None:
    """Assemble a batch whose shards are all sealed."""
    app.fleet.aggregator.assemble_batch(batch_id, run)


def _feed(app: WorkerApp, *, batch_id: str, run: int) -> None:
    """Publish the next shards of a batch, as its window allows."""
    app.fleet.aggregator.feed(batch_id, run)


def _end_early(app: WorkerApp, *, batch_id: str, run: int) -> None:
    """End a cancelled run."""
    app.fleet.aggregator.end_early(batch_id, run)


def _fail_request(app: WorkerApp, *, batch_id: str, run: int, shard: int, index: int) -> None:
    """Record that a request was revoked."""
    app.fleet.aggregator.fail_request(Address(batch_id, run, shard, index))


def _lend_line(app: WorkerApp, *, batch_id: str, run: int, shard: int, index: int, place: list[int]) -> None:
    """Lend a worker a line that it cannot read itself."""
    line = read_line(app.fleet.store, batch_id, Place(*place))
    app.fleet.ledger.lend_line(Address(batch_id, run, shard, index), line)


_AGGREGATOR_TASKS: dict[str, Callable[..., None]] = {
    broker.SEAL_SHARD: _seal_shard,
    broker.ASSEMBLE_BATCH: _assemble_batch,
    broker.FEED: _feed,
    broker.END_EARLY: _end_early,
    broker.LEND_LINE: _lend_line,
    broker.FAIL_REQUEST: _fail_request,
}


def _is_gone(app: WorkerApp, task: Any, *, batch_id: str, run: int, **_: object) -> bool:
    """Whether the batch was purged, and its messages are acknowledged from now on; asked when the store has it not.

    Unanswered, they would each hold a place on a worker for ever. But a store without its own mark is no witness: it
    may be a mount point with nothing mounted. Should one be believed all the same, `restore` takes it back.
    """
    fleet = app.fleet
    try:
        progress = fleet.ledger.progress(batch_id, run)
        if progress is not None:
            return str(progress.closed) == PURGED
        if _waited_s(task.request.retries) < BURY_AFTER_S or not fleet.store.exists(STORE_ID):
            return False
        fleet.ledger.bury(batch_id, run)
    except (StoreUnavailableError, redis.RedisError):
        return False
    logger.warning("%s is not in %s: what is left of its messages is dropped", batch_id, fleet.store.uri)
    return True


def _waited_s(retries: int) -> int:
    """Seconds that so many retries took."""
    return sum(_wait_s(retry) for retry in range(retries))


def _wait_s(retry: int) -> int:
    return int(min(2**retry, MAX_WAIT_S))


def _later(task: Any, exc: Exception) -> Exception:
    """What makes Celery run the task again after a while; a batch that nobody has for an hour is given up."""
    if isinstance(exc, NoSuchBatchError) and task.request.retries > GIVE_UP_TRIES:
        logger.error("%s: %s; given up", task.name, exc)
        ignored: Exception = Ignore()
        return ignored
    wait_s = _wait_s(task.request.retries)
    logger.warning("%s: %s; again in %d s", task.name, exc, wait_s)
    retry: Exception = task.retry(countdown=wait_s, exc=exc, throw=False, argsrepr="-", kwargsrepr="-")
    return retry
