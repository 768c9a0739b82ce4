"""Models that Transformers makes tensor parallel (``DistributedConfig``), on two processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel_worker
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hf_mp

pytestmark = pytest.mark.slow
Results = list[dict[str, Any]]
has_doors = pytest.mark.skipif(not tensor_parallel_worker.HAS_DOORS, reason="Transformers is too old")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor_parallel")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return {case.__name__: case(str(folder)) for case in tensor_parallel_worker.ONE_PROCESS}


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], folder: Path, one: dict[str, Any]) -> Results:
    return launch("tensor_parallel_worker.py", folder)


def test_two_processes_train_as_one(one: dict[str, Any], two: Results) -> None:
    for rank in two:
        found, expected = rank["losses"], one["losses"]
        assert found["skipped"] == 0 and expected["loss"][-1] < 0.97 * expected["loss"][0]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["norm"] == pytest.approx(expected["norm"], rel=5e-3)


@pytest.mark.parametrize(
    ("name", "most"), [("llama", 0.005), ("llama bf16", 0.03), ("qwen3", 0.005), ("loaded in bf16", 0.005),
                       ("recomputed", 0.005)],
)  # fmt: skip
def test_gradients_are_true_and_fp32(one: dict[str, Any], two: Results, name: str, most: float) -> None:
    expected, _ = one["gradients"][name]
    for rank in two:
        found, dtypes = rank["gradients"][name]
        assert dtypes == {"torch.float32"}
        for key, gradient in expected.items():
            assert (found[key] - gradient).norm() / gradient.norm() < most, key


def test_an_overflow_in_one_shard_is_skipped_by_all(two: Results) -> None:
    for rank in two:
        case = rank["overflow"]
        assert case["skipped"] == [True, False]
        assert all(torch.equal(case["before"][name], value) for name, value in case["after"].items())
    assert two[0]["overflow"]["scale"] == two[1]["overflow"]["scale"]


def test_a_mesh_of_one_process() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layers = parallelize_module(
            nn.Sequential(nn.Linear(8, 8)), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()}
        )
        hf_mp.MixedPrecision("fp16").attach(layers)
        first = layers(torch.ones(2, 8)).detach()
        for parameter in layers.parameters():
            parameter.data.mul_(2)
        written = layers(inputs := torch.ones(2, 8, requires_grad=True))
        torch.testing.assert_close(written.detach(), 2 * first, atol=1e-2, rtol=1e-2)
        written.sum().backward()  # also where FP16 products are computed in FP32, and save their inputs in FP16
        gradient = layers[0].weight.grad
        assert gradient is not None and torch.equal(gradient.full_tensor(), torch.full((8, 8), 2.0))
        torch.testing.assert_close(inputs.grad, layers[0].weight.full_tensor().sum(0).expand(2, 8), atol=1e-2, rtol=0.0)
    finally:
        dist.destroy_process_group()


@has_doors
@pytest.mark.parametrize("door", ["trainer", "callback", "accelerate"])
def test_front_doors_train_as_one_process(one: dict[str, Any], two: Results, door: str) -> None:
    expected = one["front_doors"][door]
    assert len(expected["loss"]) == 5 and expected["loss"][-1] < 0.97 * expected["loss"][0]
    for rank in two:
        found = rank["front_doors"][door]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["norm"] == pytest.approx(expected["norm"], rel=5e-3)


@has_doors
def test_the_trainer_saves_a_whole_model(folder: Path, two: Results) -> None:
    saved = load_file(folder / "doors" / "checkpoint-5" / "model.safetensors")
    for rank in two:
        trained = rank["front_doors"]["trainer"]["trained"]
        assert trained.keys() == saved.keys()
        assert all(torch.equal(saved[name], weight) for name, weight in trained.items())


@has_doors
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("lean", "ValueError: precision='fp16-lean' needs whole weights.*this model is tensor parallel: use 'fp16'"),
        ("lean_callback", r"ValueError: precision='fp16-lean' keeps .*Use MixedPrecisionCallback\('fp16'\)"),
        ("fused", "ValueError: AdamW updates .*DTensors and plain tensors .* optim='adamw_torch'"),
    ],
)
def test_what_cannot_pass_a_front_door_is_refused_by_all(two: Results, case: str, said: str) -> None:
    for rank in two:
        assert re.match(said, rank["refused_doors"][case], flags=re.DOTALL), rank["refused_doors"][case]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("lean", "ValueError: precision='bf16-lean' needs whole weights.*this model is tensor parallel: use 'bf16'"),
        ("with_fsdp", "ValueError: model.* is placed as .*work alone.*leave FSDP2 and other dimensions out"),
        ("two_dimensions", "ValueError: 0.weight is placed as .*work alone, over a mesh of one dimension"),
        (
            "heads_that_ranks_cannot_share",
            "ValueError: ranks=2 cannot share the 3 key and value heads of Llama.*divides",
        ),
        ("layouts_differ", "ValueError: ranks .* rank 0 has .*precision=fp16.*; rank 1 .*precision=bf16.* the same"),
    ],
)
def test_what_cannot_work_is_refused_by_all(two: Results, case: str, said: str) -> None:
    for rank in two:
        assert re.match(said, rank["refusals"][case], flags=re.DOTALL), rank["refusals"][case]
