"""A started vLLM and its endpoints: one request in, one row out.

Owns: the way of a line through vLLM's handlers. Must not know: Celery, Redis, the store, versions of vLLM.
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
from typing import TYPE_CHECKING, Any

from common.batch import has_nonfinite_number
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import Failure, FailureKind, cut
from workers.engine.vllm_reasons import UNREADABLE, explain_unreadable
from workers.engine.vllm_rows import failed, refused, succeeded, was_aborted

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from workers.engine import Reply, Request
    from workers.engine.vllm_doors import Handle, Vllm

#: Requests in flight that keep an engine busy whatever its size.
MIN_INFLIGHT = 256

#: Longest part of a user's url in a message.
MAX_URL_BYTES = 200


class Serving:
    """A started engine and its endpoints: one request in, one row out."""

    def __init__(self, vllm: Vllm, engine: Any, registry: dict[str, Any], models: tuple[str, ...]) -> None:
        for key, entry in registry.items():
            if not vllm.door.entry <= entry.keys():
                raise EngineStartError(
                    f"vLLM {vllm.version} is not as its version says: its endpoint {key!r} has {sorted(entry)}."
                )
        self._parse = vllm.run_batch.BatchRequestInput.model_validate_json
        self._unreadable = (*UNREADABLE, vllm.client_error)
        self._handle: Handle = vllm.run_batch.handle_endpoint_request
        self._call = vllm.door.call
        self._engine = engine
        self._registry = registry
        self.models = models
        self.default_inflight = default_inflight(engine.vllm_config)

    @property
    def errored(self) -> bool:
        """Whether the engine is dead (vLLM: its core is, or the task that reads its outputs)."""
        return bool(self._engine.errored)

    async def answer(self, request: Request) -> Reply:
        """Answer one request; see `workers.engine.Engine.run`."""
        if self.errored:
            raise EngineDeadError
        if has_nonfinite_number(request.line):
            return refused(request, Failure(FailureKind.INVALID_REQUEST, "A number of the request is not finite."))
        try:
            parsed = self._parse(request.line)
        except self._unreadable as exc:
            return refused(request, Failure(FailureKind.INVALID_REQUEST, explain_unreadable(exc)))
        entry = self._registry.get(parsed.url.split("/")[-1])
        pending = None if entry is None else self._call(self._handle, parsed, entry)
        if entry is None or pending is None:
            return refused(request, self._unsupported(f"The url {cut(parsed.url, MAX_URL_BYTES)!r} is not served"))
        output = await self._await_answer(pending)
        if output.error is not None:
            # A dead engine answers every request at once, and with an error.
            if self.errored:
                raise EngineDeadError
            lacks = entry["handler_getter"]() is None
            return failed(output, self._unsupported("The model does not support this endpoint") if lacks else None)
        if was_aborted(output):
            raise EngineDeadError if self.errored else EngineAbortedError
        return succeeded(output)

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
        served = [_url(key) for key, entry in self._registry.items() if entry["handler_getter"]() is not None]
        return Failure(FailureKind.UNSUPPORTED_ENDPOINT, f"{what}; supported: {', '.join(served)}.")


def default_inflight(vllm_config: Any) -> int:
    """Apply vLLM's rule for run-batch: twice what it runs at once, so that a request waits for each that ends.

    vLLM 0.33, run_batch.run_batch: `2 * max_num_seqs * data_parallel_size`; its lower bound is 1024 where ours is 256,
    because here each request in flight is also a message in hand.
    """
    seqs = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.data_parallel_size
    return max(MIN_INFLIGHT, 2 * int(seqs))


def _url(key: str) -> str:
    """Return the url of a registry's key, as a user writes it (vLLM 0.33 has it in the entry, 0.32 in a function)."""
    prefix = {"completions": "/v1/chat/", "transcriptions": "/v1/audio/", "translations": "/v1/audio/"}
    return prefix.get(key, "/v1/") + key
