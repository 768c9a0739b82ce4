"""Which form of a kernel a call uses, and what is said about it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from hf_mp.kernels import registry
from hf_mp.kernels.cross_entropy import cross_entropy
from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.kernels.registry import kernel_for, unavailable_reason


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    registry._warn_once.cache_clear()
    registry._matches_reference_on.cache_clear()


@pytest.mark.parametrize("setting", [None, "auto", "reference"])
def test_a_cpu_uses_the_reference_without_a_word(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting is not None:
        monkeypatch.setenv(registry.VARIABLE, setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_for("gradient_scan", [torch.ones(3)]) is None


def test_asked_for_on_a_cpu_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv(registry.VARIABLE, "triton")
    message = "HF_MP_KERNELS=triton: the reference of gradient_scan is used, because the device is cpu, not a CUDA GPU"
    with pytest.warns(UserWarning, match=message):
        assert largest_magnitude([torch.tensor([-3.0])]) == 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_magnitude([torch.tensor([-3.0])]) == 3.0
    with pytest.warns(UserWarning, match="the reference of cross_entropy is used"):
        cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="HF_MP_KERNELS='cuda' is not known"):
        kernel_for("adamw", [torch.ones(3)])


class Odd(torch.Tensor):
    pass


READS = "it reads contiguous FP32, FP16 and BF16 tensors of one device, and one is a"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([torch.ones(3), torch.ones(3, device="meta")], f"{READS} Tensor of .*, on meta"),
        ([torch.ones(4, 2).t()], rf"{READS} Tensor of shape \(2, 4\), .*"),
        ([torch.ones(3, dtype=torch.float64)], f"{READS} Tensor of .*, torch.float64, .*"),
        ([torch.ones(3).as_subclass(Odd)], f"{READS} Odd of .*"),
        ([torch.eye(3).to_sparse()], f"{READS} Tensor of .*, torch.sparse_coo, on cpu"),
        ([nn.Parameter(torch.ones(3))], "the device is cpu, not a CUDA GPU"),
        ([torch.ones(())], "the device is cpu, not a CUDA GPU"),
    ],
    ids=["mixed devices", "not contiguous", "fp64", "subclass", "sparse", "parameter", "no dimension"],
)
def test_what_a_kernel_cannot_read_is_named(tensors: Any, reason: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert re.fullmatch(reason, str(unavailable_reason(tensors)))


def _two(what: str, found: float) -> list[registry.Pair]:
    nan = torch.tensor(math.nan)
    return [
        registry.Pair("the norm", nan, nan, 0.0),
        registry.Pair(what, torch.tensor(found), torch.tensor(0.0), 0.0),
    ]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (Mock(return_value=_two("the norm of odd", 2.0)), "odd is not used on cpu: the norm of odd differs"),
        (Mock(return_value=_two("the norm of odd", math.nan)), "odd is not used on cpu: the norm of odd differs"),
        (Mock(side_effect=RuntimeError("no PTX")), "not used on cpu: it failed with RuntimeError: no PTX"),
        (Mock(side_effect=ModuleNotFoundError("triton")), "it failed with ModuleNotFoundError: triton"),
    ],
    ids=["differs", "NaN", "fails", "no Triton"],
)
def test_a_kernel_that_is_wrong_here_is_not_used(pairs: Mock, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "module_of", lambda name: SimpleNamespace(pairs=pairs))
    with pytest.warns(UserWarning, match=message):
        assert not registry._matches_reference_on("odd", torch.device("cpu"))


def test_a_kernel_that_is_right_here_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = Mock(return_value=_two("the norm", 0.0))
    monkeypatch.setattr(registry, "module_of", lambda name: SimpleNamespace(pairs=pairs))
    assert all(registry._matches_reference_on("odd", torch.device("cpu")) for _ in range(2))
    assert pairs.call_count == 1


def test_a_dtensor_is_named_and_nothing_imports_triton_before_it_is_used() -> None:
    script = """
import sys, torch, torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
import hf_mp.kernels.adamw, hf_mp.kernels.cross_entropy, hf_mp.kernels.gradient_scan
from hf_mp.kernels.registry import unavailable_reason
hf_mp.kernels.gradient_scan.largest_magnitude([torch.ones(3)])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(unavailable_reason([distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Replicate()])]))
dist.destroy_process_group()
print(sorted(name for name in sys.modules if name.startswith("hf_mp.kernels.triton")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "and one is a DTensor" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stderr
