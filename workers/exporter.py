"""The exporter: a fleet's backlog, leases, batches, workers and broker as Prometheus series, and `/scale`.

Owns: the sampler's thread, the names of the exporter's series (`docs/metrics.md` explains them), and its pages.
Must not know: how Redis is asked (`workers.backlog`), Celery, the store.
On failure: while Redis does not answer, `fleet_up` is 0, every other series of the fleet is absent, and `/scale` is
503: an outage is not an empty queue. The process goes on and asks again.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import redis
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from common import broker
from common.errors import UsageError
from common.routes import Routes
from common.settings import AGGREGATE_QUEUE
from workers.backlog import Rate, Sample, desired_replicas, drain_s, read_sample
from workers.pages import Page, Pages, health_page, metrics_page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from common.settings import ExporterSettings
    from workers.pages import Asked

logger = logging.getLogger("fleet.exporter")

#: Samples that may fail in a row before the last good one is out of date, and the least time for that.
STALE_SAMPLES = 3
LEAST_STALE_S = 3.0

#: What `/scale` aims at when nobody says: half an hour, several times what a new worker needs to load its model.
TARGET_S = 1800.0


class Exporter(Collector):
    """Samples Redis in a thread and answers from the latest sample."""

    def __init__(
        self, client: redis.Redis, *, queue: str, queues: Sequence[str], lease_s: float, interval_s: float
    ) -> None:
        """`queue` is the one of requests without a route; `queues` are further ones to show."""
        self._client = client
        self._queue = queue
        #: Grows by the queues of live workers, so that a queue whose workers are gone is still shown.
        self._queues = {queue, *queues}
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._stale_s = max(LEAST_STALE_S, STALE_SAMPLES * interval_s)
        self._lock = threading.Lock()
        self._sample: Sample | None = None
        self._sampled_at = 0.0
        self._rates: dict[str, Rate] = {}
        self._away = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._stopping.set()
        self._thread.join(5.0)

    def pages(self, registry: CollectorRegistry = REGISTRY) -> dict[str, Callable[[Asked], Page]]:
        """The pages by their paths."""
        registry.register(self)
        return {
            "/metrics": metrics_page(registry),
            "/healthz": health_page(self._thread.is_alive),
            "/readyz": health_page(lambda: self.sample is not None),
            "/scale": self.scale,
        }

    def _run(self) -> None:
        while True:
            self._take_sample()
            if self._stopping.wait(self._interval_s):
                return

    def _take_sample(self) -> None:
        try:
            sample = read_sample(self._client, self._queues, default=self._queue, lease_s=self._lease_s)
        except (redis.RedisError, OSError) as exc:
            if not self._away:
                logger.warning("Redis does not answer: %s", type(exc).__name__)
            self._away = True
            with self._lock:
                for rate in self._rates.values():
                    rate.skip()
                self._sample = None
        except Exception as exc:  # the outermost loop of the thread: without it nothing would be sampled any more
            logger.exception("a sample failed by a fault of the fleet: %s", type(exc).__name__)
            with self._lock:
                self._sample = None
        else:
            if self._away:
                logger.info("Redis answers again")
            self._away = False
            self._queues.update(sample.queues)
            with self._lock:
                now = time.monotonic()
                for queue in self._served(sample):
                    self._rates.setdefault(queue, Rate(queue)).add(now, sample)
                self._sample, self._sampled_at = sample, now

    @property
    def sample(self) -> Sample | None:
        """The latest sample, or None when Redis does not answer, hangs, or was not asked yet."""
        with self._lock:
            fresh = time.monotonic() - self._sampled_at < self._stale_s
            return self._sample if fresh else None

    # -- /metrics -----------------------------------------------------------------------------------------------------

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry need not collect to know the names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The latest sample as series."""
        sample = self.sample
        yield GaugeMetricFamily("fleet_up", "1 while Redis answers.", float(sample is not None))
        if sample is not None:
            yield from self._collect_work(sample)
            yield from self._collect_rate(sample)
            yield from self._collect_redis(sample)

    @staticmethod
    def _served(sample: Sample) -> list[str]:
        """The queues of requests."""
        return [queue for queue in sample.queues if queue != AGGREGATE_QUEUE]

    def _by_queue(self, name: str, text: str, value: Callable[[str], float | None], sample: Sample) -> Metric:
        """A series of the requests' queues; absent where there is no value."""
        family = GaugeMetricFamily(name, text, labels=["queue"])
        for queue in self._served(sample):
            if (found := value(queue)) is not None:
                family.add_metric([queue], found)
        return family

    def _collect_work(self, sample: Sample) -> Iterator[Metric]:
        waiting = GaugeMetricFamily("fleet_queue_requests", "Messages that wait in a queue.", labels=["queue"])
        for queue, length in sample.queues.items():
            waiting.add_metric([queue], length)
        yield waiting
        yield GaugeMetricFamily("fleet_leased_requests", "Messages in hand, of all queues.", sample.leased)
        yield GaugeMetricFamily(
            "fleet_oldest_lease_seconds", "Seconds since the oldest lease was renewed.", sample.oldest_lease_s
        )
        yield GaugeMetricFamily("fleet_overdue_leases", "Leases that ran out and were not swept.", sample.overdue)
        yield self._by_queue("fleet_open_batches", "Batches without an end.", sample.open_batches, sample)
        yield self._by_queue("fleet_remaining_requests", "Requests without a row.", sample.remaining, sample)
        yield self._by_queue("fleet_remaining_tokens", "Estimate of their tokens.", sample.remaining_tokens, sample)
        workers = GaugeMetricFamily("fleet_workers", "Live workers.", labels=["queue", "state"])
        states = {(queue, state) for queue in sample.queues for state in ("loading", "ready", "draining")}
        counts = Counter(dict.fromkeys(states, 0))
        counts.update((worker.queue, worker.state) for worker in sample.workers)
        for labels, count in sorted(counts.items()):
            workers.add_metric(labels, count)
        yield workers
        text = "Requests that ready workers want in flight."
        yield self._by_queue("fleet_capacity_requests", text, sample.capacity, sample)

    def _collect_rate(self, sample: Sample) -> Iterator[Metric]:
        finished = CounterMetricFamily("fleet_finished_requests_total", "Rows recorded.", labels=["queue"])
        with self._lock:
            rates = {queue: (rate.per_second, rate.finished_total) for queue, rate in self._rates.items()}
        for queue, (_, total) in rates.items():
            finished.add_metric([queue], total)
        yield finished
        yield self._by_queue(
            "fleet_requests_per_second", "Measured while there was work.", lambda queue: rates[queue][0], sample
        )
        yield self._by_queue(
            "fleet_drain_seconds",
            "Remaining requests over that rate.",
            lambda queue: drain_s(sample.remaining(queue), rates[queue][0]),
            sample,
        )

    @staticmethod
    def _collect_redis(sample: Sample) -> Iterator[Metric]:
        info = sample.info
        used, limit = float(info["used_memory"]), float(info.get("maxmemory", 0))
        yield GaugeMetricFamily("fleet_redis_memory_used_bytes", "used_memory", used)
        if limit:
            yield GaugeMetricFamily("fleet_redis_memory_limit_bytes", "maxmemory", limit)
            yield GaugeMetricFamily("fleet_redis_memory_headroom_bytes", "Limit minus used.", limit - used)
        yield GaugeMetricFamily(
            "fleet_redis_append_only", "1 if Redis appends to disk.", float(info.get("aof_enabled") == 1)
        )
        failed = "err" in {info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")}
        yield GaugeMetricFamily("fleet_redis_persistence_ok", "1 if the last writes to disk succeeded.", 1.0 - failed)
        evicts = info.get("maxmemory_policy", "noeviction") != "noeviction"
        yield GaugeMetricFamily("fleet_redis_may_evict", "1 if Redis may evict work in flight.", float(evicts))

    # -- /scale -------------------------------------------------------------------------------------------------------

    def scale(self, asked: Asked) -> Page:
        """What an autoscaler wants to know, as JSON. Raises `UsageError` for a parameter that makes no sense."""
        target_s = _number(asked, "target_s", TARGET_S)
        least, most = int(_number(asked, "min", 0)), int(_number(asked, "max", 0))
        given = _number(asked, "rate", 0)
        queue = asked.query.get("queue", self._queue)
        if not target_s:
            raise UsageError("target_s must be more than 0")
        sample = self.sample
        if sample is None:
            return _json(503, {"error": "Redis does not answer"})
        if queue not in self._served(sample):
            raise UsageError(f"the queue {queue!r} is not known here: name it with worker exporter --queue")
        with self._lock:
            per_second, per_worker = self._rates[queue].per_second, self._rates[queue].per_worker
        remaining = sample.remaining(queue)
        workers = sum(worker.queue == queue for worker in sample.workers)
        answer = {
            "queue": queue,
            "queued": sample.queues[queue],
            "leased": sample.leased,
            "open_batches": sample.open_batches(queue),
            "remaining_requests": remaining,
            "remaining_tokens": round(sample.remaining_tokens(queue)),
            "workers": workers,
            "workers_ready": sample.ready(queue),
            "capacity": sample.capacity(queue),
            "requests_per_s": per_second,
            "requests_per_s_per_worker": per_worker,
            "drain_s": drain_s(remaining, per_second),
            "desired_replicas": desired_replicas(
                remaining=remaining,
                waiting=sample.queues[queue] + (sample.leased if len(self._served(sample)) == 1 else 0),
                workers=workers,
                per_worker=per_worker or given or None,
                target_s=target_s,
                least=least,
                most=most,
            ),
        }
        return _json(200, answer)


def _json(status: int, answer: dict[str, object]) -> Page:
    return Page(status, json.dumps(answer).encode() + b"\n", "application/json")


def _number(asked: Asked, name: str, default: float) -> float:
    text = asked.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} must be a number that is not negative")
    return value


def run(settings: ExporterSettings, queues: Sequence[str]) -> int:
    """Export until SIGTERM or Ctrl-C; returns the exit code. Raises `UsageError` for an address that is taken."""
    client = broker.redis_client(settings.broker_url, tries=0)
    exporter = Exporter(
        client,
        queue=settings.queue,
        queues=[*queues, *Routes.parse(settings.routes).by_model.values()],
        lease_s=settings.lease_s,
        interval_s=settings.exporter_interval_s,
    )
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    exporter.start()
    pages = Pages(settings.exporter_host, settings.exporter_port, exporter.pages())
    stopped.wait()
    pages.close()
    exporter.stop()
    return 0
