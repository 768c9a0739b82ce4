"""Choice between each Triton kernel and its PyTorch reference.

The environment variable ``HF_MP_KERNELS`` is read at each call:

- ``auto`` (default): the kernel on a CUDA GPU, the reference elsewhere. At its first use on a device the kernel is
  compared with its reference on a small sample; if they differ, the reference is used, with one warning.
- ``triton``: the kernel without the comparison; the reference, with one warning, if the kernel cannot run.
- ``reference``: always the reference.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mp._warnings import warn_caller
from hf_mp.kernels.tensors import KINDS, traits_of

VARIABLE = "HF_MP_KERNELS"
SETTINGS = ("auto", "triton", "reference")


class Pair(NamedTuple):
    """A result of a kernel and that of its reference."""

    name: str
    found: Tensor
    expected: Tensor
    tolerance: float  # relative and absolute


# Launcher of each kernel, in hf_mp.kernels.triton_<name>. The function pairs(device) there runs it on a sample.
KERNELS = {"gradient_scan": "scan", "adamw": "Update", "cross_entropy": "RowKernels"}
_READABLE = {KINDS[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def kernel_for(name: str, tensors: Sequence[Tensor]) -> Any:
    """Return the launcher of the kernel ``name`` for a call that reads ``tensors``; None for the reference.

    Raises:
        ValueError: for an ``HF_MP_KERNELS`` that is not ``auto``, ``triton`` or ``reference``.
    """
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in SETTINGS:
        raise ValueError(f"{VARIABLE}={setting!r} is not known: use one of {', '.join(SETTINGS)}")
    if setting == "reference" or torch.compiler.is_compiling() or not any(map(Tensor.numel, tensors)):
        return None
    device = tensors[0].device
    if setting == "auto":
        # The device of the first tensor is checked first: on a CPU that suffices.
        is_usable = device.type != "cpu" and unavailable_reason(tensors) is None and _matches_reference_on(name, device)
        return launcher(name) if is_usable else None
    reason = unavailable_reason(tensors)
    if reason is not None:
        _warn_once(f"{VARIABLE}=triton: the reference of {name} is used, because {reason}")
        return None
    return launcher(name)


def unavailable_reason(tensors: Sequence[Tensor]) -> str | None:
    """Return the reason that no kernel can run on ``tensors``; None if kernels can."""
    device = tensors[0].device
    if not _has_triton():
        return "triton is not installed"
    if not _are_readable(tensors, device):
        tensor = next(tensor for tensor in tensors if not _are_readable([tensor], device))
        return (
            f"it reads contiguous FP32, FP16 and BF16 tensors of one device, and one is a {type(tensor).__name__} "
            f"of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )
    is_interpreted = is_interpreting() and device.type == "cpu"
    is_gpu = device.type == "cuda" and torch.version.cuda is not None  # ROCm calls its devices cuda as well
    return None if is_gpu or is_interpreted else f"the device is {device}, not a CUDA GPU"


def _are_readable(tensors: Sequence[Tensor], device: torch.device) -> bool:
    return tensors[0].device == device and _READABLE.issuperset(traits_of(tensors).kinds)


@functools.cache  # without Triton, find_spec searches the package folders at each call
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (``TRITON_INTERPRET=1``), which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launcher(name: str) -> Any:
    """Return the launcher of the kernel ``name``. Triton is imported at the first call, because that is slow."""
    return getattr(module_of(name), KERNELS[name])


@functools.cache
def module_of(name: str) -> Any:
    """Import the module of the kernel ``name``."""
    return importlib.import_module(f".triton_{name}", __package__)


def reference_mismatch(name: str, device: torch.device) -> str | None:
    """Compare the kernel ``name`` with its reference on ``device``; return the first difference, None without any."""
    for result, found, expected, tolerance in module_of(name).pairs(device):
        # The reference may run on the CPU, with IEEE rounding.
        values = found.cpu().float(), expected.cpu().float()
        if not torch.allclose(*values, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{result} differs"
    return None


@functools.cache
def _matches_reference_on(name: str, device: torch.device) -> bool:
    """Return whether the kernel ``name`` matches its reference on ``device``; warn if it does not."""
    try:
        problem = reference_mismatch(name, device)
    except Exception as error:
        # Any error of Triton's import, compiler or driver: training continues with the reference.
        problem = f"it failed with {type(error).__name__}: {error}"
    if problem is not None:
        _warn_once(f"the Triton kernel {name} is not used on {device}: {problem}")
    return problem is None


@functools.cache
def _warn_once(message: str) -> None:
    warn_caller(message)
