"""vLLM as an engine: its own flags, its own batch handlers, its own rows.

Owns: the life of an engine, from its environment to its processes' end. vLLM is imported once an engine starts, so that
the rest of the product runs where there is no vLLM. Must not know: Celery, Redis, the store; versions of vLLM
(`vllm_doors`), requests and rows (`vllm_serving`, `vllm_rows`), what a CPU needs (`vllm_cpu`).
On failure: a start that fails is an `EngineStartError` with one sentence; vLLM's own log says more. A dead engine is
an `EngineDeadError`, an answer cut short an `EngineAbortedError`; every other failure is a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common import garbage, tracing
from common.errors import EngineDeadError, EngineStartError
from workers.engine import tie
from workers.engine.download import Downloader
from workers.engine.media import Media, MediaRules, domains_of
from workers.engine.vllm_cpu import fit_cpu
from workers.engine.vllm_doors import Vllm
from workers.engine.vllm_endpoints import build_endpoints
from workers.engine.vllm_reasons import start_sentence
from workers.engine.vllm_serving import MIN_INFLIGHT, Serving, Watched

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence

    from workers.engine import Reply, Request

log = logging.getLogger(__name__)

#: The only host that vLLM itself may fetch from. The top-level domain is reserved for names that do not exist.
NO_HOST = "the-fleet-fetches-for-vllm.invalid"

#: Longest path of the folder for temporary files that leaves room for an engine's sockets below it.
MAX_SCRATCH_BASE = 40


class VllmEngine:
    """The engine of `workers.engine.Engine` that serves a model by vLLM.

    `engine_args` are vLLM's own flags, as `vllm serve MODEL …` takes them; MODEL is not among them. `media` says what
    may be fetched for a request; vLLM's flags for that win over it.

    `start` sets environment variables of this process, because the engine's processes inherit them, and blocks its
    event loop while vLLM is imported (5 s) and the engine built: it belongs on a thread of its own.
    """

    name = "vllm"

    def __init__(self, model: str, engine_args: Sequence[str], media: MediaRules | None = None) -> None:
        self.models: tuple[str, ...] = ()
        self.endpoints: tuple[str, ...] = ()
        self.default_inflight = MIN_INFLIGHT
        self._model = model
        self._engine_args = tuple(engine_args)
        self._media = media or MediaRules()
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
            async with open_engine(vllm, self._model, self._engine_args, self._media) as self._serving:
                self.models = self._serving.models
                self.endpoints = self._serving.urls
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
            garbage.collect()  # vLLM's engine client is part of cycles; see `start` for what it does at the exit


def _refuse_stopped(ready: asyncio.Future[None]) -> None:
    """Tell a waiting `start` that its engine ended without a word: it was cancelled, perhaps before its first step."""
    if not ready.done():
        ready.set_exception(EngineStartError("The engine was stopped while it started."))


# -- starting ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_engine(vllm: Vllm, model: str, engine_args: Sequence[str], media: MediaRules) -> AsyncIterator[Serving]:
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
            # Ours; vLLM's processes would begin to trace by it, in another protocol, and wait for it at their end.
            # With `--otlp-traces-endpoint` vLLM sets it itself.
            starting.enter_context(_hidden(tracing.ENGINE_ENDPOINT))
            if "VLLM_RPC_BASE_PATH" not in os.environ:
                # vLLM leaves its sockets where they were when it ends (vLLM 0.32, utils/network_utils.py).
                starting.enter_context(_variable("VLLM_RPC_BASE_PATH", str(scratch)))
            try:
                serving = await _start_serving(vllm, model, engine_args, media, stack)
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


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Take a variable out of this process' environment for a while; what is set there meanwhile goes with it."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


async def _start_serving(
    vllm: Vllm, model: str, engine_args: Sequence[str], media: MediaRules, stack: contextlib.AsyncExitStack
) -> Serving:
    args = vllm.parse(model, engine_args)
    media = take_over_media(args, media)
    if vllm.is_cpu():
        fit_cpu(args, os.environ)
    engine = Watched(await stack.enter_async_context(vllm.build_engine(args)))
    endpoints = await build_endpoints(vllm, engine, args)
    return Serving(vllm, engine, endpoints, served_models(args), media=Media(media, Downloader(media)))


def take_over_media(args: Namespace, rules: MediaRules) -> MediaRules:
    """Have vLLM fetch nothing by itself, and return the rules by which it is done for it.

    vLLM's flags mean what they mean in vLLM, and win. What it is left with is a list of one host that cannot exist: it
    is the second wall, should a request's URL have been overlooked. `data:` URLs are not held to the list (vLLM 0.30,
    0.32 and 0.33, multimodal/media/connector.py and entrypoints/launchers/run_batch.py).

    Raises `EngineStartError` for a flag that names no host.
    """
    if named := args.allowed_media_domains:
        try:
            rules = replace(rules, domains=domains_of(named))
        except ValueError as exc:
            raise EngineStartError(f"vLLM does not take these flags: --allowed-media-domains: {exc}.") from exc
    args.allowed_media_domains = [NO_HOST]
    return replace(rules, local_files=bool(args.allowed_local_media_path))


def refuse_missing_folder(model: str) -> None:
    """Refuse a path that is not there: vLLM would take it for a name on the Hugging Face hub."""
    if model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise EngineStartError(f"There is no model folder {model}.")


def prepare_environment(model: str, environ: MutableMapping[str, str]) -> None:
    """Set what vLLM, or what it imports, reads from the environment at import; a user's own values stay."""
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not environ.keys() & {tie.LOGS_ENV, "VLLM_LOGGING_CONFIG_PATH"}:
        # Its lines come out as ours do: redacted, and as JSON off a terminal. Its processes set that up themselves.
        environ[tie.LOGS_ENV] = "0"
        environ.setdefault("VLLM_LOGGING_LEVEL", logging.getLevelName(logging.getLogger().getEffectiveLevel()))
        logging.getLogger("vllm").setLevel(environ["VLLM_LOGGING_LEVEL"].upper())
    if Path(model).is_dir():
        # The model is here; without this the hub is asked for files that it may lack, and that takes its time-outs.
        environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    environ.setdefault(tie.WORKER_ENV, "1")
    tie.allow_plugin(environ)


def served_models(args: Namespace) -> tuple[str, ...]:
    """Names under which requests may address the model and its LoRA adapters."""
    served = args.served_model_name or args.model
    names = [served] if isinstance(served, str) else list(served)
    names += [module.name for module in getattr(args, "lora_modules", None) or []]
    return tuple(names)
