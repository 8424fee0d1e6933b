"""The whole product on a real engine: the command line, a local fleet, vLLM's own batch runner as the yardstick."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.engines import run_batch
from tests.rows import parse_row, same_row
from tests.servers import wait_until
from tests.vllm_flags import FLAGS

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

    from tests.servers import Workplace

pytestmark = pytest.mark.timeout(400)

#: Loading the engine takes 15 s here, more beside other tests.
LOAD_S = 150.0


def chat(custom_id: str, text: str, model: str = "test-model", **body: object) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def features() -> list[str]:
    """What else a chat may ask for, one each."""
    parameters = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 8}}, "required": ["word"]}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]
    schema = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    asked: dict[str, dict[str, object]] = {
        "logprobs": {"logprobs": True, "top_logprobs": 3},
        "n": {"n": 3, "seed": 5, "temperature": 1},
        "seed": {"seed": 7, "temperature": 1.2},
        "schema": {"response_format": form, "max_tokens": 60},
        "choice": {"structured_outputs": {"choice": ["red", "blue"]}},
        "template": {"chat_template_kwargs": {"enable_thinking": False}},
        "tool": {"tools": tools, "tool_choice": "required", "max_tokens": 60},
        "named-tool": {"tools": tools, "tool_choice": tools[0] | {"function": {"name": "look_up"}}, "max_tokens": 60},
        "free-tool": {"tools": tools},
        "stop": {"stop": [" "], "include_stop_str_in_output": True},
    }
    return [chat(name, "Name one colour.", **body) for name, body in asked.items()]


def test_rows_through_the_fleet_are_those_of_run_batch(workplace: Workplace, model_folder: str) -> None:
    """74 chats, float32, fixed seeds: equal but for ids and times. Faulty requests among them harm no neighbour."""
    flags = (*FLAGS, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    good = [*(chat(f"c{number}", f"Name {number + 2} animals.") for number in range(64)), *features()]
    bad = [
        chat("unknown-model", "hello", model="another"),
        chat("streamed", "hello", stream=True),
        chat("too-long", "word " * 2000),
        chat("bad-parameter", "hello", temperature=-3),
    ]
    mixed = [*good[:16], bad[0], bad[1], *good[16:48], bad[2], *good[48:], bad[3]]
    source = workplace.write("in.jsonl", mixed)
    output = workplace.folder / "out.jsonl"

    theirs = run_batch(workplace.folder, good, model_folder, flags)
    result = workplace.producer(
        *("submit", str(source), "-o", str(output), "--local", "--model", model_folder, "--", *flags),
        timeout_s=240,
    )

    assert result.code == 3, result.stderr
    rows = output.read_bytes().splitlines()
    parsed = [parse_row(row) for row in rows]
    assert [row["custom_id"] for row in parsed] == [json.loads(line)["custom_id"] for line in mixed]
    succeeded = [row for row, value in zip(rows, parsed, strict=True) if value["error"] is None]
    assert len(succeeded) == len(theirs) == len(good)
    assert all(parse_row(row)["error"] is None for row in theirs)
    pairs = zip(succeeded, theirs, strict=True)
    assert [parse_row(one)["custom_id"] for one, other in pairs if not same_row(one, other, tolerance=1e-4)] == []
    failed = {value["custom_id"]: value for value in parsed if value["error"] is not None}
    assert {name: value["response"]["status_code"] for name, value in failed.items()} == {
        "unknown-model": 404,
        "streamed": 400,
        "too-long": 400,
        "bad-parameter": 400,
    }
    assert all(value["response"]["body"]["error"]["message"] for value in failed.values())


def engine_of(workplace: Workplace) -> list[psutil.Process]:
    """The engine's own processes."""
    return workplace.alive("Engine")


def test_ctrl_c_ends_the_engine_too(workplace: Workplace, model_folder: str, tmp_path: Path) -> None:
    """An interrupted local run leaves no engine process; the fixture looks for every other kind of process."""
    source = workplace.write("in.jsonl", [chat(f"c{k}", "Count.", max_tokens=900, ignore_eos=True) for k in range(64)])
    producer = workplace.start_producer(
        *("submit", str(source), "-o", str(tmp_path / "out"), "--local", "--model", model_folder, "--", *FLAGS)
    )
    wait_until(lambda: (tmp_path / "out").exists() and engine_of(workplace), LOAD_S, "the engine is loaded")

    producer.send(signal.SIGINT)

    assert producer.wait(60).code == 130
    assert not engine_of(workplace)


def test_an_engine_that_cannot_start_is_one_sentence(workplace: Workplace, model_folder: str, tmp_path: Path) -> None:
    """Exit 2, the reason in one line, an existing output as it was, and no batch left behind."""
    source = workplace.write("in.jsonl", [chat("c", "hello")])
    output = tmp_path / "out.jsonl"
    output.write_text("before\n")

    result = workplace.producer(
        *("submit", str(source), "-o", str(output), "--local", "--model", model_folder),
        *("--", *FLAGS, "--max-model-len", "99999999"),
        timeout_s=LOAD_S,
    )

    assert result.code == 2, result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "max_model_len" in error or "model length" in error
    assert "Traceback" not in result.stderr
    assert output.read_text() == "before\n"
    assert not list((workplace.state / "batch-fleet" / "batches").glob("*"))
