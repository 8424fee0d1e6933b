"""What an exception of vLLM's says to a user, in one sentence: of a start that failed, of a line that is refused.

Owns: those sentences. Must not know: who asks. They hold no value of a request: validators echo what they refuse.
On failure: an exception that says nothing is named by its type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from common.failures import cut

if TYPE_CHECKING:
    from pathlib import Path

#: What one line's validation may say: a union of message types answers one typing error with a dozen of its own.
MAX_REASONS = 5
MAX_REASON_BYTES = 300

#: Longest reason in the sentence of a failed start.
MAX_START_REASON_BYTES = 1000

#: What besides vLLM's own exceptions a bad line raises in vLLM's validators (see the module's docstring).
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def start_sentence(exc: Exception, reason_file: Path) -> str:
    """Say in one sentence why the engine did not start: by the engine's own process, if it said why."""
    try:
        reason = reason_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = first_line(exc)
    return f"vLLM did not start: {cut(reason.rstrip('.'), MAX_START_REASON_BYTES)}."


def first_line(exc: Exception) -> str:
    """Return the first line of an exception's message, without its full stop."""
    text = str(exc)
    if isinstance(exc, ValidationError):
        # vLLM's configurations are pydantic's too; their str() begins with a count.
        text = exc.errors(include_input=False, include_url=False)[0]["msg"].removeprefix("Value error, ")
    elif isinstance(exc, KeyError) and exc.args:
        text = str(exc.args[0])  # str() of a KeyError is a repr
    lines = text.strip().splitlines() or [type(exc).__name__]
    return lines[0].rstrip(".")


def flags_sentence(reason: str) -> str:
    """Say in one sentence why vLLM refused its own flags."""
    return f"vLLM does not take these flags: {cut(reason.rstrip('.'), MAX_START_REASON_BYTES)}."


def explain_unreadable(exc: Exception) -> str:
    """Say what is wrong with a line that vLLM's request types refuse, without a value of it.

    Validators echo their input, all of it and once for each member of a union. Fields and reasons are enough.
    """
    if isinstance(exc, ValidationError):
        errors = exc.errors(include_input=False, include_url=False, include_context=False)
        reasons = [f"{_place(error['loc'])}: {error['msg']}" for error in errors[:MAX_REASONS]]
        more = f"; and {len(errors) - MAX_REASONS} more" if len(errors) > MAX_REASONS else ""
        return "; ".join(cut(reason, MAX_REASON_BYTES) for reason in reasons) + more
    parameter = getattr(exc, "parameter", None)
    if parameter is not None or type(exc).__module__.startswith("vllm."):
        # Not str(exc): that adds the refused value (vLLM 0.30–0.33, exceptions.py).
        reason = cut(str(exc.args[0]) if exc.args else type(exc).__name__, MAX_REASON_BYTES)
        return f"body.{parameter}: {reason}" if parameter else reason
    return f"The body is not a request of this endpoint ({type(exc).__name__})."


def _place(loc: tuple[int | str, ...]) -> str:
    """Name a field as the user wrote it, without the validator functions that pydantic names inside a union."""
    return ".".join(str(part) for part in loc if not str(part).startswith("function-"))
