"""A traced request's way into an engine that traces; tests/vllm/test_vllm_tracing.py has a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engine.vllm_serving import Watched

PARENT = "00-11112222333344445555666677778888-1234567812345678-01"


@pytest.mark.parametrize(("endpoint", "passed"), [("http://collector:4317", True), (None, False)])
def test_a_traced_request_takes_its_trace_into_an_engine_that_traces(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, passed: bool
) -> None:
    """One that does not would warn of the headers."""
    asked: list[dict[str, Any]] = []

    class Engine:
        observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)

        async def generate(self, *_: Any, **options: Any) -> Any:
            asked.append(options)
            yield SimpleNamespace(request_id="r", outputs=[SimpleNamespace(finish_reason="stop")])

    async def ask() -> None:
        for traceparent in (PARENT, ""):
            monkeypatch.setattr("common.tracing.current", lambda traceparent=traceparent: traceparent)
            async for _ in Watched(Engine()).generate("x", None, "r", trace_headers=None):
                pass

    asyncio.run(ask())

    traced, untraced = asked
    assert traced["trace_headers"] == ({"traceparent": PARENT} if passed else None)
    assert untraced["trace_headers"] is None
