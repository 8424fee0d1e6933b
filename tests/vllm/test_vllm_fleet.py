"""The whole product on a real engine: the command line, a local fleet, vLLM's own batch runner as the yardstick."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

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


def test_rows_through_the_fleet_are_those_of_run_batch(workplace: Workplace, model_folder: str) -> None:
    """64 chats, float32, greedy: equal but for ids and times. Faulty requests among them harm no neighbour."""
    good = [chat(f"c{number}", f"Name {number + 2} animals.") for number in range(64)]
    bad = [
        chat("unknown-model", "hello", model="another"),
        chat("streamed", "hello", stream=True),
        chat("too-long", "word " * 2000),
        chat("bad-parameter", "hello", temperature=-3),
    ]
    mixed = [*good[:16], bad[0], bad[1], *good[16:48], bad[2], *good[48:], bad[3]]
    source = workplace.write("in.jsonl", mixed)
    yardstick = workplace.write("yardstick.jsonl", good)
    target, output = workplace.folder / "run-batch.jsonl", workplace.folder / "out.jsonl"

    runner = [sys.executable, "-m", "vllm.entrypoints.launchers.run_batch", "-i", str(yardstick), "-o", str(target)]
    done = subprocess.run(
        [*runner, "--model", model_folder, *FLAGS], check=False, capture_output=True, text=True, timeout=240
    )
    result = workplace.producer(
        *("submit", str(source), "-o", str(output), "--local", "--model", model_folder, "--", *FLAGS),
        timeout_s=240,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert result.code == 3, result.stderr
    rows = output.read_bytes().splitlines()
    parsed = [parse_row(row) for row in rows]
    assert [row["custom_id"] for row in parsed] == [json.loads(line)["custom_id"] for line in mixed]
    succeeded = [row for row, value in zip(rows, parsed, strict=True) if value["error"] is None]
    theirs = target.read_bytes().splitlines()
    assert len(succeeded) == len(theirs) == 64
    assert [number for number in range(64) if not same_row(succeeded[number], theirs[number])] == []
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
    return [process for process in workplace.alive() if "Engine" in process.name()]


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
