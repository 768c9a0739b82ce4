"""The output of ``hf-mp env``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.environment.advice import advise
from hf_mp.environment.machine import describe_hardware, package_versions


def examine_machine() -> dict[str, dict[str, str]]:
    """Return versions, hardware and advice, each by name. Initializes CUDA if there is a GPU."""
    return {
        "versions": package_versions(),
        "hardware": describe_hardware(),
        "advice": advise_here(),
    }


def advise_here() -> dict[str, str]:
    """Return the preset for the least capable GPU; without one, for the CPU.

    Tensor cores support FP16 from compute capability 7.0 (Volta) and BF16 from 8.0 (Ampere) on (NVIDIA, "CUDA C++
    Programming Guide", section "Compute Capabilities").
    """
    if not torch.cuda.is_available():
        fp16, bf16 = runs_natively(torch.half, "cpu"), runs_natively(torch.bfloat16, "cpu")
        tiles = torch.cpu.get_capabilities()
        only_bf16_in_tiles = bool(tiles.get("amx_bf16")) and not tiles.get("amx_fp16")
        return advise("This CPU", fp16=fp16, bf16=bf16, only_bf16_in_tiles=only_bf16_in_tiles)
    # A training on all GPUs has one precision.
    weakest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
    # ROCm has other compute capabilities.
    with torch.cuda.device(weakest):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    fp16 = torch.version.hip is not None or torch.cuda.get_device_capability(weakest) >= (7, 0)
    return advise(torch.cuda.get_device_name(weakest), fp16=fp16, bf16=bf16)


def screen(machine: Mapping[str, Mapping[str, str]]) -> str:
    """Return the result of :func:`examine_machine` as plain lines, for bug reports."""
    found = [item for part in ("versions", "hardware") for item in machine[part].items()]
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
