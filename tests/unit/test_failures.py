"""What a failure tells operators and users: its code, whether another try may help, and a bounded message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.failures import MAX_MESSAGE_BYTES, Failure, FailureKind, cut, kind_of_status


def test_codes_are_stable() -> None:
    """Users and dashboards match on these strings: a change here is a breaking change."""
    assert {kind.code for kind in FailureKind} == {
        "invalid_request",
        "unsupported_endpoint",
        "model_not_found",
        "request_refused",
        "media_refused",
        "media_unavailable",
        "media_download",
        "engine_overloaded",
        "engine_error",
        "engine_aborted",
        "internal_error",
        "timeout",
        "cancelled",
        "expired",
        "workers_lost",
    }


def test_kinds_have_codes_of_their_own() -> None:
    """Two kinds with equal values would become one, silently: Enum makes the second an alias."""
    assert len({kind.code for kind in FailureKind}) == len(FailureKind.__members__)


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_stands_for_an_http_error(kind: FailureKind) -> None:
    """A failed row's status is never one of success."""
    assert 400 <= kind.status <= 599


def test_only_faults_of_the_engine_and_of_other_hosts_are_retryable() -> None:
    """The request itself is at fault in every 4xx: another try costs GPU time and changes nothing."""
    assert {kind for kind in FailureKind if kind.retryable} == {
        FailureKind.MEDIA_DOWNLOAD,
        FailureKind.ENGINE_OVERLOADED,
        FailureKind.ENGINE_ERROR,
        FailureKind.ENGINE_ABORTED,
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FailureKind.INVALID_REQUEST),
        (422, FailureKind.INVALID_REQUEST),
        (401, FailureKind.REQUEST_REFUSED),
        (413, FailureKind.REQUEST_REFUSED),
        (499, FailureKind.REQUEST_REFUSED),
        (404, FailureKind.MODEL_NOT_FOUND),
        (429, FailureKind.ENGINE_OVERLOADED),
        (503, FailureKind.ENGINE_OVERLOADED),
        (500, FailureKind.ENGINE_ERROR),
        (502, FailureKind.ENGINE_ERROR),
        (599, FailureKind.ENGINE_ERROR),
    ],
)
def test_a_status_of_the_engine_has_a_kind(status: int, kind: FailureKind) -> None:
    """Overload is told from refusal, and refusal from an engine that broke."""
    assert kind_of_status(status) is kind


@pytest.mark.parametrize("status", [200, 302, 399, 0])
def test_a_status_that_is_no_error_has_no_kind(status: int) -> None:
    """Asking for it is a fault in our code, not a failure of a request."""
    with pytest.raises(ValueError, match=str(status)):
        kind_of_status(status)


def test_a_short_message_is_kept() -> None:
    """Nothing is added to a message that fits, up to the last byte."""
    message = "é" * (MAX_MESSAGE_BYTES // 2)
    assert Failure(FailureKind.TIMEOUT, message).message == message


def test_a_long_message_is_cut_and_says_so() -> None:
    """A validator that echoes its input cannot make a huge row, and the reader sees that something is missing."""
    message = Failure(FailureKind.INVALID_REQUEST, "z" * (MAX_MESSAGE_BYTES + 1)).message
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    assert message.startswith("zzz")
    assert message.endswith("(cut)")


def test_a_lone_surrogate_in_a_message_does_not_break_the_row() -> None:
    """Exception texts may hold one (a file name, say); it has no UTF-8 form."""
    assert cut("a\ud800b") == "a?b"


@given(st.text(), st.integers(min_value=16, max_value=64))
def test_a_cut_message_is_whole_characters_within_the_limit(message: str, limit_bytes: int) -> None:
    """Whatever the text, the result encodes, fits, and is either the text or a beginning of it."""
    result = cut(message, limit_bytes)
    assert len(result.encode("utf-8")) <= limit_bytes
    if len(message.encode("utf-8")) <= limit_bytes:
        assert result == message
    else:
        assert message.startswith(result.removesuffix(" … (cut)"))
