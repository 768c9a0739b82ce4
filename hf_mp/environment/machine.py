"""Package versions, CPU and GPUs."""

import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from hf_mp import __version__

_PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes")
_CPUINFO = Path("/proc/cpuinfo")
# the names Linux gives, on x86 and on Arm, to arithmetic in 16 bits
_CPU_FLAGS_16_BIT = ("avx512_fp16", "amx_fp16", "fphp", "asimdhp", "avx512_bf16", "amx_bf16", "bf16")
_GIB = 2**30


def package_versions() -> Mapping[str, str]:
    """Versions of Python, hf_mp and the packages that affect numerics, or ``"not installed"``."""
    versions = {"hf_mp": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "Python": platform.python_version()}


def describe_hardware() -> Mapping[str, str]:
    """Platform, CPU and GPUs, without kernel release and host name: reports get published."""
    import torch

    from hf_mp.casting.cpu.upcast import runs_natively

    cpuinfo = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else ""
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    # A container or `taskset` may grant fewer CPUs than the machine has.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    libc = " ".join(platform.libc_ver()).strip()
    return {
        "platform": f"{platform.system()} {platform.machine()}" + (f", {libc}" if libc else ""),
        "CPU": cpu_model(cpuinfo) or platform.processor() or platform.machine(),
        "CPU instructions": ", ".join([torch.backends.cpu.get_cpu_capability(), *cpu_flags_16_bit(cpuinfo)]),
        "FP16 products on the CPU": "native" if runs_natively(torch.float16, "cpu") else "through FP32",
        "BF16 products on the CPU": "native" if runs_natively(torch.bfloat16, "cpu") else "through FP32",
        "CPU threads": f"{torch.get_num_threads()} of {usable or 1}",
        **gpu_rows((gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in gpus),
    }


def cpu_model(cpuinfo: str) -> str | None:
    """The model name in ``/proc/cpuinfo``; None if there is none, as on Arm."""
    return _cpuinfo_field(cpuinfo, "model name")


def cpu_flags_16_bit(cpuinfo: str) -> list[str]:
    flags = (_cpuinfo_field(cpuinfo, "flags") or _cpuinfo_field(cpuinfo, "Features") or "").split()
    return [flag for flag in _CPU_FLAGS_16_BIT if flag in flags]


def gpu_rows(gpus: Iterable[tuple[str, int, tuple[int, int]]]) -> Mapping[str, str]:
    """One row per GPU: name, memory in bytes, compute capability."""
    rows = {
        f"GPU {index}": f"{name}, {memory / _GIB:.1f} GiB, compute capability {major}.{minor}"
        for index, (name, memory, (major, minor)) in enumerate(gpus)
    }
    return rows or {"GPU": "none that torch can use"}


def _cpuinfo_field(cpuinfo: str, field: str) -> str | None:
    fields = (map(str.strip, line.partition(":")) for line in cpuinfo.splitlines())
    return next((value for name, _, value in fields if name == field and value), None)
