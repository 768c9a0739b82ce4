"""The advised preset, for machines that are planted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from hf_mp import PrecisionPolicy
from hf_mp.environment import report
from hf_mp.environment.report import advise_here


@pytest.fixture
def machine(monkeypatch):
    """Plants GPUs by name and compute capability, and what the CPU multiplies."""

    def plant(gpus=(), hip=None, bf16=(), cpu=(), tiles=()):
        current: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index][1])
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(current.append(index)))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpus[current[-1]][0] in bf16)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(report, "runs_natively", lambda dtype, device_type: dtype in cpu)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(tiles, True))

    return plant


A100, T4, PASCAL = ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5)), ("GTX 1080", (6, 1))
FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("planted", "preset", "reason", "otherwise"),
    [
        (
            {"gpus": [A100], "bf16": ["NVIDIA A100"]},
            "bf16",
            "NVIDIA A100 multiplies BF16, which needs no",
            "fp16 if the",
        ),
        ({"gpus": [T4], "cpu": [BF16]}, "fp16", "Tesla T4 multiplies FP16, but not BF16", "fp32 if the model was"),
        ({"gpus": [A100, T4], "bf16": ["NVIDIA A100"]}, "fp16", "Tesla T4 multiplies FP16", "fp16-lean if memory"),
        ({"gpus": [PASCAL]}, "fp32", "GTX 1080 multiplies neither FP16 nor BF16", "fp16 if memory is short"),
        ({"gpus": [("MI300", (9, 4))], "hip": "6", "bf16": ["MI300"]}, "bf16", "MI300 multiplies BF16", "bf16-lean"),
        ({"gpus": [("MI25", (9, 0))], "hip": "6"}, "fp16", "MI25 multiplies FP16, but not BF16", "fp16-lean"),
        ({"cpu": [BF16]}, "bf16", "This CPU multiplies BF16", "higher loss"),
        ({"cpu": [FP16, BF16]}, "bf16", "This CPU multiplies BF16", "bf16-lean"),
        ({"cpu": [FP16, BF16], "tiles": ["amx_bf16"]}, "bf16", "FP16 takes it as long as FP32", "bf16-lean"),
        ({"cpu": [BF16], "tiles": ["amx_bf16"]}, "bf16", "no loss scale.", "bf16-lean"),
        ({"cpu": [FP16, BF16], "tiles": ["amx_bf16", "amx_fp16"]}, "bf16", "no loss scale.", "bf16-lean"),
        ({"cpu": [FP16]}, "fp16", "This CPU multiplies FP16, but not BF16", "fp16-lean"),
        ({}, "fp32", "This CPU multiplies neither FP16 nor BF16", "fp16 if memory is short"),
    ],
)
def test_the_least_capable_gpu_or_else_the_cpu_decides(machine, planted, preset, reason, otherwise):
    machine(**planted)
    advice = advise_here()
    assert advice["preset"] == preset and reason in advice["reason"] and otherwise in advice["otherwise"]
    PrecisionPolicy.parse(advice["preset"])
