"""Ray Data LLM: a Ray of its own, one engine inside it, CPU-only placement where there is no GPU.

    python tests/bench/peer_clients/ray_data_llm.py IN OUT MODEL ENGINE_KWARGS TEMPORARY_FOLDER

OUT is a folder; Ray Data names the files in it. ENGINE_KWARGS is a JSON object, as `AsyncEngineArgs` takes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

#: Requests of a batch. Eight batches are in an engine at once, by default.
BATCH = 64


def asked(row):
    body = dict(row["body"])
    return {
        "custom_id": row["custom_id"],
        "messages": body["messages"],
        "sampling_params": {name: body[name] for name in ("max_tokens", "min_tokens", "temperature")},
    }


def answered(row):
    return {"custom_id": row["custom_id"], "text": row["generated_text"], "tokens": row["num_generated_tokens"]}


def main(source: str, output: str, model: str, engine_kwargs: str, folder: str) -> None:
    # Every stage is an actor that reserves a CPU for itself, the engine's too: more of them than there are cores.
    context = ray.init(num_cpus=8, include_dashboard=False, _temp_dir=folder)
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=json.loads(engine_kwargs),
        batch_size=BATCH,
        # The engine does both: two actors less.
        tokenize_stage=False,
        detokenize_stage=False,
        # vLLM's own figures for Ray's metrics page need `ray[serve]`, whose packages nothing else here does.
        log_engine_metrics=False,
        placement_group_config=None if ray.cluster_resources().get("GPU") else {"bundles": [{"CPU": 1}]},
    )
    process = build_processor(config, preprocess=asked, postprocess=answered)
    requests = [json.loads(line) for line in Path(source).read_text().splitlines()]
    process(ray.data.from_items(requests, override_num_blocks=max(1, len(requests) // BATCH))).write_json(output)
    context.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
