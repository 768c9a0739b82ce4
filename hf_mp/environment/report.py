"""The output of ``hf-mp env``, as a screen and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.environment.advice import advise
from hf_mp.environment.machine import describe_hardware, package_versions


def examine_machine() -> dict[str, dict[str, str]]:
    """Versions, hardware and advice, each by name; initializes CUDA if there is a GPU."""
    return {
        "versions": package_versions(),
        "hardware": describe_hardware(),
        "advice": advise_here(),
    }


def advise_here() -> dict[str, str]:
    """The preset for the least capable GPU; without one, for the CPU.

    Tensor cores support FP16 from compute capability 7.0 (Volta) and BF16 from 8.0 (Ampere) on (NVIDIA, "CUDA C++
    Programming Guide", section "Compute Capabilities").
    """
    if not torch.cuda.is_available():
        return advise("This CPU", fp16=runs_natively(torch.half, "cpu"), bf16=runs_natively(torch.bfloat16, "cpu"))
    # One process a GPU trains on all of them, in one precision.
    weakest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
    # torch asks ROCm by itself, whose compute capabilities are numbers of another maker; emulated BF16 is slow.
    with torch.cuda.device(weakest):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    fp16 = torch.version.hip is not None or torch.cuda.get_device_capability(weakest) >= (7, 0)
    return advise(torch.cuda.get_device_name(weakest), fp16=fp16, bf16=bf16)


def screen(machine: Mapping[str, Mapping[str, str]]) -> str:
    """What :func:`examine_machine` found, as lines."""
    found = [item for part in ("versions", "hardware") for item in machine[part].items()]
    # Lines, not a table of boxes: this is pasted into bug reports.
    width = max(len(label) for label, _ in found)
    advice = machine["advice"]
    sentences = (advice["reason"], *advice["otherwise"].replace(". ", ".\n").splitlines())
    return "\n".join(
        (
            *(f"{label:{width}}  {value}" for label, value in found),
            "",
            f"Advice: precision={advice['preset']!r}",
            *(f"  {sentence}" for sentence in sentences),
        )
    )
