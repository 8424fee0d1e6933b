"""The log: one event per line, in one form whoever wrote it, and no secret in it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from workers.logs import bound, make_formatter, redact


class Lines:
    """A logger of the standard library whose lines are kept."""

    def __init__(self, kind: str, *, terminal: bool = False) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(make_formatter(kind, terminal=terminal))
        self.logger = logging.getLogger("fleet.test")
        self.logger.setLevel(logging.DEBUG)
        self.logger.propagate = False
        self.logger.handlers = [self.handler]

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def lines() -> Lines:
    return Lines("auto")


def test_a_line_off_a_terminal_is_one_json_object(lines: Lines) -> None:
    lines.logger.warning("sealed %d rows,\nall of them", 3)

    (event,) = lines.events
    assert event.pop("timestamp").endswith("Z")
    assert event == {"level": "warning", "logger": "fleet.test", "event": "sealed 3 rows,\nall of them"}


def test_ids_of_the_work_at_hand_are_on_every_line(lines: Lines) -> None:
    with bound(batch_id="b", shard=2):
        lines.logger.info("inside")
    lines.logger.info("given", extra={"batch_id": "c", "index": 7})
    lines.logger.info("outside")

    inside, given, outside = lines.events
    assert (inside["batch_id"], inside["shard"]) == ("b", 2)
    assert (given["batch_id"], given["index"]) == ("c", 7)
    assert "batch_id" not in outside


def test_what_celery_passes_along_is_left_out(lines: Lines) -> None:
    lines.logger.info("task succeeded", extra={"data": {"args": "a prompt"}, "args_": "a prompt"})

    assert "a prompt" not in lines.text


def test_a_traceback_is_one_line_without_variables(lines: Lines) -> None:
    prompt = "my secret prompt"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        lines.logger.exception("failed")

    (event,) = lines.events
    assert "ValueError: 16" in event["exception"]
    assert prompt not in lines.text


def test_a_traceback_on_a_terminal_has_no_variables_either() -> None:
    lines = Lines("auto", terminal=True)
    prompt = "my-secret-prompt"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        lines.logger.exception("failed")

    assert "ValueError: 16" in lines.text
    assert "my-secret-prompt" not in lines.text


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("Connected to redis://user:pa55@host:6379/0", "Connected to redis://**@host:6379/0"),
        ("rediss://:pa55@host", "rediss://**@host"),
        (
            "GET https://b.s3.amazonaws.com/k?X-Amz-Signature=abc&X-Amz-Credential=d failed",
            "GET https://b.s3.amazonaws.com/k?** failed",
        ),
        ("('https://h/p?sig=abc',)", "('https://h/p?**',)"),
        ("Authorization: Bearer abc.def", "Authorization: **"),
        ("{'Authorization': 'Basic YWJj'}", "{'Authorization': '**'}"),
        ("uses bearer abcdefghij", "uses bearer **"),
        (
            "non-default args: {'api_key': 'k1', 'max_tokens': 16}",
            "non-default args: {'api_key': '**', 'max_tokens': 16}",
        ),
        ("hf_token=hf_abcdefghijklmnopqrst done", "hf_token=** done"),
        ("hf_abcdefghijklmnopqrst", "hf_**"),
        ("AWS_SECRET_ACCESS_KEY=abc/def+", "AWS_SECRET_ACCESS_KEY=**"),
        ("password: pa55", "password: **"),
        ("token=None, prompt_tokens=5, tokens: 7, is it so?", "token=None, prompt_tokens=5, tokens: 7, is it so?"),
        (
            "https://h/p and redis+socket:///tmp/x?virtual_host=0",
            "https://h/p and redis+socket:///tmp/x?virtual_host=0",
        ),
    ],
)
def test_secrets_and_query_strings_are_taken_out(said: str, written: str) -> None:
    assert redact(said) == written


def test_a_secret_in_an_exception_is_taken_out(lines: Lines) -> None:
    try:
        raise ConnectionError("cannot reach redis://:pa55@host")
    except ConnectionError:
        lines.logger.exception("failed")

    assert "pa55" not in lines.text
    assert "redis://**@host" in lines.text


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_text_cannot_change_the_terminal_that_shows_it(kind: str) -> None:
    lines = Lines(kind)

    lines.logger.info("model %s", "\x1b[2Jcleared")

    assert "\x1b" not in lines.text
    assert "cleared" in lines.text


@pytest.mark.parametrize("kind", ["json", "text"])
@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_no_name_breaks_a_line_in_a_c_locale(kind: str, locale: dict[str, str]) -> None:
    code = (
        "import logging, workers.logs as logs; logs.configure_logging('INFO');"
        "logging.getLogger('x').info('mod\\xe8le \\u6a21\\u578b %s', chr(0xdc80))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PATH": "", "FLEET_LOG_FORMAT": kind, **locale},
        capture_output=True,
        check=True,
        timeout=30,
    )

    assert done.stderr.count(b"\n") == 1
    assert b"mod" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_command_of_celery_with_a_closed_stderr_logs_nowhere() -> None:
    code = "import logging, workers.logs; workers.logs.configure_logging(); logging.warning('unheard')"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, code], capture_output=True, timeout=30, check=False
    )

    assert (done.returncode, done.stdout) == (0, b"")
