"""The advised preset, for machines that are planted."""

from __future__ import annotations

import re

import pytest

from hf_mp import PrecisionPolicy
from hf_mp.environment.advice import Capabilities, advise


def nvidia(name, major, minor):
    return Capabilities(gpu=name, compute_capability=(major, minor), gpu_bf16=major >= 8, cpu_bf16=True)


@pytest.mark.parametrize(
    ("machine", "preset", "reason", "otherwise"),
    [
        (nvidia("NVIDIA H200", 9, 0), "bf16", "multiply BF16 as fast as FP16 .*no loss scale", "fp16 for a model that"),
        (nvidia("NVIDIA A100", 8, 0), "bf16", "multiply BF16 as fast as FP16.*no loss scale", "3 more bits"),
        (nvidia("Tesla T4", 7, 5), "fp16", "Tesla T4 multiply FP16. BF16 is emulated", "fp32 for a model that was"),
        (nvidia("Tesla V100", 7, 0), "fp16", "Tesla V100 multiply FP16", "fp16-lean where memory is short"),
        (nvidia("GTX 1080", 6, 1), "fp32", "GTX 1080 has no tensor cores", "fp16 where memory is short"),
        (Capabilities(gpu="AMD MI300", gpu_bf16=True), "bf16", "BF16 arithmetic for AMD MI300", "bf16-lean"),
        (Capabilities(gpu="AMD MI25", cpu_bf16=True), "fp16", "no BF16 arithmetic for AMD MI25", "fp16-lean"),
        (Capabilities(cpu_bf16=True), "bf16", "instructions that multiply BF16", "hf_mp runs it here at about FP32's"),
        (Capabilities(cpu_bf16=True, cpu_fp16=True), "bf16", "instructions that multiply BF16", "fp16 for a model"),
        (Capabilities(cpu_fp16=True), "fp16", "instructions that multiply FP16, and none for BF16", "fp16-lean"),
        (Capabilities(), "fp32", "no instructions for FP16 and BF16", "fp16 where memory is short"),
    ],
    ids=lambda value: value if value in ("bf16", "fp16", "fp32") else getattr(value, "gpu", ""),
)
def test_advice(machine, preset, reason, otherwise):
    advice = advise(machine)
    assert advice.preset == preset
    assert re.search(reason, advice.reason), advice.reason
    assert otherwise in advice.otherwise
    assert advice.reason.endswith(".") and advice.otherwise.endswith(".")
    PrecisionPolicy.parse(advice.preset)


def test_only_hopper_and_newer_are_told_of_fp8():
    assert "FP8" in advise(nvidia("NVIDIA H200", 9, 0)).reason
    assert "FP8" not in advise(nvidia("NVIDIA A100", 8, 0)).reason


def test_a_cpu_with_fp16_instructions_is_not_told_that_fp16_runs_through_fp32():
    assert "FP32's speed" not in advise(Capabilities(cpu_bf16=True, cpu_fp16=True)).otherwise
