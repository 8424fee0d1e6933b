"""The split of GPUs among local workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from producer.devices import split, visible_gpus

if TYPE_CHECKING:
    from pathlib import Path


def test_one_worker_sees_what_vllm_would_see() -> None:
    assert split(1, ["0", "1"], []) == [({}, [])]


def test_without_a_gpu_nothing_is_set() -> None:
    assert split(2, [], []) == [({}, [])] * 2


def test_as_many_workers_as_gpus_get_one_each() -> None:
    assert split(2, ["0", "1"], []) == [({"CUDA_VISIBLE_DEVICES": "0"}, []), ({"CUDA_VISIBLE_DEVICES": "1"}, [])]


def test_workers_that_share_a_gpu_share_its_memory() -> None:
    assert split(2, ["3"], []) == [({"CUDA_VISIBLE_DEVICES": "3"}, ["--gpu-memory-utilization", "0.45"])] * 2


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization=0.3", "--kv-cache-memory-bytes"])
def test_what_the_user_said_about_memory_stays(flag: str) -> None:
    assert split(2, ["0"], [flag]) == [({"CUDA_VISIBLE_DEVICES": "0"}, [])] * 2


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "2"], ["-tp", "2"], ["--tensor_parallel_size=2"]])
def test_an_engine_over_two_gpus_gets_two(flags: list[str]) -> None:
    found = [variables["CUDA_VISIBLE_DEVICES"] for variables, _ in split(2, ["0", "1", "2", "3"], flags)]

    assert found == ["0,1", "2,3"]


def test_gpus_are_those_of_the_variable_else_those_of_the_machine(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, 5"}, tmp_path) == ["4", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({}, tmp_path) == ["0", "2", "10"]
