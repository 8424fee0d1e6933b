"""datatrove's inference runner against a server that is there.

    python tests/bench/peer_clients/datatrove_endpoint.py IN OUT BASE_URL INFLIGHT

OUT is a folder; datatrove names the file in it. Rows come in the order in which answers do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter


async def roll_out(document, generate):
    answer = await generate(dict(document.metadata["body"]))
    return {"text": answer.text, "finish_reason": answer.finish_reason, "usage": answer.usage}


def main(source: str, output: str, base_url: str, inflight: str) -> None:
    requests = [json.loads(line) for line in Path(source).read_text().splitlines()]
    documents = [
        Document(text=request["body"]["messages"][-1]["content"], id=request["custom_id"], metadata=request)
        for request in requests
    ]
    config = InferenceConfig(
        server_type="endpoint",
        endpoint_url=base_url,
        model_name_or_path=requests[0]["body"]["model"],
        max_concurrent_generations=int(inflight),
    )
    writer = JsonlWriter(output, output_filename="${rank}.jsonl", compression=None)
    LocalPipelineExecutor(
        [documents, InferenceRunner(roll_out, config, writer)], tasks=1, logging_dir=f"{output}.logs"
    ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
