"""What processes of the fleet write to stderr."""

from __future__ import annotations

import logging
import sys
from typing import Any


def configure_logging(loglevel: int | str = logging.INFO, **_: Any) -> None:
    """Log to stderr, one line per event. Replaces Celery's set-up, which would take vLLM's handlers over.

    Celery logs two lines per request at INFO, one of them with the result; they are raised to WARNING.
    """
    level = logging.getLevelNamesMapping()[loglevel] if isinstance(loglevel, str) else loglevel
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(level)
    for name in ("celery.worker.strategy", "celery.app.trace", "kombu"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
