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


@pytest.mark.parametrize(("command", "what"), [("submit", "INPUT"), ("resume", "BATCH"), ("retry", "BATCH")])
@pytest.mark.parametrize("flag", [["--max-model-len", "100"], ["--max-model-len=100"]])
def test_an_engines_flag_among_ours_is_told_its_place(
    capsys: pytest.CaptureFixture[str], command: str, what: str, flag: list[str]
) -> None:
    """`vllm run-batch` takes them anywhere."""
    said = refusal(capsys, command, "in.jsonl", "--local", "--model", "m", *flag)

    assert said.startswith(f"usage: producer {command} {what} [-o OUTPUT] [options] [-- ENGINE FLAGS]\n")
    assert f"unrecognized arguments: {' '.join(flag)}\n" in said
    assert said.endswith(
        f"after --, with --local: producer {command} {what} --local --model M -- --max-model-len ...\n"
    )


def test_what_no_engine_would_take_is_only_called_unrecognized(capsys: pytest.CaptureFixture[str]) -> None:
    """With the usage of the command that was meant, and nothing of a URL that may be secret."""
    second = refusal(capsys, "submit", "in.jsonl", "https://user:secret@host/in.jsonl?sig=secret")
    other = refusal(capsys, "fetch", "BATCH", "-o", "out.jsonl", "--max-model-len", "100")
    flags = refusal(capsys, "check", "in.jsonl", "--", "--max-model-len", "100")

    assert second.endswith("unrecognized arguments: https://host/in.jsonl\n")
    assert "secret" not in refusal(capsys, "submit", "in.jsonl", "--outptu=https://user:secret@host/o?sig=secret")
    assert other.startswith("usage: producer fetch ")
    assert other.endswith("unrecognized arguments: --max-model-len 100\n")
    assert flags.startswith("usage: producer check ")
    assert "only submit, resume and retry take engine flags" in flags
