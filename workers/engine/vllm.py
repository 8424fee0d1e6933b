"""vLLM as an engine: its own flags, its own batch handlers, its own rows.

Owns: everything that is known about vLLM. It is imported here alone, and only once an engine starts, so that the rest
of the product runs where there is no vLLM. Must not know: Celery, Redis, the store.
On failure: a start that fails is an `EngineStartError` with one sentence; vLLM's own log says more. A dead engine is
an `EngineDeadError`, an answer cut short an `EngineAbortedError`; every other failure is a row.

What was read in the sources of vLLM 0.30, 0.32 and 0.33, and is relied on:

- `entrypoints/launchers/run_batch.py` is the batch runner's module in all of them. `build_endpoint_registry` gives
  every endpoint that `vllm run-batch` serves; its handlers answer exceptions with error rows.
- Only `handle_endpoint_request` differs: see `DOORS`. A version that is not in that table is refused.
- A cancelled handler does not raise but answers with a 400 row "Client disconnected"; a killed engine answers with
  500 rows; an engine that is told to stop with 200 rows whose `finish_reason` is "abort". None of these is recorded.
- `BatchRequestInput.model_validate_json` raises for a bad line: `ValidationError`, vLLM's own exceptions (they are no
  `ValueError`, so pydantic lets them through), and plain AttributeError where a validator expects an object.

vLLM's modules have no types here (`import_module` gives Any): they differ by version, and are not always installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import to_json

from common.batch import SUCCESS_END, custom_id_of, failed_row, has_nonfinite_number, http_error
from common.errors import EngineAbortedError, EngineDeadError, EngineStartError
from common.failures import Failure, FailureKind, cut, kind_of_status
from workers.engine import Reply, Request, tie

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, MutableMapping, Sequence

log = logging.getLogger(__name__)

#: Requests in flight that keep an engine busy whatever its size.
MIN_INFLIGHT = 256

#: How many engines share this machine's cores and memory. Read on CPU only; a GPU is nobody else's.
WORKERS_ENV = "FLEET_WORKERS_ON_HOST"

GIB = 1024**3

#: The KV cache of a CPU engine that nobody sized: this part of its share of the free memory, within these bounds.
#: The rest is for the weights and for what else runs here, and every GiB makes the start some seconds longer.
KV_SHARE = 1 / 8
KV_MIN_BYTES, KV_MAX_BYTES = GIB // 8, 4 * GIB

#: What one line's validation may say: a union of message types answers one typing error with a dozen of its own.
MAX_REASONS = 5
MAX_REASON_BYTES = 300

#: Longest part of a user's url in a message.
MAX_URL_BYTES = 200

#: Longest path of the folder for temporary files that leaves room for an engine's sockets below it.
MAX_SCRATCH_BASE = 40

#: Longest reason in the sentence of a failed start.
MAX_START_REASON_BYTES = 1000

#: What besides vLLM's own exceptions a bad line raises in vLLM's validators (see the module's docstring).
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class VllmEngine:
    """The engine of `workers.engine.Engine` that serves a model by vLLM.

    `engine_args` are vLLM's own flags, as `vllm serve MODEL …` takes them; MODEL is not among them.

    `start` sets environment variables of this process, because the engine's processes inherit them, and blocks its
    event loop while vLLM is imported (5 s) and the engine built: it belongs on a thread of its own.
    """

    name = "vllm"

    def __init__(self, model: str, engine_args: Sequence[str]) -> None:
        self.models: tuple[str, ...] = ()
        self.default_inflight = MIN_INFLIGHT
        self._model = model
        self._engine_args = tuple(engine_args)
        self._serving: Serving | None = None
        self._dead = False
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @property
    def errored(self) -> bool:
        """True from the moment the engine is dead; also after `stop`, when it was dead before."""
        if self._serving is not None and self._serving.errored:
            self._dead = True
        return self._dead

    async def start(self) -> None:
        """Load the model. Raises `EngineStartError` with one sentence that says what to change."""
        if self._task is not None:
            raise EngineStartError("The engine was started before.")
        refuse_missing_folder(self._model)
        prepare_environment(self._model, os.environ)
        # Here and not where the engine is built: the frames that import vLLM 0.32 are kept by something in it, with
        # their variables. An engine among them would live until the interpreter's exit and print a traceback there.
        vllm = Vllm.load()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # One task enters and leaves vLLM's context: `start` and `stop` may be called from different ones.
        self._task = asyncio.create_task(self._hold(vllm, ready), name="vllm-engine")
        self._task.add_done_callback(lambda _: _refuse_stopped(ready))
        try:
            await ready
        except BaseException:
            await self.stop()
            raise

    async def run(self, request: Request) -> Reply:
        """Answer one request; see `workers.engine.Engine.run`."""
        if self._serving is None:
            raise EngineDeadError("The engine is not running.")
        return await self._serving.answer(request)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` when the engine is dead.

        `AsyncLLM.check_health` looks at the same flag and does nothing else (vLLM 0.32, v1/engine/async_llm.py).
        """
        if self._serving is None or self.errored:
            raise EngineDeadError

    async def stop(self) -> None:
        """Close the engine and its processes. Requests that still run must have been cancelled before."""
        self._dead = self.errored  # asked now: a closed engine counts as errored too
        if self._task is None:
            return
        if self._serving is None:
            self._task.cancel()  # it may hang in a start that never ends; a second call finds it done
        self._serving = None
        self._stopping.set()
        await asyncio.wait({self._task})

    async def _hold(self, vllm: Vllm, ready: asyncio.Future[None]) -> None:
        try:
            async with open_engine(vllm, self._model, self._engine_args) as self._serving:
                self.models = self._serving.models
                self.default_inflight = self._serving.default_inflight
                if not ready.done():
                    ready.set_result(None)
                await self._stopping.wait()
        except Exception as exc:  # noqa: BLE001 - the outermost loop of this task; it reaches the caller by `ready`
            if not ready.done():
                ready.set_exception(exc)
            else:
                log.warning("vLLM did not close cleanly: %s", type(exc).__name__)
        finally:
            self._serving = None
            gc.collect()  # vLLM's engine client is part of cycles; see `start` for what it does at the exit


def _refuse_stopped(ready: asyncio.Future[None]) -> None:
    """Tell a waiting `start` that its engine ended without a word: it was cancelled, perhaps before its first step."""
    if not ready.done():
        ready.set_exception(EngineStartError("The engine was stopped while it started."))


# -- starting ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_engine(vllm: Vllm, model: str, engine_args: Sequence[str]) -> AsyncIterator[Serving]:
    """Start vLLM and yield it serving; close it, and its processes, at the end.

    Raises `EngineStartError` for whatever goes wrong before it serves.
    """
    async with contextlib.AsyncExitStack() as stack:
        # Entered before the engine, so removed after it.
        scratch = stack.enter_context(scratch_folder())
        reason_file = scratch / "reason"
        # Engine processes inherit these when they are started, and no later.
        with contextlib.ExitStack() as starting:
            starting.enter_context(_variable(tie.REASON_ENV, str(reason_file)))
            if "VLLM_RPC_BASE_PATH" not in os.environ:
                # vLLM leaves its sockets where they were when it ends (vLLM 0.32, utils/network_utils.py).
                starting.enter_context(_variable("VLLM_RPC_BASE_PATH", str(scratch)))
            try:
                serving = await _start_serving(vllm, model, engine_args, stack)
            except EngineStartError:
                raise
            except Exception as exc:
                raise EngineStartError(start_sentence(exc, reason_file)) from exc
        yield serving


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for what an engine leaves behind. Its path is short: a socket's may have 107 bytes."""
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="fleet-engine-",
        dir=base if len(base) <= MAX_SCRATCH_BASE else "/tmp",  # noqa: S108 - mkdtemp makes it private
    ) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process' environment for a while."""
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


async def _start_serving(
    vllm: Vllm, model: str, engine_args: Sequence[str], stack: contextlib.AsyncExitStack
) -> Serving:
    args = vllm.parse(model, engine_args)
    if vllm.is_cpu():
        fit_cpu(args, os.environ)
    engine = await stack.enter_async_context(vllm.build_engine(args))
    registry = await vllm.run_batch.build_endpoint_registry(engine, args)
    return Serving(vllm, engine, registry, served_models(args))


def refuse_missing_folder(model: str) -> None:
    """Refuse a path that is not there: vLLM would take it for a name on the Hugging Face hub."""
    if model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise EngineStartError(f"There is no model folder {model}.")


def prepare_environment(model: str, environ: MutableMapping[str, str]) -> None:
    """Set what vLLM, or what it imports, reads from the environment at import; a user's own values stay."""
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if Path(model).is_dir():
        # The model is here; without this the hub is asked for files that it may lack, and that takes its time-outs.
        environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault(tie.WORKER_ENV, "1")
    tie.allow_plugin(environ)


def start_sentence(exc: Exception, reason_file: Path) -> str:
    """Say in one sentence why the engine did not start: by the engine's own process, if it said why."""
    try:
        reason = reason_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = _first_line(exc)
    return f"vLLM did not start: {cut(reason.rstrip('.'), MAX_START_REASON_BYTES)}."


def _first_line(exc: Exception) -> str:
    """Return the first line of an exception's message, without its full stop."""
    text = str(exc)
    if isinstance(exc, ValidationError):
        # vLLM's configurations are pydantic's too; their str() begins with a count.
        text = exc.errors(include_input=False, include_url=False)[0]["msg"].removeprefix("Value error, ")
    elif isinstance(exc, KeyError) and exc.args:
        text = str(exc.args[0])  # str() of a KeyError is a repr
    lines = text.strip().splitlines() or [type(exc).__name__]
    return lines[0].rstrip(".")


def served_models(args: Namespace) -> tuple[str, ...]:
    """Names under which requests may address the model and its LoRA adapters."""
    served = args.served_model_name or args.model
    names = [served] if isinstance(served, str) else list(served)
    names += [module.name for module in getattr(args, "lora_modules", None) or []]
    return tuple(names)


# -- what a CPU needs -------------------------------------------------------------------------------------------------


def fit_cpu(args: Namespace, environ: MutableMapping[str, str]) -> None:
    """Make the CPU engine fit this machine: memory, processes, threads. What a user said stays.

    Measured with vLLM 0.32: by itself it takes 92 % of the memory, so that no second engine starts beside it; and one
    process that computes with all threads starts 5 s sooner than its engine plus worker, and computes as fast.
    vLLM reads these variables when it builds its configuration and starts its processes, not at import (vLLM 0.32,
    envs.py and platforms/cpu.py).
    """
    workers = workers_on_host(environ)
    said = []
    if not (args.kv_cache_memory_bytes or args.fleet_sized or environ.get("VLLM_CPU_KVCACHE_SPACE")):
        args.kv_cache_memory_bytes = kv_cache_bytes(available_bytes(), workers)
        said.append(f"--kv-cache-memory-bytes {args.kv_cache_memory_bytes}")
    parallel = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size > 1
    chosen = environ.keys() & {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"}
    if not parallel and not chosen:
        # Without it the executor is a process more, which binds itself to all cores but one (vLLM 0.32,
        # platforms/cpu.py). With it vLLM leaves the threads to OMP_NUM_THREADS.
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // workers)))
        said.append(f"VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}")
    if said:
        log.info("vLLM on CPU, 1 of %d on this host: chose %s", workers, " ".join(said))


def workers_on_host(environ: Mapping[str, str]) -> int:
    """How many engines share this host. Raises `EngineStartError` for nonsense."""
    text = environ.get(WORKERS_ENV) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise EngineStartError(f"{WORKERS_ENV} must be a positive number, not {text!r}.")
    return int(text)


def kv_cache_bytes(available: int, workers: int) -> int:
    """Size the KV cache of one of `workers` CPU engines that share `available` bytes."""
    return max(KV_MIN_BYTES, min(KV_MAX_BYTES, int(available / workers * KV_SHARE)))


def available_bytes() -> int:
    """Memory that an engine can still take, by vLLM's reckoning: the memory node's, within the container's limit.

    vLLM refuses a KV cache that is larger (vLLM 0.32, v1/worker/cpu_worker.py), also where the machine has more.
    """
    try:
        node = import_module("vllm.utils.cpu_resource_utils").get_memory_node_info(0)
        return int(node.available_memory)
    except (ImportError, AttributeError):  # run with vLLM 0.32 alone: it may lie elsewhere in others
        return int(import_module("psutil").virtual_memory().available)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- the adapter over versions of vLLM --------------------------------------------------------------------------------


class _NoTracker:
    """The progress bar of vLLM's runner, which is not shown here."""

    def submitted(self) -> None:
        """Count nothing."""

    def completed(self) -> None:
        """Count nothing."""


_NO_TRACKER = _NoTracker()

Handle = Callable[..., "Awaitable[Any] | None"]


@dataclass(frozen=True)
class Door:
    """How one range of versions hands a request to its endpoint.

    `parameters` are those of `run_batch.handle_endpoint_request`, `entry` the keys of a registry's entry, and `call`
    hands over a request; None means that the entry's url is not the request's.
    """

    parameters: tuple[str, ...]
    entry: frozenset[str]
    call: Callable[[Handle, Any, Any], Awaitable[Any] | None]


def _hand_over_with_tracker(handle: Handle, request: Any, entry: Any) -> Awaitable[Any] | None:
    return handle(
        request,
        _NO_TRACKER,
        url_matcher=entry["url_matcher"],
        handler_getter=entry["handler_getter"],
        wrapper_fn=entry["wrapper_fn"],
    )


def _hand_over_with_config(handle: Handle, request: Any, entry: Any) -> Awaitable[Any] | None:
    return handle(request, entry)


#: vLLM 0.30 to 0.32.
TRACKER_DOOR = Door(
    parameters=("request", "tracker", "url_matcher", "handler_getter", "wrapper_fn"),
    entry=frozenset({"url_matcher", "handler_getter", "wrapper_fn"}),
    call=_hand_over_with_tracker,
)

#: vLLM 0.33. Its `run_one_request` is left alone: it parses and answers in one, and what fails must be told apart.
CONFIG_DOOR = Door(
    parameters=("request", "config"),
    entry=frozenset({"url", "handler_getter", "wrapper_fn"}),
    call=_hand_over_with_config,
)

#: Minor versions of vLLM that are known. A new one is read, run and added here.
DOORS = {"0.30": TRACKER_DOOR, "0.31": TRACKER_DOOR, "0.32": TRACKER_DOOR, "0.33": CONFIG_DOOR}

SUPPORTED = "0.30 to 0.33"


def door_of(version: str) -> Door:
    """Return the door of this version of vLLM. Raises `EngineStartError` for a version that is not known."""
    door = DOORS.get(".".join(version.split(".")[:2]))
    if door is None:
        raise EngineStartError(f"vLLM {version} is not supported; install vLLM {SUPPORTED}.")
    return door


def check_functions(version: str, door: Door, run_batch: Any, build_engine: Any) -> None:
    """Check that vLLM's functions are what its version promises: a guess would show much later, as wrong rows.

    Raises `EngineStartError` that names the version and the function.
    """
    expected = {
        "handle_endpoint_request": (getattr(run_batch, "handle_endpoint_request", None), door.parameters),
        "build_endpoint_registry": (getattr(run_batch, "build_endpoint_registry", None), ("engine_client", "args")),
        "build_async_engine_client": (build_engine, ("args", "usage_context", "client_config")),
    }
    for name, (function, parameters) in expected.items():
        found = tuple(inspect.signature(function).parameters) if callable(function) else None
        if found != parameters:
            raise EngineStartError(
                f"vLLM {version} is not as its version says: {name} should take {parameters} but takes {found}; "
                f"supported is vLLM {SUPPORTED}, unpatched."
            )
    for name in ("BatchRequestInput", "BaseFrontendArgs"):
        if not hasattr(run_batch, name):
            raise EngineStartError(
                f"vLLM {version} is not as its version says: its run_batch has no {name}; "
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
            client_error = import_module("vllm.exceptions").VLLMClientError
        except (ImportError, AttributeError, RuntimeError, OSError) as exc:
            if isinstance(exc, ModuleNotFoundError) and exc.name == "vllm":
                raise EngineStartError(
                    "vLLM is not installed here; install it (pip install 'batch-fleet[vllm]') or take --engine echo."
                ) from exc
            # RuntimeError: torch's, of a torchvision or a driver that does not fit it.
            raise EngineStartError(f"vLLM cannot be imported: {_first_line(exc)}.") from exc
        check_functions(version, door, run_batch, build_client)
        return cls(version, door, run_batch, build_client, client_error)

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
                raise EngineStartError(_flags_sentence(message.splitlines()[0]))

        parser = Parser(prog="worker serve", add_help=False)
        parser = self.run_batch.BaseFrontendArgs.add_cli_args(parser)
        parser = import_module("vllm.engine.arg_utils").AsyncEngineArgs.add_cli_args(parser)
        utilization = parser.get_default("gpu_memory_utilization")
        # Only so can "not given" be told from "given as the default", in a --config file too.
        parser.set_defaults(gpu_memory_utilization=None)
        try:
            args: Namespace = parser.parse_args(["--model", model, *engine_args])
        except (ValueError, TypeError, LookupError, OSError) as exc:  # of a --config file or a JSON value
            raise EngineStartError(_flags_sentence(_first_line(exc))) from exc
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


def _flags_sentence(reason: str) -> str:
    return f"vLLM does not take these flags: {cut(reason.rstrip('.'), MAX_START_REASON_BYTES)}."


# -- serving ----------------------------------------------------------------------------------------------------------


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
            return _refused(request, Failure(FailureKind.INVALID_REQUEST, "A number of the request is not finite."))
        try:
            parsed = self._parse(request.line)
        except self._unreadable as exc:
            return _refused(request, Failure(FailureKind.INVALID_REQUEST, explain_unreadable(exc)))
        entry = self._registry.get(parsed.url.split("/")[-1])
        pending = None if entry is None else self._call(self._handle, parsed, entry)
        if entry is None or pending is None:
            return _refused(request, self._unsupported(f"The url {cut(parsed.url, MAX_URL_BYTES)!r} is not served"))
        output = await self._await_answer(pending)
        if output.error is not None:
            # A dead engine answers every request at once, and with an error.
            if self.errored:
                raise EngineDeadError
            return self._failed(output, entry)
        if _was_aborted(output):
            raise EngineDeadError if self.errored else EngineAbortedError
        return _succeeded(output)

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

    def _failed(self, output: Any, entry: Any) -> Reply:
        """Write the row of a request that vLLM answered with an error: vLLM's ids, our shape."""
        response, error = output.response, output.error
        status = int(response.status_code) if response is not None else 500
        if isinstance(error, str):
            if entry["handler_getter"]() is None:
                failure = self._unsupported("The model does not support this endpoint")
            else:
                # The only other string is of stream mode (vLLM 0.30–0.33, run_batch.run_request).
                failure = Failure(kind_of_status(status), error)
            answered = http_error(failure, type_="BadRequestError", code=status)
        else:
            info = error["error"] if isinstance(error, dict) else error.error
            told = info if isinstance(info, dict) else info.model_dump()
            failure = Failure(kind_of_status(status), str(told["message"]))
            answered = http_error(failure, type_=str(told["type"]), param=told.get("param"), code=status)
        row = {
            "id": output.id,
            "custom_id": output.custom_id,
            "response": {
                "status_code": status,
                "request_id": response.request_id if response is not None else output.id,
                "body": {"error": answered},
            },
            "error": {"code": failure.kind.code, "message": failure.message},
        }
        return Reply(to_json(row, inf_nan_mode="null"), failure.kind)


def default_inflight(vllm_config: Any) -> int:
    """Apply vLLM's rule for run-batch: twice what it runs at once, so that a request waits for each that ends.

    vLLM 0.33, run_batch.run_batch: `2 * max_num_seqs * data_parallel_size`; its lower bound is 1024 where ours is 256,
    because here each request in flight is also a message in hand.
    """
    seqs = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.data_parallel_size
    return max(MIN_INFLIGHT, 2 * int(seqs))


def explain_unreadable(exc: Exception) -> str:
    """Say what is wrong with a line that vLLM's request types refuse, without a value of it.

    Validators echo their input, all of it and once for each member of a union. Fields and reasons are enough.
    """
    if isinstance(exc, ValidationError):
        errors = exc.errors(include_input=False, include_url=False, include_context=False)
        reasons = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors[:MAX_REASONS]]
        more = f"; and {len(errors) - MAX_REASONS} more" if len(errors) > MAX_REASONS else ""
        return "; ".join(cut(reason, MAX_REASON_BYTES) for reason in reasons) + more
    parameter = getattr(exc, "parameter", None)
    if parameter is not None or type(exc).__module__.startswith("vllm."):
        # Not str(exc): that adds the refused value (vLLM 0.30–0.33, exceptions.py).
        reason = cut(str(exc.args[0]) if exc.args else type(exc).__name__, MAX_REASON_BYTES)
        return f"body.{parameter}: {reason}" if parameter else reason
    return f"The body is not a request of this endpoint ({type(exc).__name__})."


def _refused(request: Request, failure: Failure) -> Reply:
    """Write the row of a request that no handler of vLLM's saw."""
    answered = http_error(failure, type_="BadRequestError")
    return Reply(failed_row(custom_id_of(request.line), failure, answered=answered), failure.kind)


def _succeeded(output: Any) -> Reply:
    """Pass on vLLM's own row, byte for byte.

    pydantic writes null for NaN and infinity (its `ser_json_inf_nan`), so the row is strict JSON.
    """
    row: bytes = output.model_dump_json().encode("utf-8")
    if not row.endswith(SUCCESS_END):
        raise ValueError("a row of vLLM's does not end as rows that succeeded do")
    usage = getattr(output.response.body, "usage", None)
    return Reply(
        row,
        prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
        completion_tokens=getattr(usage, "completion_tokens", None) or 0,
    )


def _was_aborted(output: Any) -> bool:
    choices = getattr(output.response.body, "choices", None) or ()
    return any(getattr(choice, "finish_reason", None) == "abort" for choice in choices)


def _url(key: str) -> str:
    """Return the url of a registry's key, as a user writes it (vLLM 0.33 has it in the entry, 0.32 in a function)."""
    prefix = {"completions": "/v1/chat/", "transcriptions": "/v1/audio/", "translations": "/v1/audio/"}
    return prefix.get(key, "/v1/") + key
