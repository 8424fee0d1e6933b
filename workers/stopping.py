"""Celery's worker, with nothing on its streams that is no line of the log.

Owns: `LoggingWorker`. Must not know: what a worker does when it stops.
On failure: nothing of its own. Where Celery changes what is overridden here, its own lines come back, and
`tests/integration/test_pool.py` fails.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from celery.apps import worker as celery_worker
from celery.exceptions import SecurityWarning
from celery.platforms import EX_FAILURE, EX_OK
from celery.worker import state

logger = logging.getLogger("fleet.worker")


def without_warning_of_root() -> None:
    """Keep Celery from warning of root, in seven bare lines before anything is logged.

    What it fears is pickle in messages (celery 5.7, platforms.py, `check_privileges`), and the fleet takes JSON only.
    """
    warnings.filterwarnings("ignore", category=SecurityWarning)


class LoggingWorker(celery_worker.Worker):  # type: ignore[misc]  # Celery has no types
    """A worker that logs that it was told to stop. Celery writes `worker: Warm shutdown` to stdout instead."""

    def install_platform_tweaks(self, worker: Any) -> None:
        """Install Celery's handlers of signals, those of SIGTERM and SIGINT without that line (celery 5.7)."""
        super().install_platform_tweaks(worker)
        celery_worker.install_worker_term_handler(worker, verbose=False)
        celery_worker.install_worker_int_handler(worker, verbose=False)

    def stop(self, in_sighandler: bool = False, exitcode: int | None = None) -> None:  # noqa: FBT002 - Celery's
        """Stop, as Celery does. Not in the signal's handler, which may have come in the middle of a line."""
        if state.should_stop is not None and state.should_stop in (EX_OK, EX_FAILURE):
            logger.info("told to stop")
        super().stop(in_sighandler=in_sighandler, exitcode=exitcode)
