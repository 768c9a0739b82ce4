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
    return {
        "hf_mp": __version__,
        **{name: _installed_version(name) for name in _PACKAGES},
        "Python": platform.python_version(),
    }


def describe_hardware() -> Mapping[str, str]:
    """Platform, CPU and GPUs, without kernel release and host name: reports get published."""
    import torch

    from hf_mp.casting.cpu.upcast import runs_natively

    cpuinfo = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else ""
    return {
        "platform": _platform(),
        "CPU": cpu_model(cpuinfo) or platform.processor() or platform.machine(),
        "CPU instructions": ", ".join([torch.backends.cpu.get_cpu_capability(), *cpu_flags_16_bit(cpuinfo)]),
        "FP16 products on the CPU": _native_or_not(runs_natively(torch.float16, "cpu")),
        "BF16 products on the CPU": _native_or_not(runs_natively(torch.bfloat16, "cpu")),
        "CPU threads": f"{torch.get_num_threads()} of {_usable_cpus()}",
        **gpu_rows(_gpus()),
    }


def cpu_model(cpuinfo: str) -> str | None:
    """The model name in ``/proc/cpuinfo``; None if there is none, as on Arm."""
    return _cpuinfo_field(cpuinfo, "model name")


def cpu_flags_16_bit(cpuinfo: str) -> list[str]:
    """The flags in ``/proc/cpuinfo`` for FP16 or BF16 arithmetic."""
    flags = (_cpuinfo_field(cpuinfo, "flags") or _cpuinfo_field(cpuinfo, "Features") or "").split()
    return [flag for flag in _CPU_FLAGS_16_BIT if flag in flags]


def gpu_rows(gpus: Iterable[tuple[str, int, tuple[int, int]]]) -> Mapping[str, str]:
    """One row per GPU: name, memory in bytes, compute capability."""
    rows = {
        f"GPU {index}": f"{name}, {memory / _GIB:.1f} GiB, compute capability {major}.{minor}"
        for index, (name, memory, (major, minor)) in enumerate(gpus)
    }
    return rows or {"GPU": "none that torch can use"}


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _platform() -> str:
    libc, libc_version = platform.libc_ver()
    name = f"{platform.system()} {platform.machine()}"
    return f"{name}, {libc} {libc_version}" if libc else name


def _cpuinfo_field(cpuinfo: str, field: str) -> str | None:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field and value.strip():
            return value.strip()
    return None


def _native_or_not(native: bool) -> str:
    return "native" if native else "through FP32"


def _usable_cpus() -> int:
    # a container or `taskset` may grant fewer than the machine has
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[tuple[str, int, tuple[int, int]]]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in properties]
