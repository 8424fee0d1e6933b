"""What vLLM needs on a CPU: its part of a machine that it would take whole.

Owns: sizes and environment variables of CPU engines. Must not know: requests, the fleet.
On failure: nonsense in the environment is an `EngineStartError`.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING

from common.errors import EngineStartError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, MutableMapping

log = logging.getLogger(__name__)

#: How many engines share this machine's cores and memory. Read on CPU only; a GPU is nobody else's.
WORKERS_ENV = "FLEET_WORKERS_ON_HOST"

GIB = 1024**3

#: The KV cache of a CPU engine that nobody sized: this part of its share of the free memory, within these bounds.
#: The rest is for the weights and for what else runs here, and every GiB makes the start some seconds longer.
KV_SHARE = 1 / 8
KV_MIN_BYTES, KV_MAX_BYTES = GIB // 8, 4 * GIB


def fit_cpu(args: Namespace, environ: MutableMapping[str, str]) -> None:
    """Make the CPU engine fit this machine: memory, processes, threads. What a user said stays.

    Measured with vLLM 0.32: by itself it takes 92 % of the memory, so that no second engine starts beside it; and one
    process that computes with all threads starts 5 s sooner than its engine plus worker, and computes as fast.
    vLLM reads these variables when it builds its configuration and starts its processes, not at import (vLLM 0.32,
    envs.py and platforms/cpu.py).
    """
    workers = workers_on_host(environ)
    said = []
    if not (args.kv_cache_memory_bytes or args.fleet_sized or environ.get("VLLM_CPU_KVCACHE_SPACE")):
        args.kv_cache_memory_bytes = kv_cache_bytes(available_bytes(), workers)
        said.append(f"--kv-cache-memory-bytes {args.kv_cache_memory_bytes}")
    parallel = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size > 1
    chosen = environ.keys() & {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"}
    if not parallel and not chosen:
        # Without it the executor is a process more, which binds itself to all cores but one (vLLM 0.32,
        # platforms/cpu.py). With it vLLM leaves the threads to OMP_NUM_THREADS.
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // workers)))
        said.append(f"VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}")
    adapters = len(args.lora_modules or ()) if args.enable_lora else 0
    if adapters and args.max_loras <= adapters:
        # Its kernels for the CPU read "no adapter" (-1) as the last slot, so beside a request for an adapter one for
        # the model itself would get that slot's (vLLM 0.32, lora/ops/torch_ops; vllm-project/vllm#48421). Slots are
        # filled from the first, and an empty one adds nothing.
        args.max_loras = adapters + 1
        said.append(f"--max-loras {args.max_loras}")
    if said:
        log.info("vLLM on CPU, 1 of %d on this host: chose %s", workers, " ".join(said))


def workers_on_host(environ: Mapping[str, str]) -> int:
    """How many engines share this host. Raises `EngineStartError` for nonsense."""
    text = environ.get(WORKERS_ENV) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise EngineStartError(f"{WORKERS_ENV} must be a positive number, not {text!r}.")
    return int(text)


def kv_cache_bytes(available: int, workers: int) -> int:
    """Size the KV cache of one of `workers` CPU engines that share `available` bytes."""
    return max(KV_MIN_BYTES, min(KV_MAX_BYTES, int(available / workers * KV_SHARE)))


def available_bytes() -> int:
    """Memory that an engine can still take, by vLLM's reckoning: the memory node's, within the container's limit.

    vLLM refuses a KV cache that is larger (vLLM 0.32, v1/worker/cpu_worker.py), also where the machine has more.
    """
    try:
        node = import_module("vllm.utils.cpu_resource_utils").get_memory_node_info(0)
        return int(node.available_memory)
    except (ImportError, AttributeError):  # run with vLLM 0.32 alone: it may lie elsewhere in others
        return int(import_module("psutil").virtual_memory().available)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
