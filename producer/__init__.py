"""The producer: from a file of requests to a file of rows.

`from producer import submit, Batch` is its Python interface; see `producer.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer.api import Batch, submit

__all__ = ["Batch", "submit"]


def __getattr__(name: str) -> Any:
    """Load the interface when it is asked for: the command line must not wait for it, nor its first Ctrl-C."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from producer import api  # noqa: PLC0415 - see above

    return getattr(api, name)
