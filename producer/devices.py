"""Which GPUs each of several local workers gets.

Owns: the split of a machine's GPUs among worker processes, and the share of memory where they must share one.
Must not know: processes, vLLM's code. (What a CPU engine needs is decided where it starts, `workers.engine.vllm_cpu`.)

    2 workers, 2 GPUs: one each.   2 workers, 1 GPU: both on it, 45 % of its memory each.
    2 workers, 4 GPUs, --tensor-parallel-size 2: the first two, the last two.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: vLLM's flags that decide how many GPUs one engine takes.
_PARALLEL = re.compile(r"(?:--(?:tensor|pipeline|data)[-_]parallel[-_]size|-tp|-pp|-dp)")
_MEMORY = re.compile(r"--(?:gpu[-_]memory[-_]utilization|kv[-_]cache[-_]memory[-_]bytes)")

#: The part of a GPU's memory that engines may take together.
_USABLE = 0.9


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return sorted((match.group(1) for match in numbers if match), key=int)


def split(workers: int, gpus: Sequence[str], engine_args: Sequence[str]) -> list[tuple[dict[str, str], list[str]]]:
    """For each worker the variables to set and the engine flags to add.

    One worker sees everything, as `vllm serve` would. What the user said about memory stays.
    """
    if workers == 1 or not gpus:
        return [({}, [])] * workers
    wanted = max(1, _parallel_size(engine_args))
    groups = [list(gpus[at : at + wanted]) for at in range(0, len(gpus) - wanted + 1, wanted)] or [list(gpus)]
    shared = -(-workers // len(groups))
    flags = []
    if shared > 1 and not any(_MEMORY.match(argument) for argument in engine_args):
        flags = ["--gpu-memory-utilization", f"{_USABLE / shared:.2f}"]
    return [({"CUDA_VISIBLE_DEVICES": ",".join(groups[number % len(groups)])}, flags) for number in range(workers)]


def _parallel_size(engine_args: Sequence[str]) -> int:
    """GPUs of one engine: the product of its parallel sizes."""
    size = 1
    for position, argument in enumerate(engine_args):
        name, equals, value = argument.partition("=")
        if _PARALLEL.fullmatch(name) is None:
            continue
        text = value if equals else "".join(engine_args[position + 1 : position + 2])
        size *= int(text) if text.isdecimal() else 1
    return size


def for_workers(workers: int, engine_args: Sequence[str]) -> list[tuple[dict[str, str], list[str]]]:
    """`split` for this machine."""
    return split(workers, visible_gpus(os.environ), engine_args)
