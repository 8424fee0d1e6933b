"""The Celery app of a worker process: `worker serve`, `worker aggregate` and `celery -A workers …` all use it.

Owns: `app`, made from the environment, and what hangs on it: settings, the engine host's factory, the aggregator.
On failure: bad settings raise `UsageError` at import, with one sentence.
"""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.worker import state

from common import broker, tracing
from common.dispatch import send
from common.errors import UsageError
from common.garbage import settle
from common.ledger import Address, Ledger, new_worker_id
from common.messages import read_indexes
from common.routes import Routes
from common.settings import AGGREGATE_QUEUE, WorkerSettings, load
from common.store import open_store
from common.transport import Transport
from workers import tasks
from workers.aggregate import Aggregator
from workers.engine.host import EngineHost
from workers.engine.media import ALLOWED_DOMAINS, MediaRules, domains_of
from workers.lines import Lines, Place
from workers.logs import configure_logging
from workers.pool import EngineCapacity, refuse_wrong_pool
from workers.stopping import LoggingWorker, without_warning_of_root
from workers.watchdog import Watchdog

if TYPE_CHECKING:
    from celery import Celery

    from common.store import ObjectStore
    from workers.engine import Engine
    from workers.metrics import WorkerMetrics

    #: Celery has no types; the attributes below hang on its app.
    WorkerApp = Any

logger = logging.getLogger("fleet.app")

EX_SOFTWARE = 70

_MESSAGES = {"seal": broker.SEAL_SHARD, "feed": broker.FEED}


def make_engine(settings: WorkerSettings) -> Engine:
    """The engine that the settings name, not started."""
    if not settings.model:
        raise UsageError("no model: say `worker serve MODEL`, or set FLEET_MODEL")
    arguments = shlex.split(settings.engine_args)
    media = media_rules(settings)
    if settings.engine == "echo":
        from workers.engine.echo import EchoEngine  # noqa: PLC0415 - one of two

        return EchoEngine.from_args(settings.model, arguments, media)
    from workers.engine.vllm import VllmEngine  # noqa: PLC0415 - one of two

    return VllmEngine(settings.model, arguments, media)


def media_rules(settings: WorkerSettings) -> MediaRules:
    """What may be fetched for a request, by the settings. Raises `UsageError` for a name that is no host's."""
    rules = MediaRules(max_bytes=settings.media_max_bytes, timeout_s=settings.media_timeout_s)
    if not settings.allowed_media_domains:
        return rules
    try:
        return replace(rules, domains=domains_of(settings.allowed_media_domains.split(",")))
    except ValueError as exc:
        raise UsageError(f"{ALLOWED_DOMAINS}: {exc}") from None


class FleetApp:
    """What hangs on the worker's Celery app, made when first needed: an aggregator has no engine, a worker no store."""

    def __init__(self, app: Celery, settings: WorkerSettings) -> None:
        self._app = app
        self.settings = settings

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger, through a client of its own."""
        client = broker.redis_client(self.settings.broker_url)
        return Ledger(client, max_deliveries=self.settings.max_deliveries)

    @cached_property
    def store(self) -> ObjectStore:
        """The store that the settings name."""
        settings = self.settings.with_store()
        return open_store(settings.store, s3_endpoint=settings.s3_endpoint)

    @cached_property
    def lines(self) -> Lines:
        """Where a worker gets large lines from: its store, if it has one, else the aggregator."""
        return Lines((lambda: self.store) if self.settings.store else None, self.ledger, self._ask_for_line)

    def _ask_for_line(self, at: Address, place: Place) -> None:
        send(
            self._app,
            broker.LEND_LINE,
            batch_id=at.batch_id,
            run=at.run,
            shard=at.shard,
            index=at.index,
            place=list(place),
        )

    @cached_property
    def routes(self) -> Routes:
        """Where requests go."""
        return Routes.parse(self.settings.routes)

    @cached_property
    def aggregator(self) -> Aggregator:
        """The aggregator over the settings' store."""
        settings = self.settings
        return Aggregator(
            self._app,
            self.store,
            self.ledger,
            window=settings.window,
            routes=self.routes,
            pack_size=settings.pack_size,
        )

    @cached_property
    def watchdog(self) -> Watchdog:
        """The watchdog beside the aggregator."""
        return Watchdog(
            self._app,
            self.store,
            self.ledger,
            self.aggregator,
            lease_s=self.settings.lease_s,
            routes=self.routes,
            only_batch=self.settings.only_batch,
        )

    @cached_property
    def metrics(self) -> WorkerMetrics | None:
        """What a serving worker measures, if anybody wants to see it."""
        if not self.settings.metrics_port:
            return None
        from workers.metrics import WorkerMetrics  # noqa: PLC0415 - takes a while to import

        return WorkerMetrics()

    def serve_pages(self, *, aggregates: bool) -> None:
        """Show metrics and health, from before the engine loads until the process ends."""
        if not self.settings.metrics_port:
            return
        from workers.metrics import serve_pages  # noqa: PLC0415 - takes a while to import

        if aggregates:
            watchdog = self.watchdog
            alive, ready = (lambda: watchdog.alive), (lambda: watchdog.started)
        else:
            metrics = self.metrics
            assert metrics is not None
            alive, ready = (lambda: metrics.alive), (lambda: metrics.ready)
        serve_pages(self.settings.metrics_host, self.settings.metrics_port, alive=alive, ready=ready)

    def make_host(self) -> EngineHost:
        """An engine host, not started. A worker whose loop stands still loses its deliveries."""
        host = EngineHost(
            make_engine(self.settings),
            self.ledger,
            worker_id=new_worker_id(),
            queue=self.settings.queue,
            max_inflight=self.settings.max_inflight,
            request_timeout_s=self.settings.request_timeout_s or None,
            lease_s=self.settings.lease_s,
            on_death=stop_with_engine,
            notify=self._notify,
            observer=self.metrics,
        )
        Transport.leases.alive = lambda: host.alive
        return host

    def _notify(self, kind: str, at: Address) -> None:
        extra = {"shard": at.shard} if kind == "seal" else {}
        send(self._app, _MESSAGES[kind], batch_id=at.batch_id, run=at.run, **extra)


def stop_with_engine() -> None:
    """The engine is dead: stop the worker; Celery's loop looks at this flag and exits with its value."""
    if state.should_stop is None:
        state.should_stop = EX_SOFTWARE


def make_worker_app(settings: WorkerSettings) -> WorkerApp:
    """The Celery app with the fleet's tasks, pool and steps."""
    app = broker.make_app(settings.broker_url, request_queue=settings.queue, lease_s=settings.lease_s)
    leases = Transport.leases
    # Celery drops requests that wait for their time on a reconnect, but its timer still refers to them.
    leases.dropped = lambda: [request.message for request in state.scheduled_requests]
    # Earlier than at the interpreter's exit, which would wait for other threads.
    signals.worker_shutdown.connect(lambda **_: leases.hand_back(), weak=False)
    fleet = FleetApp(app, settings)
    app.fleet = fleet
    app.Worker = app.subclass_with_self(LoggingWorker)
    app.steps["worker"].add(EngineCapacity)
    tasks.register(app)
    return app


def check_worker(sender: Any, **_: Any) -> None:
    """Celery's signal before a worker's pool is made."""
    refuse_wrong_pool(sender)
    try:
        sender.app.fleet.serve_pages(aggregates=AGGREGATE_QUEUE in sender.app.amqp.queues.consume_from)
    except UsageError as exc:
        print(f"error: {exc}", file=sys.stderr, flush=True)
        raise SystemExit(exc.exit_code) from None  # any other exception would only be logged by Celery


def start_watchdog(sender: Any, **_: Any) -> None:
    """Celery's signal when a worker takes messages: an aggregator looks after open batches from now on."""
    if AGGREGATE_QUEUE in sender.app.amqp.queues.consume_from:
        settle()
        sender.app.fleet.watchdog.start()
        # Last: a broker or a store that fails just now would end this handler, and Celery only logs that.
        fleet = sender.app.fleet
        for warning in broker.set_up_warnings(broker.redis_client(fleet.settings.broker_url)):
            logger.warning("%s", warning)
        for warning in fleet.store.set_up_warnings():
            logger.warning("%s", warning)


def start_tracing(sender: Any, **_: Any) -> None:
    """Celery's signal when a worker takes messages. Not before: an engine's processes are forked while it loads."""
    tracing.start(share=sender.app.fleet.settings.trace_requests)


def stop_tracing(**_: Any) -> None:
    """Celery's signal when a worker has stopped."""
    tracing.stop()


def stop_watchdog(sender: Any, **_: Any) -> None:
    """Celery's signal when a worker stops."""
    if AGGREGATE_QUEUE in sender.app.amqp.queues.consume_from:
        sender.app.fleet.watchdog.stop()


def on_revoked(request: Any, **_: Any) -> None:
    """Celery's signal when somebody revoked a message, in Flower perhaps: its rows fail, the batch goes on.

    Celery acknowledges the message and fails the chord's part; the shard is sealed by its last row, or the watchdog.
    """
    if request.task != broker.RUN_REQUEST:
        return
    batch_id, run, shard, indexes = str(request.kwargsrepr).split("/")
    for index in read_indexes(indexes):
        send(app, broker.FAIL_REQUEST, batch_id=batch_id, run=int(run), shard=int(shard), index=index)


signals.worker_ready.connect(start_watchdog, weak=False)
signals.worker_shutdown.connect(stop_watchdog, weak=False)
signals.worker_ready.connect(start_tracing, weak=False)
signals.task_revoked.connect(on_revoked, weak=False)
signals.setup_logging.connect(configure_logging, weak=False)
signals.worker_init.connect(check_worker, weak=False)

without_warning_of_root()
app = make_worker_app(load(WorkerSettings))
# After what hands deliveries back: a collector that hangs must not hold these up.
signals.worker_shutdown.connect(stop_tracing, weak=False)
