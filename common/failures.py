"""Failures: the closed list of reasons for which a request's row is not an answer.

Owns: `FailureKind` and `Failure`. A failure is a value: it ends up in a result row and is never raised across a
module. One table answers every question about a kind: its stable code, whether another try may help, and the HTTP
status that stands for it. Operators count by code; users read the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

#: Bytes of UTF-8 that a failure's message may have. Validators echo their input; a row must not.
MAX_MESSAGE_BYTES = 16 * 1024

_CUT = " … (cut)"


class FailureKind(Enum):
    """Why a request failed: `(code, retryable, HTTP status)`.

    `retryable` says that the same request may succeed on another try, so that a worker may try again before it
    records the failure. A 4xx is never retryable: the request itself is at fault.
    """

    INVALID_REQUEST = ("invalid_request", False, 400)
    UNSUPPORTED_ENDPOINT = ("unsupported_endpoint", False, 400)
    MODEL_NOT_FOUND = ("model_not_found", False, 404)
    REQUEST_REFUSED = ("request_refused", False, 403)
    MEDIA_REFUSED = ("media_refused", False, 400)
    MEDIA_UNAVAILABLE = ("media_unavailable", False, 422)
    MEDIA_DOWNLOAD = ("media_download", True, 502)
    ENGINE_OVERLOADED = ("engine_overloaded", True, 503)
    ENGINE_ERROR = ("engine_error", True, 500)
    ENGINE_ABORTED = ("engine_aborted", True, 500)
    INTERNAL_ERROR = ("internal_error", False, 500)
    TIMEOUT = ("timeout", False, 408)
    CANCELLED = ("cancelled", False, 499)
    EXPIRED = ("expired", False, 408)
    WORKERS_LOST = ("workers_lost", False, 500)

    def __init__(self, code: str, retryable: bool, status: int) -> None:
        self.code = code
        self.retryable = retryable
        self.status = status


def kind_of_status(status: int) -> FailureKind:
    """The kind that an HTTP status of an engine stands for. Statuses below 400 are a programming error."""
    if status < 400:
        raise ValueError(f"status {status} is not a failure")
    if status == 404:
        return FailureKind.MODEL_NOT_FOUND
    if status in (429, 503):
        return FailureKind.ENGINE_OVERLOADED
    if status in (400, 422):
        return FailureKind.INVALID_REQUEST
    if status == 501:  # not implemented: another try finds the same code
        return FailureKind.UNSUPPORTED_ENDPOINT
    if status < 500:
        return FailureKind.REQUEST_REFUSED
    return FailureKind.ENGINE_ERROR


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure: its kind and a sentence for the user, cut to `MAX_MESSAGE_BYTES`."""

    kind: FailureKind
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", cut(self.message))


def cut(message: str, limit_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """`message`, at most `limit_bytes` long in UTF-8, never ending inside a character."""
    raw = message.encode("utf-8", "replace")
    if len(raw) <= limit_bytes:
        return raw.decode("utf-8")
    keep = limit_bytes - len(_CUT.encode())
    return raw[:keep].decode("utf-8", "ignore") + _CUT
