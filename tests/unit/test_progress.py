"""What a waiting producer shows: rates, times and plain lines."""

from __future__ import annotations

import io

import pytest

from producer.progress import RATE_WINDOW_S, Progress, Rates, counted, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(number, "shard") for number in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [counted(number, "batch") for number in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]


def test_a_rate_needs_two_samples() -> None:
    rates = Rates()
    assert rates.per_second() == (0.0, 0.0)

    rates.add(10.0, 5, 50)
    assert rates.per_second() == (0.0, 0.0)

    rates.add(12.0, 9, 150)
    assert rates.per_second() == (2.0, 50.0)


def test_two_samples_of_one_moment_are_no_rate() -> None:
    rates = Rates()
    rates.add(10.0, 5, 50)
    rates.add(10.0, 9, 150)

    assert rates.per_second() == (0.0, 0.0)


def test_rates_forget_what_is_long_ago() -> None:
    rates = Rates()
    rates.add(0.0, 0, 0)
    for second in range(100, 200):
        rates.add(float(second), (second - 99) * 3, 0)

    requests_s, _ = rates.per_second()

    assert requests_s == pytest.approx(3.0)
    assert len(rates._samples) <= RATE_WINDOW_S + 2


def test_a_batch_that_stands_still_comes_to_a_rate_of_zero() -> None:
    rates = Rates()
    for second in range(100):
        rates.add(float(second), min(second, 10), 0)

    assert rates.per_second()[0] == 0.0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"), (9.34, "9.3 s"), (59.94, "59.9 s"), (59.99, "1:00"), (60, "1:00"), (245.9, "4:05"),
        (3599, "59:59"), (3600, "1:00:00"), (3723, "1:02:03"), (90061, "25:01:01"),
    ],
)  # fmt: skip
def test_a_duration_reads_as_people_write_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_without_a_terminal_lines_are_plain() -> None:
    stream = io.StringIO()

    with Progress(stream) as progress:
        progress.say("batch_1: 40 requests")
        progress.update(done=10, total=40, failed=1, tokens=100)
        progress.update(done=11, total=40, failed=1, tokens=110)

    lines = stream.getvalue().splitlines()
    assert lines[0] == "batch_1: 40 requests"
    # The second update comes too soon for a line of its own.
    assert [line.split(",")[0] for line in lines[1:]] == ["10/40 done"]
    assert "1 failed" in lines[1]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_note_is_repeated_only_when_its_words_change() -> None:
    stream = io.StringIO()

    with Progress(stream) as progress:
        for text in (
            "loading (1 s)",
            "loading (2 s)",
            "",
            "validating (5 lines)",
            "validating (9 lines)",
            "loading (3 s)",
        ):
            progress.note(text)

    assert stream.getvalue().splitlines() == ["loading (1 s)", "validating (5 lines)", "loading (3 s)"]


def test_nothing_done_prints_nothing() -> None:
    stream = io.StringIO()

    with Progress(stream) as progress:
        progress.update(done=0, total=40, failed=0, tokens=0)

    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_the_counts() -> None:
    stream = Terminal()

    with Progress(stream) as progress:
        progress.say("a [bold]literal[/bold] line")
        progress.note("waiting for [red]it[/red]")
        progress.update(done=7, total=40, failed=2, tokens=70)

    shown = stream.getvalue()
    assert "[bold]literal[/bold]" in shown
    assert "7/40" in shown
    assert "2 failed" in shown


def test_progress_can_be_left_by_an_exception() -> None:
    stream = Terminal()

    with pytest.raises(KeyError), Progress(stream):
        raise KeyError

    assert stream.getvalue().endswith("\x1b[?25h") or "\x1b[?25l" not in stream.getvalue()


def test_progress_goes_to_the_stderr_of_its_moment(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(plain=True).say("now")

    assert capsys.readouterr().err == "now\n"
