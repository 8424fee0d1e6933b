"""The adapter over versions of vLLM: what of it is used, and what differs from one version to the next.

Owns: every name inside vLLM. Must not know: rows, the fleet.
On failure: a version that is missing, broken, not known or not as it says is an `EngineStartError` of one sentence.

What was read in the sources of vLLM 0.30 to 0.33 (0.32 alone is run by the tests), and is relied on:

- `entrypoints/launchers/run_batch.py` is the batch runner's module in all of them. Its `run_request` asks a handler and
  answers exceptions with error rows; only its parameters differ: see `DOORS`. A version that is not there is refused.
- `init_app_state` (`entrypoints/launchers/api_server/app_state.py`) makes every handler of the HTTP API and takes the
  same parameters in all of them. What it calls does not: `OpenAIServingResponses` takes `tool_strict_level` and
  `enable_per_request_metrics` since 0.31, `OpenAIServingChat` `tool_strict_level` since 0.31. Hence no handler is made
  here.
- `create_completion` and `create_responses` take `(request, raw_request=None)` in all of them.

vLLM's modules have no types here (`import_module` gives Any): they differ by version, and are not always installed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from common.errors import EngineStartError
from workers.engine.vllm_reasons import first_line, flags_sentence

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Mapping, Sequence


class _NoTracker:
    """The progress bar of vLLM's runner, which is not shown here."""

    def completed(self) -> None:
        """Count nothing."""


_NO_TRACKER = _NoTracker()

#: `run_batch.run_request`: asks a handler for the answer to a request, and never raises for the request's own fault.
RunRequest = Callable[..., "Awaitable[Any]"]


@dataclass(frozen=True)
class Door:
    """How one range of versions asks a handler: the parameters of `run_batch.run_request`, and a call of it."""

    parameters: tuple[str, ...]
    call: Callable[[RunRequest, Any, Any], Awaitable[Any]]


def _run_with_tracker(run_request: RunRequest, handler: Any, request: Any) -> Awaitable[Any]:
    return run_request(handler, request, _NO_TRACKER)


def _run(run_request: RunRequest, handler: Any, request: Any) -> Awaitable[Any]:
    return run_request(handler, request)


#: vLLM 0.30 to 0.32.
TRACKER_DOOR = Door(("serving_engine_func", "request", "tracker"), _run_with_tracker)

#: vLLM 0.33.
PLAIN_DOOR = Door(("serving_engine_func", "request"), _run)

#: Minor versions of vLLM that are known. A new one is read, run and added here.
DOORS = {"0.30": TRACKER_DOOR, "0.31": TRACKER_DOOR, "0.32": TRACKER_DOOR, "0.33": PLAIN_DOOR}

SUPPORTED = "0.30 to 0.33"

#: What vLLM serves over HTTP and its batch runner does not.
COMPLETIONS_URL, RESPONSES_URL = "/v1/completions", "/v1/responses"


def door_of(version: str) -> Door:
    """Return the door of this version of vLLM. Raises `EngineStartError` for a version that is not known."""
    door = DOORS.get(".".join(version.split(".")[:2]))
    if door is None:
        raise EngineStartError(f"vLLM {version} is not supported; install vLLM {SUPPORTED}.")
    return door


def check_functions(version: str, door: Door, run_batch: Any, build_engine: Any, init_app_state: Any) -> None:
    """Check that vLLM's functions are what its version promises: a guess would show much later, as wrong rows.

    Raises `EngineStartError` that names the version and the function.
    """
    wrapper = getattr(run_batch, "make_transcription_wrapper", None)
    expected = {
        "run_request": (getattr(run_batch, "run_request", None), door.parameters),
        "make_transcription_wrapper": (wrapper, ("is_translation", "allowed_media_domains")),
        "build_async_engine_client": (build_engine, ("args", "usage_context", "client_config")),
        "init_app_state": (init_app_state, ("engine_client", "state", "args", "supported_tasks")),
    }
    for name, (function, parameters) in expected.items():
        check_parameters(version, name, function, parameters)
    for name in ("BatchRequestInput", "BaseFrontendArgs", "create_error_response", "ErrorResponse"):
        if not hasattr(run_batch, name):
            raise EngineStartError(
                f"vLLM {version} is not as its version says: its run_batch has no {name}; "
                f"supported is vLLM {SUPPORTED}, unpatched."
            )


def check_parameters(version: str, name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """Check one function's parameters; raises `EngineStartError`."""
    found = tuple(inspect.signature(function).parameters) if callable(function) else None
    if found != parameters:
        raise EngineStartError(
            f"vLLM {version} is not as its version says: {name} should take {parameters} but takes {found}; "
            f"supported is vLLM {SUPPORTED}, unpatched."
        )


@dataclass(frozen=True)
class Vllm:
    """The parts of an imported vLLM that are used, and its door."""

    version: str
    door: Door
    #: The module `vllm.entrypoints.launchers.run_batch`.
    run_batch: Any
    #: `build_async_engine_client` of vLLM.
    build_client: Callable[..., Any]
    #: `init_app_state` of vLLM: puts every handler that the model has on a state.
    init_app_state: Callable[..., Awaitable[None]]
    #: The bodies that `BatchRequestInput` does not read, by their urls.
    bodies: Mapping[str, Any]
    #: What besides `UNREADABLE` a bad line raises.
    client_error: type[Exception]

    @classmethod
    def load(cls) -> Vllm:
        """Import vLLM: 5 to 7 s. Raises `EngineStartError` when it is missing, broken or of an unknown version."""
        try:
            version = str(import_module("vllm").__version__)
            # Before the other imports, which in an unknown version may not exist.
            door = door_of(version)
            run_batch = import_module("vllm.entrypoints.launchers.run_batch")
            build_client = import_module("vllm.entrypoints.launchers.api_server.entry").build_async_engine_client
            init_app_state = import_module("vllm.entrypoints.launchers.api_server.app_state").init_app_state
            completion = import_module("vllm.entrypoints.openai.completion.protocol").CompletionRequest
            responses = import_module("vllm.entrypoints.openai.responses.protocol").ResponsesRequest
            client_error = import_module("vllm.exceptions").VLLMClientError
        except (ImportError, AttributeError, RuntimeError, OSError) as exc:
            if isinstance(exc, ModuleNotFoundError) and exc.name == "vllm":
                raise EngineStartError(
                    "vLLM is not installed here; install it (pip install 'batch-fleet[vllm]') or take --engine echo."
                ) from exc
            # RuntimeError: torch's, of a torchvision or a driver that does not fit it.
            raise EngineStartError(f"vLLM cannot be imported: {first_line(exc)}.") from exc
        check_functions(version, door, run_batch, build_client, init_app_state)
        bodies = {COMPLETIONS_URL: completion, RESPONSES_URL: responses}
        return cls(version, door, run_batch, build_client, init_app_state, bodies, client_error)

    def is_cpu(self) -> bool:
        """Whether vLLM computes on the CPU, by its own judgement."""
        return bool(import_module("vllm.platforms").current_platform.is_cpu())

    def parse(self, model: str, engine_args: Sequence[str]) -> Namespace:
        """Read vLLM's flags by vLLM's parser, as `vllm run-batch` does, without its files.

        `fleet_sized` of the result says that the user gave a share of the memory.
        """
        if clash := [arg for arg in engine_args if re.match(r"--model(=|$)", arg)]:
            raise EngineStartError(f"The model is given twice: {model} and {clash[0]}.")
        base = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser

        class Parser(base):  # type: ignore[misc,valid-type]  # vLLM's modules are Any here
            def error(self, message: str) -> Any:
                """Raise where argparse would print its usage and exit."""
                raise EngineStartError(flags_sentence(message.splitlines()[0]))

        parser = Parser(prog="worker serve", add_help=False)
        parser = self.run_batch.BaseFrontendArgs.add_cli_args(parser)
        parser = import_module("vllm.engine.arg_utils").AsyncEngineArgs.add_cli_args(parser)
        utilization = parser.get_default("gpu_memory_utilization")
        # Only so can "not given" be told from "given as the default", in a --config file too.
        parser.set_defaults(gpu_memory_utilization=None)
        try:
            args: Namespace = parser.parse_args(["--model", model, *engine_args])
        except (ValueError, TypeError, LookupError, OSError) as exc:  # of a --config file or a JSON value
            raise EngineStartError(flags_sentence(first_line(exc))) from exc
        args.fleet_sized = args.gpu_memory_utilization is not None
        if not args.fleet_sized:
            args.gpu_memory_utilization = utilization
        # They refuse requests with a 503 row so that a client tries elsewhere. Here they would only be rows
        # that failed; vLLM 0.33's run-batch ignores them too (run_batch.ignore_admission_limits).
        args.max_num_queued_reqs = args.max_num_queued_tokens = None
        # As run_batch.parse_args does; vLLM 0.30 has no flags for its log.
        configure = getattr(import_module("vllm.logger"), "configure_logging_from_args", None)
        if configure is not None:
            configure(args)
        return args

    def build_engine(self, args: Namespace) -> Any:
        """Give vLLM's async context of an engine, with the defaults that `vllm run-batch` takes."""
        usage = import_module("vllm.usage.usage_lib").UsageContext
        return self.build_client(args, usage_context=usage.OPENAI_BATCH_RUNNER)

    async def build_handlers(self, engine: Any, args: Namespace) -> Any:
        """Give a state whose attributes are the handlers of vLLM's HTTP API, as far as the model has their tasks."""
        state = import_module("starlette.datastructures").State()
        await self.init_app_state(engine, state, args, await engine.get_supported_tasks())
        return state
