"""What answers requests: the engine protocol, shared by `vllm` and `echo`.

Owns: the `Engine` protocol and its small records. Knows nothing of Celery, Redis or the store.

    new ──start()──▶ ready ──run() × many──▶ ready ──stop()──▶ stopped
      │                │
      │                └── dies ──▶ errored      (run() raises EngineDeadError from now on)
      └── EngineStartError

An engine lives on one event loop, the one that called `start`; every method but `__init__` is called there.
Infrastructure raises (`EngineDeadError`, `EngineAbortedError`); everything that is the request's own fault is a
`Reply` with a failure. A dead engine is never a row, and neither is an answer cut short by an abort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from common.failures import FailureKind


@dataclass(frozen=True, slots=True)
class Request:
    """One request as an engine sees it.

    `line` is the user's input line, one JSON object without its line end, exactly as written.
    `calls` counts the engine calls that this request already had, across the fleet.
    """

    line: str
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request: its whole result row, and what the ledger counts of it.

    `row` is one strict JSON object in UTF-8 without a line end, as `common.batch` writes them.
    `failure` is None exactly when the row's `error` is null. Tokens are those of the row's `usage`.
    """

    row: bytes
    failure: FailureKind | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Engine(Protocol):
    """An engine that answers requests of the OpenAI batch format."""

    #: "vllm" or "echo".
    name: str
    #: Names under which requests may address the model(s); known once started.
    models: tuple[str, ...]
    #: Urls of the endpoints that the model serves, as a refusal of another url lists them; known once started.
    endpoints: tuple[str, ...]
    #: How many requests to keep in flight when nobody says; known once started.
    default_inflight: int

    @property
    def errored(self) -> bool:
        """True from the moment the engine is dead."""

    async def start(self) -> None:
        """Load the model. Raises `EngineStartError` with one sentence that says what to change."""

    async def run(self, request: Request) -> Reply:
        """Answer one request. Many run at once.

        Raises `EngineDeadError` when the engine is dead, `EngineAbortedError` when a living engine cut the answer
        short; the request was not answered then, and what the engine said of it must not become its row. Any other
        exception is a fault of the engine's code that the caller records as `internal_error`.
        """

    async def check_health(self) -> None:
        """Return when the engine can answer; raise `EngineDeadError` when it is dead. Cheap."""

    async def stop(self) -> None:
        """Release everything, child processes included. May be called in every state, also twice."""
