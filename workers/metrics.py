"""What a worker measures of itself, as Prometheus series beside vLLM's own.

Owns: the names, labels and buckets of a worker's series (`docs/metrics.md` explains them), and the worker's pages.
Must not know: how a request is run; it is told (`workers.engine.observer`).
On failure: nothing here raises. Labels come from closed sets; a name that no engine serves is `other`.

One request costs a few increments of counters whose label values are known already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic_core import from_json

from common.failures import FailureKind
from workers.pages import Pages, health_page, metrics_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from workers.engine import Reply
    from workers.engine.host import EngineHost

#: The label of what asked for a model that is not served here.
OTHER = "other"

#: Seconds of an engine call: from a cached embedding to an hour of reasoning.
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)

#: Seconds in the queue: from an idle fleet to the end of a long batch's window.
WAIT_BUCKETS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)

STATES = ("loading", "ready", "draining", "dead")


class WorkerMetrics(Collector):
    """An `Observer` that counts. `registry` is the process' default one, which vLLM writes to as well."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._host: EngineHost | None = None
        #: The waits of the worker's own queue; known with the host.
        self._wait: Histogram | None = None
        self._requests = Counter(
            "fleet_requests_total", "Rows that this worker recorded.", ["model", "outcome"], registry=registry
        )
        self._tokens = Counter("fleet_tokens_total", "Tokens of recorded rows.", ["model", "kind"], registry=registry)
        self._seconds = Histogram(
            "fleet_request_seconds", "Seconds of one engine call.", ["model"], buckets=BUCKETS, registry=registry
        )
        self._waits = Histogram(
            "fleet_queue_wait_seconds",
            "Seconds from the publishing of a message to its first taking.",
            ["queue"],
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._idle = Counter(
            "fleet_engine_idle_seconds_total",
            "Unused engine time: seconds times the free share of the capacity, with and without a backlog.",
            ["backlog"],
            registry=registry,
        )
        self._deliveries = Counter(
            "fleet_deliveries_total", "Request messages taken.", ["redelivered"], registry=registry
        )
        self._parked = Counter(
            "fleet_parked_total", "Deliveries let go because a live worker ran their request.", registry=registry
        )
        self._struck = Counter(
            "fleet_struck_total", "Requests begun that had cost a worker or engine its life.", registry=registry
        )
        self._handed_back = Counter("fleet_handed_back_total", "Requests given back to the queue.", registry=registry)
        self._drains = Counter("fleet_drains_total", "Drains begun.", ["how"], registry=registry)
        # Known from the start, so that a rate over them never lacks its first sample.
        for how in ("signal", "engine_dead"):
            self._drains.labels(how)
        for yes_no in ("yes", "no"):
            self._idle.labels(yes_no)
            self._deliveries.labels(yes_no)
        registry.register(self)

    # -- the host's gauges, read when somebody asks -------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """How the host stands now."""
        host = self._host
        in_hand, on_engine, capacity = (host.in_hand, host.on_engine, host.capacity) if host else (0, 0, 0)
        yield GaugeMetricFamily("fleet_inflight_requests", "Requests in hand.", in_hand)
        yield GaugeMetricFamily("fleet_engine_requests", "Requests on the engine.", on_engine)
        yield GaugeMetricFamily("fleet_engine_capacity_requests", "Requests that the worker wants in flight.", capacity)
        states = GaugeMetricFamily("fleet_worker_state", "1 for the state that the worker is in.", labels=["state"])
        now = host.state if host else "loading"
        for state in STATES:
            states.add_metric([state], float(state == now))
        yield states

    # -- Observer -----------------------------------------------------------------------------------------------------

    def watch(self, host: EngineHost) -> None:
        """See `Observer`."""
        self._host = host
        self._wait = self._waits.labels(host.queue)

    def taken(self, *, redelivered: bool, waited_s: float | None) -> None:
        """See `Observer`."""
        # One that comes back was taken before: its time is no wait.
        if self._wait is not None and waited_s is not None and not redelivered:
            self._wait.observe(max(0.0, waited_s))
        self._deliveries.labels("yes" if redelivered else "no").inc()

    def parked(self) -> None:
        """See `Observer`."""
        self._parked.inc()

    def begun(self, strikes: int) -> None:
        """See `Observer`."""
        if strikes:
            self._struck.inc()

    def called(self, line: str, seconds: float, reply: Reply | None) -> None:
        """See `Observer`."""
        self._seconds.labels(self._model(line, reply)).observe(seconds)

    def recorded(self, line: str, reply: Reply, *, first: bool) -> None:
        """See `Observer`."""
        model = self._model(line, reply)
        if not first:
            self._requests.labels(model, "duplicate").inc()
            return
        self._requests.labels(model, reply.failure.code if reply.failure else "completed").inc()
        if reply.prompt_tokens:
            self._tokens.labels(model, "prompt").inc(reply.prompt_tokens)
        if reply.completion_tokens:
            self._tokens.labels(model, "completion").inc(reply.completion_tokens)

    def idle(self, seconds: float, *, backlog: bool) -> None:
        """See `Observer`."""
        self._idle.labels("yes" if backlog else "no").inc(seconds)

    def handed_back(self) -> None:
        """See `Observer`."""
        self._handed_back.inc()

    def draining(self, *, dead: bool) -> None:
        """See `Observer`."""
        self._drains.labels("engine_dead" if dead else "signal").inc()

    # -----------------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the worker does its work, also while it loads; never asks Redis."""
        return self._host is None or (self._host.alive and not self._host.dead)

    @property
    def ready(self) -> bool:
        """Whether the worker takes requests."""
        return self._host is not None and self._host.state == "ready" and self.alive

    def _model(self, line: str, reply: Reply | None) -> str:
        models = self._host.engine.models if self._host else ()
        if not models or (reply is not None and reply.failure is FailureKind.MODEL_NOT_FOUND):
            return OTHER
        if len(models) == 1:
            return models[0]  # the line need not be read
        try:
            name = from_json(line)["body"].get("model") or models[0]
        except (ValueError, LookupError, TypeError, AttributeError):
            return OTHER
        return name if name in models else OTHER


def serve_pages(host: str, port: int, *, alive: Callable[[], bool], ready: Callable[[], bool]) -> Pages:
    """Show the default registry and the two health pages. Raises `UsageError` for an address that cannot be had."""
    pages = {"/metrics": metrics_page(), "/healthz": health_page(alive), "/readyz": health_page(ready)}
    return Pages(host, port, pages)
