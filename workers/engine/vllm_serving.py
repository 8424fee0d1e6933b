"""A started vLLM and its endpoints: one request in, one row out.

Owns: the way of a line through vLLM's handlers. Must not know: Celery, Redis, the store, versions of vLLM.
What a request names by URL is fetched before vLLM sees it (`media`), so that vLLM opens no connection for it.
On failure: what the request is to blame for is a row that failed; a dead engine is an `EngineDeadError`, an answer cut
short an `EngineAbortedError`.

What was read in the sources of vLLM 0.30, 0.32 and 0.33, and is relied on:

- A cancelled handler does not raise but answers with a 400 row "Client disconnected"; a killed engine answers with
  500 rows; an engine that is told to stop with 200 rows whose `finish_reason` is "abort". None of these is recorded.
- `BatchRequestInput.model_validate_json` raises for a bad line: `ValidationError`, vLLM's own exceptions (they are no
  `ValueError`, so pydantic lets them through), and plain AttributeError where a validator expects an object.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from common import tracing
from common.batch import has_nonfinite_number
from common.errors import EngineAbortedError, EngineDeadError
from common.failures import Failure, FailureKind, cut
from workers.engine.media import Media
from workers.engine.vllm_endpoints import find_endpoint
from workers.engine.vllm_reasons import UNREADABLE, explain_unreadable
from workers.engine.vllm_rows import failed, refused, succeeded, was_aborted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping

    from workers.engine import Reply, Request
    from workers.engine.vllm_doors import Vllm
    from workers.engine.vllm_endpoints import Endpoint

#: Requests in flight that keep an engine busy whatever its size.
MIN_INFLIGHT = 256

#: Longest part of a user's url in a message.
MAX_URL_BYTES = 200


class Watched:
    """A client of vLLM's engine that remembers whether a request's answer was cut short, and passes its trace on.

    Not every endpoint's answer says so: of `/v1/responses` it reads "completed" (vLLM 0.30–0.33,
    entrypoints/openai/responses/serving.py), and a transcription has no word for it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        #: Whether it was told to trace by `--otlp-traces-endpoint`; else it warns (vLLM 0.32, v1/engine/async_llm.py).
        self._traces = bool(getattr(getattr(engine, "observability_config", None), "otlp_traces_endpoint", None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """As the engine's; notes an output that was aborted for the request that runs in this context."""
        if self._traces and (traceparent := tracing.current()):
            options["trace_headers"] = {tracing.TRACEPARENT: traceparent}
        async with contextlib.aclosing(self._engine.generate(*args, **options)) as outputs:
            async for output in outputs:
                if any(choice.finish_reason == "abort" for choice in output.outputs):
                    _aborts.get([]).append(output.request_id)
                yield output


#: The engine's outputs that were aborted, of the request that runs in this context.
_aborts: ContextVar[list[str]] = ContextVar("aborts")


class Serving:
    """A started engine and its endpoints: one request in, one row out."""

    def __init__(
        self,
        vllm: Vllm,
        engine: Any,
        endpoints: Mapping[str, Endpoint],
        models: tuple[str, ...],
        *,
        media: Media | None = None,
    ) -> None:
        self._unreadable = (*UNREADABLE, vllm.client_error)
        self._engine = engine
        self._endpoints = endpoints
        self._media = media or Media()
        self.models = models
        self.urls = tuple(url for url, endpoint in endpoints.items() if endpoint.handler is not None)
        self.default_inflight = default_inflight(engine.vllm_config)

    @property
    def errored(self) -> bool:
        """Whether the engine is dead (vLLM: its core is, or the task that reads its outputs)."""
        return bool(self._engine.errored)

    async def answer(self, request: Request) -> Reply:
        """Answer one request; see `workers.engine.Engine.run`."""
        if self.errored:
            raise EngineDeadError
        pending = await self._take(request)
        if isinstance(pending, Failure):
            return refused(request, pending)
        _aborts.set([])
        output = await self._await_answer(pending)
        if output.error is not None:
            # A dead engine answers every request at once, and with an error.
            if self.errored:
                raise EngineDeadError
            return failed(output)
        if _aborts.get() or was_aborted(output):
            raise EngineDeadError if self.errored else EngineAbortedError
        return succeeded(output)

    async def _take(self, request: Request) -> Awaitable[Any] | Failure:
        """The way to vLLM's answer, or why vLLM shall not see the request."""
        if has_nonfinite_number(request.line):
            return Failure(FailureKind.INVALID_REQUEST, "A number of the request is not finite.")
        url = str(from_json(request.line)["url"])
        endpoint = find_endpoint(self._endpoints, url)
        if endpoint is None:
            return self._unsupported(f"The url {cut(url, MAX_URL_BYTES)!r} is not served")
        if endpoint.handler is None:
            return self._unsupported("The model does not support this endpoint")
        admitted = await self._media.admit(request)
        if isinstance(admitted, Failure):
            return admitted
        try:
            parsed = endpoint.read(admitted.line)
        except self._unreadable as exc:
            return Failure(FailureKind.INVALID_REQUEST, explain_unreadable(exc))
        return endpoint.ask(parsed)

    async def _await_answer(self, pending: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            output = await pending
        except Exception as exc:
            # vLLM's handlers answer exceptions with rows; what comes through is a fault of its code or ours.
            if self.errored:
                raise EngineDeadError from exc
            raise
        # vLLM took our cancellation for a client's and answered it with a row. The cancellation is what counts.
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError
        return output

    def _unsupported(self, what: str) -> Failure:
        return Failure(FailureKind.UNSUPPORTED_ENDPOINT, f"{what}; supported: {', '.join(self.urls)}.")


def default_inflight(vllm_config: Any) -> int:
    """Apply vLLM's rule for run-batch: twice what it runs at once, so that a request waits for each that ends.

    vLLM 0.33, run_batch.run_batch: `2 * max_num_seqs * data_parallel_size`; its lower bound is 1024 where ours is 256,
    because here each request in flight is also a message in hand.
    """
    seqs = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.data_parallel_size
    return max(MIN_INFLIGHT, 2 * int(seqs))
