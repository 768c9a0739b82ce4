"""Package versions, CPU and GPUs."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from hf_mp._version import __version__
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels import native

_PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes")
_CPUINFO = Path("/proc/cpuinfo")
# Linux's names of 16-bit arithmetic on x86 and Arm
_CPU_FLAGS_16_BIT = ("avx512_fp16", "amx_fp16", "fphp", "asimdhp", "avx512_bf16", "amx_bf16", "bf16")


def package_versions() -> dict[str, str]:
    """Return the versions of Python, hf_mp and packages that affect numerics, or ``"not installed"``."""
    versions = {"hf_mp": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "Python": platform.python_version()}


def describe_hardware() -> dict[str, str]:
    """Return platform, CPU and GPUs, without kernel release and host name, because reports are published."""
    cpuinfo = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else ""
    # Reversed, so that the fields of the first processor remain.
    lines = [line.partition(":") for line in reversed(cpuinfo.splitlines())]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = fields.get("flags", fields.get("Features", "")).split()
    # A container or `taskset` may allow fewer CPUs than the machine has.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".rstrip(", "),
        "CPU": fields.get("model name") or platform.processor() or platform.machine(),
        "CPU instructions": ", ".join(
            [torch.backends.cpu.get_cpu_capability(), *(flag for flag in _CPU_FLAGS_16_BIT if flag in flags)]
        ),
        **{
            f"{entry.label} matmuls on the CPU": "native" if runs_natively(entry.dtype, "cpu") else "through FP32"
            for entry in LOWER_PRECISION_DTYPES.values()
        },
        "CPU threads": f"{torch.get_num_threads()} of {cpus}",
        **_gpus(),
        "Casts": _casts(),
    }


def _casts() -> str:
    if (reason := native.unavailable_reason()) is not None:
        return f"Python's ({reason})"
    return "C++" if native.is_compiled() else "C++, compiled when a model is first attached: half a minute, once"


def _gpus() -> dict[str, str]:
    # device_count() may count GPUs that a broken driver does not give to torch.
    if not torch.cuda.is_available():
        return {"GPU": "none that torch can use"}
    found = enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    return {
        f"GPU {index}": f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        for index, gpu in found
    }
