"""The output of ``hf-mp env``, as a screen and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.environment.advice import Capabilities, advise
from hf_mp.environment.libraries import LIBRARIES, library_status
from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.policy import PRESETS


def examine_machine() -> dict[str, dict[str, str]]:
    """Versions, hardware, libraries and advice, each by name; initializes CUDA if there is a GPU."""
    return {
        "versions": dict(package_versions()),
        "hardware": dict(describe_hardware()),
        "libraries": {name: library_status(name) for name in LIBRARIES},
        "advice": asdict(advise(capabilities())),
    }


def capabilities() -> Capabilities:
    cpu_fp16, cpu_bf16 = (runs_natively(PRESETS[name].compute, "cpu") for name in ("fp16", "bf16"))
    if not torch.cuda.is_available():
        return Capabilities(cpu_fp16=cpu_fp16, cpu_bf16=cpu_bf16)
    weakest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
    capability = None if torch.version.hip is not None else torch.cuda.get_device_capability(weakest)
    gpu_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Capabilities(torch.cuda.get_device_name(weakest), capability, gpu_bf16, cpu_fp16, cpu_bf16)


def screen(machine: Mapping[str, Mapping[str, str]]) -> Iterator[RenderableType]:
    """What :func:`examine_machine` found, as a table and a sentence."""
    environment = Table("environment", "value", show_edge=False)
    for part in ("versions", "libraries", "hardware"):
        for label, value in machine[part].items():
            environment.add_row(label, Text(value))
    yield environment
    yield ""
    advice = machine["advice"]
    preset = (f"precision={advice['preset']!r}", "bold")
    yield Text.assemble("Advice: ", preset, f". {advice['reason']} Otherwise {advice['otherwise']}")
