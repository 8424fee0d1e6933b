"""What runs inside the engine's own processes: they end with their worker, and only with their worker.

Owns: the `vllm.general_plugins` entry point `fleet`, which vLLM calls in every process that it starts (vLLM 0.32,
plugins/__init__.py). Must not know: engines, Celery, Redis; it imports nothing but the standard library, because it is
imported in processes that are not ours, and `workers.logs` in one that is.
On failure: it falls back to the weaker tie; it never stops an engine start.

Two faults of a bare engine make this needed (both measured with vLLM 0.32):

- SIGKILL of the worker leaves the engine's processes on the GPU; the restart then finds no memory.
- They are in the worker's process group: Ctrl-C reaches them too, and they answer with rows that look successful
  (status 200, `finish_reason` "abort", the text cut short).

So each of them takes a session of its own (the *shield*) and dies when its parent does (the *tie*). After the shield
`killpg` of the worker's group no longer reaches the engine; the tie is then the only thing that ends it.

It also carries the reason of a failed start to the worker: vLLM's parent process learns only that the engine's
process ended ("See root cause above"; vLLM 0.32, v1/engine/utils.py), and an operator should read it in one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import MutableMapping

#: The entry point's name, for VLLM_PLUGINS.
PLUGIN = "fleet"

#: Set to "1" by a worker. Without it the plugin does nothing: it is installed for every user of vLLM in the venv.
WORKER_ENV = "FLEET_WORKER"

#: Names the file that takes the reason of a failed start.
REASON_ENV = "FLEET_ENGINE_REASON_FILE"

#: At "0" vLLM leaves its log to whoever embeds it (vLLM 0.30–0.33, logger.py).
LOGS_ENV = "VLLM_CONFIGURE_LOGGING"

#: vLLM's loggers that report a failed start, with the exception, as "… failed to start." (vLLM 0.30–0.33,
#: v1/engine/core.py and v1/executor/multiproc_executor.py).
_START_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Parent(Protocol):
    """What `multiprocessing.parent_process()` gives."""

    @property
    def pid(self) -> int | None:
        """The parent's process id."""

    def join(self, timeout: float | None = None) -> None:
        """Return when the parent is gone, however it died."""


def register() -> None:
    """Tie this process to its worker: the entry point. Does nothing but in a child of a worker's; may run twice."""
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(WORKER_ENV) != "1":
        return
    shield()
    if not tie_by_kernel(parent):
        tie_by_thread(parent)
    if os.environ.get(LOGS_ENV) == "0":
        # vLLM was told to leave its log to us; in this process nobody else sets one up.
        from workers.logs import configure_logging  # noqa: PLC0415 - only an engine's process needs it

        configure_logging(os.environ.get("VLLM_LOGGING_LEVEL") or logging.INFO)
    if path := os.environ.get(REASON_ENV):
        keep_start_failure(path)


def allow_plugin(environ: MutableMapping[str, str]) -> None:
    """Name our plugin in a user's VLLM_PLUGINS.

    The variable is an allow-list that is split at commas (vLLM 0.32, envs.py): a user who sets it for a plugin of
    their own would lose the tie without noticing. Unset means that all plugins load, so then it stays unset.
    """
    if "VLLM_PLUGINS" not in environ:
        return
    allowed = [name for name in environ["VLLM_PLUGINS"].split(",") if name]
    if PLUGIN not in allowed:
        environ["VLLM_PLUGINS"] = ",".join([*allowed, PLUGIN])


def shield() -> None:
    """Leave the worker's session and process group, so that signals to the group reach the worker alone."""
    # PermissionError: this process leads its group already, so nobody else's signals reach it.
    with contextlib.suppress(PermissionError):
        os.setsid()


def tie_by_kernel(parent: Parent) -> bool:
    """Have the kernel kill this process when its parent dies. False where there is no such call (not Linux).

    The kernel follows the parent's *thread* that started this process: a worker starts its engine on the thread of
    its event loop, which lives until the worker exits.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return False
    # prctl takes unsigned longs after the option; plain ints would leave the upper half of a register undefined.
    if prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0))) != 0:
        return False
    if os.getppid() != parent.pid:
        # The parent died before the call, and the kernel will not tell again.
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def tie_by_thread(parent: Parent) -> None:
    """Kill this process when its parent is gone, by a thread that waits for it."""

    def follow() -> None:
        parent.join()
        # Not sys.exit or SIGTERM: vLLM would answer its requests with "abort" rows to a worker that is no more.
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="fleet-tie", daemon=True).start()


def keep_start_failure(path: str) -> None:
    """Write the reason to `path` when vLLM reports in this process that it failed to start."""
    for name in _START_LOGGERS:
        # On these loggers and not on "vllm": vLLM configures that one again later, which drops its handlers.
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _ReasonHandler) for handler in logger.handlers):
            logger.addHandler(_ReasonHandler(path))


class _ReasonHandler(logging.Handler):
    """Keeps the first line of the exception of the first "failed to start" record of all processes."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        exc = record.exc_info[1] if record.exc_info else None
        # Later errors of a running engine could name parts of a request: only the start is kept.
        if exc is None or not record.getMessage().endswith("failed to start."):
            return
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        # "x": a worker process of the engine reports before the engine that waits for it; the first is the cause.
        with contextlib.suppress(OSError), Path(self._path).open("x", encoding="utf-8") as file:
            file.write(lines[0])
