"""What processes of the fleet write to stderr: one event per line, JSON off a terminal, `key=value` on one.

Owns: the format, the fields, and what is taken out of every line: passwords, tokens, query strings of URLs.
Must not know: who logs. Modules use the standard library's `logging`; Celery's, vLLM's and Python's own warnings come
out in the same form. `bound` adds the ids of what is being worked on to every line that is written meanwhile.
On failure: nothing here raises for what it is given to write; what is not ASCII is escaped where a terminal needs it.

vLLM's engine processes set up the same (`workers.engine.tie`), so a line of theirs can be read by the same reader.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import structlog
from structlog.contextvars import bind_contextvars as bind
from structlog.contextvars import bound_contextvars as bound

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import TextIO

    Event = MutableMapping[str, Any]

__all__ = ["FORMAT_ENV", "bind", "bound", "configure_logging", "make_formatter", "redact"]

#: `auto`, `json` or `text`; `WorkerSettings.log_format`. Read here as well, since engine processes have no settings.
FORMAT_ENV = "FLEET_LOG_FORMAT"

#: Fields that a line may carry besides its text. A list, since Celery passes tasks' arguments along (`extra`).
FIELDS = ("batch_id", "run", "shard", "index", "custom_id", "queue", "count")

#: What comes first in a line, in this order.
_FIRST = ("timestamp", "level", "logger", "event", *FIELDS)

_REDACTIONS = (
    # A URL's user and password; with a user alone it may be a token.
    (re.compile(r"(?<=://)[^\s/@'\"]*@"), "**@"),
    # A URL's query: presigned URLs carry their signature there.
    (re.compile(r"(\b(?:https?|s3)://[^\s?'\"<>]*)\?[^\s'\"<>]+", re.IGNORECASE), r"\1?**"),
    (re.compile(r"\b(authorization['\"]?\s*[:=]\s*['\"]?)(?:(?:bearer|basic)\s+)?[^\s'\",}]+", re.IGNORECASE), r"\1**"),
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE), r"\1**"),
    (
        re.compile(
            r"\b((?:api[-_]?key|hf[-_]token|token|password|passwd|secret|(?:aws_)?secret_access_key|aws_session_token)"
            r"['\"]?\s*[:=]\s*['\"]?)(?!None\b)[^\s'\",}\]]+",
            re.IGNORECASE,
        ),
        r"\1**",
    ),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_**"),
)

#: Characters by which a text could change the terminal that shows it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def redact(text: str) -> str:
    """The text without secrets."""
    for pattern, instead in _REDACTIONS:
        text = pattern.sub(instead, text)
    return text


def configure_logging(loglevel: int | str = logging.INFO, stream: TextIO | None = None, **_: Any) -> None:
    """Log to stderr. Replaces Celery's set-up, which would take vLLM's handlers over.

    Celery logs two lines per request at INFO, one of them with the result; they are raised to WARNING.
    """
    level = logging.getLevelNamesMapping()[loglevel] if isinstance(loglevel, str) else loglevel
    stream = stream or sys.stderr
    root = logging.getLogger()
    if not root.handlers:
        # Celery's own command may run with stderr closed; ours have another one by then (`common.standard`).
        terminal = stream is not None and stream.isatty()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(make_formatter(os.environ.get(FORMAT_ENV, ""), terminal=terminal))
        root.addHandler(handler)
        logging.captureWarnings(capture=True)
    root.setLevel(level)
    logging.getLogger("celery.worker.consumer.consumer").addFilter(_WITHOUT_BODY)
    for name in ("celery.worker.strategy", "celery.app.trace", "kombu"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _WithoutBody(logging.Filter):
    """Celery quotes whole messages that it cannot use, prompts and all (celery 5.7, worker/consumer/consumer.py)."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the first line of such a record: what is wrong, not with what."""
        if "body" in str(record.msg):
            record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True


_WITHOUT_BODY = _WithoutBody()


def make_formatter(kind: str, *, terminal: bool) -> logging.Formatter:
    """The formatter of one handler: `kind` is `json`, `text`, or anything else for what suits the stream."""
    as_text = kind == "text" or (kind != "json" and terminal)
    render: Any = (
        structlog.dev.ConsoleRenderer(
            colors=terminal,
            sort_keys=False,
            # The other formatters show the variables of every frame, prompts among them.
            exception_formatter=structlog.dev.plain_traceback,
        )
        if as_text
        else structlog.processors.JSONRenderer()
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ExtraAdder(allow=FIELDS),
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[
            _add_process,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _clean,
            render,
        ],
    )


def _add_process(_logger: object, _method: str, event: Event) -> Event:
    """Name the process, where it is not the worker itself but one of its engine's."""
    record: logging.LogRecord = event["_record"]
    if record.processName not in {None, "MainProcess"}:
        event["process"] = record.processName
    return event


def _clean(_logger: object, _method: str, event: Event) -> Event:
    """Take secrets and control characters out of every value, and put the fields in order."""
    ordered = [name for name in _FIRST if name in event] + [name for name in event if name not in _FIRST]
    return {name: _cleaned(event[name]) for name in ordered}


def _cleaned(value: object) -> object:
    if isinstance(value, (int, float, bool)) or value is None:
        return value
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", redact(str(value)))
