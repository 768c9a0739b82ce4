"""Recommends a precision preset: a pure function of the machine's capabilities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    gpu: str | None = None  # name of the least capable GPU; None without one
    compute_capability: tuple[int, int] | None = None  # NVIDIA's, as (8, 0); None without a GPU and on ROCm
    gpu_bf16: bool = False  # whether the GPU has native BF16 arithmetic
    cpu_fp16: bool = False
    cpu_bf16: bool = False


@dataclass(frozen=True)
class Advice:
    preset: str  # for PrecisionPolicy.parse
    reason: str
    otherwise: str  # when to choose another preset; continues "Otherwise"


_FULL_RANGE = "BF16 has FP32's range, so that there is no loss scale to find."
_MORE_BITS = "fp16 for a model that was trained in FP16, or where bf16 ends at a higher loss: FP16 has 3 more bits"
_LEAN_BF16 = "bf16-lean where memory is short."
_LEAN_FP16 = "fp16-lean where memory is short."


def advise(machine: Capabilities) -> Advice:
    """The preset to start with.

    Tensor cores support FP16 from compute capability 7.0 (Volta), BF16 from 8.0 (Ampere) and FP8 from 9.0 (Hopper) on
    (NVIDIA, "CUDA C++ Programming Guide", section "Compute Capabilities").
    """
    if machine.gpu is None:
        return _for_cpu(machine)
    gpu, capability = machine.gpu, machine.compute_capability
    if capability is None and machine.gpu_bf16:
        return Advice("bf16", f"torch reports BF16 arithmetic for {gpu}. {_FULL_RANGE}", f"{_MORE_BITS}; {_LEAN_BF16}")
    if capability is None:
        return Advice("fp16", f"torch reports no BF16 arithmetic for {gpu}.", _LEAN_FP16)
    if capability >= (8, 0):
        fp8 = " (hf_mp does not use their FP8)" if capability >= (9, 0) else ""
        return Advice(
            "bf16",
            f"The tensor cores of {gpu} multiply BF16 as fast as FP16{fp8}. {_FULL_RANGE}",
            f"{_MORE_BITS}; {_LEAN_BF16}",
        )
    if capability >= (7, 0):
        return Advice(
            "fp16",
            f"The tensor cores of {gpu} multiply FP16. BF16 is emulated there, and slow.",
            f"fp32 for a model that was trained in BF16 and overflows in FP16; {_LEAN_FP16}",
        )
    return Advice(
        "fp32",
        f"{gpu} has no tensor cores: FP16 saves memory there, but hardly time.",
        "fp16 where memory is short.",
    )


def _for_cpu(machine: Capabilities) -> Advice:
    if machine.cpu_bf16:
        speed = "" if machine.cpu_fp16 else ", and hf_mp runs it here at about FP32's speed"
        return Advice(
            "bf16",
            f"This CPU has instructions that multiply BF16. {_FULL_RANGE}",
            f"{_MORE_BITS}{speed}; {_LEAN_BF16}",
        )
    if machine.cpu_fp16:
        return Advice("fp16", "This CPU has instructions that multiply FP16, and none for BF16.", _LEAN_FP16)
    return Advice(
        "fp32",
        "This CPU has no instructions for FP16 and BF16, so that neither saves time.",
        "fp16 where memory is short: hf_mp runs it through FP32, at about FP32's speed.",
    )
