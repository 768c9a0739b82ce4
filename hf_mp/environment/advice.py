"""Which precision preset suits a machine, and why: a pure function of what the machine has."""

from __future__ import annotations

from dataclasses import dataclass

_FP16_CORES = (7, 0)
_BF16_CORES = (8, 0)
_FP8_CORES = (9, 0)


@dataclass(frozen=True)
class Capabilities:
    """What decides about a preset.

    Attributes:
        gpu: name of the GPU that training would use, the least capable of several; None without one.
        compute_capability: NVIDIA's, as (8, 0); None without a GPU, and for AMD's (ROCm).
        gpu_bf16: whether the GPU has BF16 arithmetic, not emulated.
        cpu_fp16, cpu_bf16: whether torch has products in these dtypes for the CPU's own instructions.
    """

    gpu: str | None = None
    compute_capability: tuple[int, int] | None = None
    gpu_bf16: bool = False
    cpu_fp16: bool = False
    cpu_bf16: bool = False


@dataclass(frozen=True)
class Advice:
    """A preset for ``precision=...``.

    Attributes:
        preset: as :meth:`hf_mp.PrecisionPolicy.parse` takes it.
        reason: a sentence or two.
        otherwise: when another preset is the better one; goes on after "Otherwise".
    """

    preset: str
    reason: str
    otherwise: str


def advise(machine: Capabilities) -> Advice:
    """The preset to begin with.

    The generations of tensor cores are those of NVIDIA's "CUDA C++ Programming Guide", section "Compute Capabilities":
    FP16 from 7.0 (Volta), BF16 from 8.0 (Ampere) on.
    """
    if machine.gpu is None:
        return _for_cpu(machine)
    if machine.compute_capability is None:
        return _for_other_gpu(machine)
    return _for_nvidia(machine.gpu, machine.compute_capability)


_FULL_RANGE = "BF16 has FP32's range, so that there is no loss scale to find."
_MORE_BITS = "fp16 for a model that was trained in FP16, or where bf16 ends at a higher loss: FP16 has 3 more bits"
_LEAN_BF16 = "bf16-lean where memory is short."
_LEAN_FP16 = "fp16-lean where memory is short."


def _for_nvidia(gpu: str, capability: tuple[int, int]) -> Advice:
    if capability >= _BF16_CORES:
        fp8 = " (hf_mp does not use their FP8)" if capability >= _FP8_CORES else ""
        reason = f"The tensor cores of {gpu} multiply BF16 as fast as FP16{fp8}. {_FULL_RANGE}"
        return Advice("bf16", reason, f"{_MORE_BITS}; {_LEAN_BF16}")
    if capability >= _FP16_CORES:
        reason = f"The tensor cores of {gpu} multiply FP16. BF16 is emulated there, and slow."
        return Advice("fp16", reason, f"fp32 for a model that was trained in BF16 and overflows in FP16; {_LEAN_FP16}")
    reason = f"{gpu} has no tensor cores: FP16 saves memory there, but hardly time."
    return Advice("fp32", reason, "fp16 where memory is short.")


def _for_other_gpu(machine: Capabilities) -> Advice:
    if machine.gpu_bf16:
        reason = f"torch reports BF16 arithmetic for {machine.gpu}. {_FULL_RANGE}"
        return Advice("bf16", reason, f"{_MORE_BITS}; {_LEAN_BF16}")
    return Advice("fp16", f"torch reports no BF16 arithmetic for {machine.gpu}.", _LEAN_FP16)


def _for_cpu(machine: Capabilities) -> Advice:
    if machine.cpu_bf16:
        reason = f"This CPU has instructions that multiply BF16. {_FULL_RANGE}"
        speed = "" if machine.cpu_fp16 else ", and hf_mp runs it here at about FP32's speed"
        return Advice("bf16", reason, f"{_MORE_BITS}{speed}; {_LEAN_BF16}")
    if machine.cpu_fp16:
        return Advice("fp16", "This CPU has instructions that multiply FP16, and none for BF16.", _LEAN_FP16)
    return Advice(
        "fp32",
        "This CPU has no instructions for FP16 and BF16, so that neither saves time.",
        "fp16 where memory is short: hf_mp runs it through FP32, at about FP32's speed.",
    )
