"""The script that many people write for a file of requests: the `openai` package against a server that they started.

    python tests/bench/peer_clients/openai_script.py IN OUT BASE_URL INFLIGHT

It writes a row as soon as its answer is there, in the order in which answers come.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TextIO

from openai import AsyncOpenAI


async def answer_all(lines: list[str], file: TextIO, base_url: str, inflight: int) -> None:
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none")
    slots = asyncio.Semaphore(inflight)

    async def ask(line: str) -> None:
        request = json.loads(line)
        body = request["body"]
        async with slots:
            # What only vLLM knows, as `min_tokens`, the package takes in `extra_body`; all may go there.
            answer = await client.chat.completions.create(
                model=body["model"], messages=body["messages"], extra_body=body
            )
        file.write(json.dumps({"custom_id": request["custom_id"], "response": answer.model_dump()}) + "\n")

    await asyncio.gather(*(ask(line) for line in lines))


def main(source: str, output: str, base_url: str, inflight: str) -> None:
    lines = Path(source).read_text().splitlines()
    with Path(output).open("w", buffering=1) as file:
        asyncio.run(answer_all(lines, file, base_url, int(inflight)))


if __name__ == "__main__":
    main(*sys.argv[1:])
