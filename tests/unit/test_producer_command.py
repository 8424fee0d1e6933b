"""What the command `producer` says of a command line that it cannot use, before it does anything."""

from __future__ import annotations

import pytest

from producer.cli import build_parser, main


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command line that is refused as such."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("24h", 86_400), ("7d", 604_800)])
def test_a_time_is_a_number_and_its_unit(text: str, seconds: int) -> None:
    parser = build_parser()

    assert parser.parse_args(["purge", "--older-than", text]).older_than == seconds
    assert parser.parse_args(["submit", "in.jsonl", "--expires", text]).expires == seconds


@pytest.mark.parametrize("command", [("purge", "--older-than"), ("submit", "in.jsonl", "--expires")])
def test_a_time_without_a_unit_is_refused(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    """Seven days that are taken for seven seconds remove every closed batch."""
    said = refusal(capsys, *command, "7")

    assert "'7' has no unit: say 7s, 7m, 7h or 7d" in said


@pytest.mark.parametrize("text", ["0", "0s", "-1d", "1w", "1.5h", "d", "", "٧d"])
def test_what_is_no_time_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "is no time: say 90s, 30m, 24h or 7d, at least 1s" in refusal(capsys, "purge", f"--older-than={text}")
