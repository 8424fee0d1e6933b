"""Traces of a real engine: its own spans in a batch's trace where it is told to trace, and none where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.test_vllm_fleet import chat
from tests.vllm_flags import FLAGS

if TYPE_CHECKING:
    from tests.servers import Workplace

collectors = pytest.importorskip("tests.collector", reason="pip install 'batch-fleet[otel]'")

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("told", [True, False])
def test_an_engine_traces_what_the_fleet_traces_if_it_is_told_to(
    workplace: Workplace, model_folder: str, told: bool
) -> None:
    """The variable alone would make vLLM's processes trace on their own."""
    source = workplace.write("in.jsonl", [chat(f"c{number}", "sentinel-4711") for number in range(3)])
    with collectors.Collector() as collector:
        endpoint = f"{collector.url}/v1/traces"
        flags = (*FLAGS, "--otlp-traces-endpoint", endpoint) if told else FLAGS
        result = workplace.producer(
            *("submit", str(source), "--local", "--model", model_folder, "--", *flags),
            timeout_s=240,
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint,
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
            OTEL_BSP_SCHEDULE_DELAY="200",
            FLEET_TRACE_REQUESTS="1",
        )
        assert result.code == 0, result.stderr
        (root,), engines = collector.spans("submit"), collector.spans("engine")
        theirs = [span for span in collector.spans("llm_request") if span.trace == root.trace]
        services = {span.service for span in collector.spans()}

        assert len(engines) == 3
        assert {span.trace for span in engines} == {root.trace}
        if told:
            assert {span.parent for span in theirs} == {span.id for span in engines}
        else:
            assert services == {"batch-fleet"}
        assert [body for body in collector.bodies if b"sentinel-4711" in body] == []
