"""What the tests of real engines share: an engine on a loop of its own, as in the worker, and vLLM's batch runner."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from common.batch import SUCCESS_END, custom_id_of
from common.failures import MAX_MESSAGE_BYTES
from tests.rows import parse_row, same_row
from workers.engine import Request

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from pathlib import Path

    from workers.engine import Reply
    from workers.engine.vllm import VllmEngine


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 60) -> Any:
        """Run a coroutine on the loop and return its result; the time limit cancels it."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, timeout_s), self.loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def served(loop: LoopThread, folder: str, flags: Sequence[str]) -> Iterator[VllmEngine]:
    """A started engine, stopped at the end; the body of a fixture."""
    from workers.engine.vllm import VllmEngine

    before = dict(os.environ)
    engine = VllmEngine(folder, flags)
    loop.run(engine.start(), timeout_s=180)
    yield engine
    loop.run(engine.stop())
    os.environ.clear()
    os.environ.update(before)


def ask_all(engine: VllmEngine, loop: LoopThread, lines: Sequence[str]) -> list[Reply]:
    """Answer lines, all at once; every reply is checked against what is promised of every row."""

    async def together() -> list[Reply]:
        return await asyncio.gather(*(engine.run(Request(line)) for line in lines))

    replies: list[Reply] = loop.run(together(), timeout_s=120)
    for line, reply in zip(lines, replies, strict=True):
        check_row(line, reply)
    return replies


def check_row(line: str, reply: Reply) -> None:
    """Hold a reply to what is promised of every row of vLLM's."""
    row = parse_row(reply.row)
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert b"\n" not in reply.row
    assert row["id"].startswith("vllm-")
    assert row["custom_id"] == custom_id_of(line)
    assert row["response"]["request_id"].startswith("vllm-batch-")
    assert reply.row.endswith(SUCCESS_END) == (reply.failure is None)
    if reply.failure is None:
        assert row["response"]["status_code"] == 200
        return
    assert row["error"]["code"] == reply.failure.code
    answered = row["response"]["body"]["error"]
    assert answered.keys() == {"message", "type", "param", "code"}
    assert answered["code"] == row["response"]["status_code"] >= 400
    assert answered["message"] == row["error"]["message"]
    assert len(answered["message"].encode()) <= MAX_MESSAGE_BYTES


def line(url: str, custom_id: str = "a", **body: Any) -> str:
    """A request of the model that the tests serve."""
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "test-model"} | body}
    return json.dumps(fields)


def body_of(reply: Reply) -> dict[str, Any]:
    """What the endpoint answered; fails for a failed row."""
    assert reply.failure is None, reply.row[:2000]
    body: dict[str, Any] = parse_row(reply.row)["response"]["body"]
    return body


def failure_of(reply: Reply) -> str:
    """The message of a failed row."""
    return str(parse_row(reply.row)["error"]["message"])


def expect_case(folder: Path, case: str, replies: Sequence[Reply]) -> None:
    """Hold the rows of a replayed report to what tests/cases says of it."""
    (expected,) = json.loads((folder / "expected.json").read_text(encoding="utf-8"))[case]
    found = [[parse_row(reply.row)["custom_id"], "ok" if reply.failure is None else "err"] for reply in replies]
    assert [custom_id for custom_id, _ in found] == [custom_id for custom_id, _ in expected["rows"]]
    wrong = [row for row, (_, wanted) in zip(found, expected["rows"], strict=True) if wanted not in ("any", row[1])]
    assert wrong == []


def case_lines(folder: Path, case: str) -> list[str]:
    """The requests of a replayed report."""
    return [text for text in (folder / f"{case}.jsonl").read_text(encoding="utf-8").split("\n") if text.strip()]


def run_batch(folder: Path, lines: Sequence[str], model: str, flags: Sequence[str]) -> list[bytes]:
    """The rows that vLLM's own batch runner makes of these lines, in a process of its own."""
    source, target = folder / "run-batch.in.jsonl", folder / "run-batch.out.jsonl"
    source.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    runner = [sys.executable, "-m", "vllm.entrypoints.launchers.run_batch", "-i", str(source), "-o", str(target)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [*runner, "--model", model, *flags], check=False, capture_output=True, text=True, timeout=240, env=environ
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return target.read_bytes().splitlines()


def differing(ours: Sequence[Reply], theirs: Sequence[bytes], tolerance: float = 0.0) -> list[str]:
    """Ids of the requests whose rows are not the same answer; see `same_row`."""
    assert len(ours) == len(theirs)
    pairs = [(reply.row, row) for reply, row in zip(ours, theirs, strict=True)]
    return [str(parse_row(one)["custom_id"]) for one, other in pairs if not same_row(one, other, tolerance=tolerance)]
