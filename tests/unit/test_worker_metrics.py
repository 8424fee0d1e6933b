"""What a worker counts, without a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry

from workers.metrics import WorkerMetrics

if TYPE_CHECKING:
    from workers.engine.host import EngineHost


class Idle:
    """A host without requests."""

    queue = "gpu"
    state = "ready"
    in_hand = on_engine = capacity = 0


def test_waits_are_by_queue_never_negative_and_of_first_deliveries_only() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.watch(cast("EngineHost", Idle()))

    metrics.taken(redelivered=False, waited_s=2.0)
    metrics.taken(redelivered=False, waited_s=-3600.0)  # the worker's clock is an hour behind
    metrics.taken(redelivered=True, waited_s=500.0)
    metrics.taken(redelivered=False, waited_s=None)  # an older message

    def told(suffix: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"fleet_queue_wait_seconds_{suffix}", {"queue": "gpu", **labels})

    assert (told("count"), told("sum")) == (2, 2.0)
    assert (told("bucket", le="0.1"), told("bucket", le="2.5")) == (1, 2)
    assert registry.get_sample_value("fleet_deliveries_total", {"redelivered": "no"}) == 3
    assert registry.get_sample_value("fleet_deliveries_total", {"redelivered": "yes"}) == 1
