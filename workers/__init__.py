"""The workers of the fleet: GPU workers that hold an engine, and the aggregator.

`celery -A workers …` finds the app here. It is made on first use, so that importing a module of this package (vLLM's
engine process imports `workers.engine.tie`) neither reads settings nor imports Celery.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The Celery app under the second name that `celery -A` looks for; `workers.app` is the module."""
    if name == "celery":
        from workers.app import app  # noqa: PLC0415 - see the module's docstring

        return app
    raise AttributeError(name)
