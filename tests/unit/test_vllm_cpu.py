"""What vLLM needs on a CPU: memory, cores, and a user's own choice of both."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import EngineStartError
from workers.engine.vllm_cpu import GIB, KV_MAX_BYTES, KV_MIN_BYTES, available_bytes, fit_cpu, kv_cache_bytes


def cpu_args(**given: Any) -> argparse.Namespace:
    values = {
        "kv_cache_memory_bytes": None,
        "fleet_sized": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_lora": False,
        "lora_modules": None,
        "max_loras": 1,
    }
    return argparse.Namespace(**values | given)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 cores with 8 GiB free."""
    monkeypatch.setattr("workers.engine.vllm_cpu.available_bytes", lambda: 8 * GIB)
    monkeypatch.setattr("workers.engine.vllm_cpu.cores", lambda: 8)


@pytest.mark.usefixtures("machine")
def test_engines_on_one_host_share_its_memory_and_cores() -> None:
    alone: dict[str, str] = {}
    shared = {"FLEET_WORKERS_ON_HOST": "2"}
    one, half = cpu_args(), cpu_args()
    fit_cpu(one, alone)
    fit_cpu(half, shared)
    assert (one.kv_cache_memory_bytes, half.kv_cache_memory_bytes) == (GIB, GIB // 2)
    assert (alone["OMP_NUM_THREADS"], shared["OMP_NUM_THREADS"]) == ("8", "4")
    assert alone["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"kv_cache_memory_bytes": 7}, {}),
        ({"fleet_sized": True}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
    ],
)
def test_a_users_memory_stays(given: dict[str, Any], environ: dict[str, str]) -> None:
    args = cpu_args(**given)
    fit_cpu(args, environ)
    assert args.kv_cache_memory_bytes == given.get("kv_cache_memory_bytes")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {}),
        ({"data_parallel_size": 2}, {}),
        ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
        ({}, {"VLLM_CPU_OMP_THREADS_BIND": "0,1"}),
    ],
)
def test_a_users_processes_and_threads_stay(given: dict[str, Any], environ: dict[str, str]) -> None:
    before = dict(environ)
    fit_cpu(cpu_args(**given), environ)
    assert environ == before


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("enabled", "modules", "slots", "chosen"),
    [(True, 1, 1, 2), (True, 3, 2, 4), (True, 2, 8, 8), (True, 0, 1, 1), (False, 1, 1, 1)],
)
def test_one_slot_for_adapters_stays_empty(enabled: bool, modules: int, slots: int, chosen: int) -> None:
    """vllm-project/vllm#48421: on a CPU requests without an adapter get the last slot's."""
    args = cpu_args(enable_lora=enabled, lora_modules=["m"] * modules or None, max_loras=slots)
    fit_cpu(args, {})
    assert args.max_loras == chosen


def test_a_kv_cache_has_bounds() -> None:
    assert kv_cache_bytes(1000 * GIB, 1) == KV_MAX_BYTES
    assert kv_cache_bytes(0, 1) == KV_MIN_BYTES


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_senseless_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(EngineStartError, match="FLEET_WORKERS_ON_HOST"):
        fit_cpu(cpu_args(), {"FLEET_WORKERS_ON_HOST": text})


def test_memory_is_counted_as_vllm_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "vllm.utils.cpu_resource_utils": SimpleNamespace(
            get_memory_node_info=lambda node: SimpleNamespace(available_memory=3 * GIB)
        ),
        "psutil": SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=8 * GIB)),
    }
    monkeypatch.setattr("workers.engine.vllm_cpu.import_module", modules.__getitem__)
    assert available_bytes() == 3 * GIB
    modules["vllm.utils.cpu_resource_utils"] = SimpleNamespace()
    assert available_bytes() == 8 * GIB
