"""Choice between each Triton kernel and its PyTorch reference.

The environment variable ``HF_MP_KERNELS`` is read at each call:

- ``auto`` (default): the kernel on a CUDA GPU, the reference elsewhere. At its first use on a device the kernel is
  compared with the reference; if they differ, the reference is used, with one warning.
- ``triton``: the kernel without the comparison; the reference, with one warning, if it cannot run.
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
    """Results of a kernel and of its reference."""

    name: str
    found: Tensor
    expected: Tensor
    tolerance: float  # relative and absolute


# Launcher of each kernel, in hf_mp.kernels.triton_<name>; pairs(device) there runs it on a sample.
KERNELS = {"gradient_scan": "scan", "adamw": "Update", "cross_entropy": "RowKernels"}
_READABLE = {KINDS[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def kernel_for(name: str, tensors: Sequence[Tensor]) -> Any:
    """Return the launcher of kernel ``name`` to read ``tensors``; None for the reference.

    Raises:
        ValueError: for an ``HF_MP_KERNELS`` that is not ``auto``, ``triton`` or ``reference``.
    """
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in SETTINGS:
        raise ValueError(f"{VARIABLE}={setting!r} is not known: use one of {', '.join(SETTINGS)}")
    if setting == "reference" or torch.compiler.is_compiling() or not any(map(Tensor.numel, tensors)):
        return None
    device = tensors[0].device
    if setting == "auto" and device.type == "cpu":  # usual, and cheap
        return None
    reason = unavailable_reason(tensors)
    if reason is not None and setting == "triton":
        _warn_once(f"{VARIABLE}=triton: the reference of {name} is used, because {reason}")
    is_usable = reason is None and (setting == "triton" or _matches_reference_on(name, device))
    return launcher(name) if is_usable else None


def unavailable_reason(tensors: Sequence[Tensor]) -> str | None:
    """Return why no kernel can run on ``tensors``; None if kernels can."""
    device = tensors[0].device
    if not _has_triton():
        return "triton is not installed"
    if not _are_readable(tensors, device):
        tensor = next(tensor for tensor in tensors if not _are_readable([tensor], device))
        return (
            f"it reads contiguous FP32, FP16 and BF16 tensors of one device, and one is a {type(tensor).__name__} "
            f"of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )
    is_interpreted = device.type == "cpu" and is_interpreting()
    is_gpu = device.type == "cuda" and torch.version.cuda is not None  # None in ROCm, with devices called cuda as well
    return None if is_gpu or is_interpreted else f"the device is {device}, not a CUDA GPU"


def _are_readable(tensors: Sequence[Tensor], device: torch.device) -> bool:
    return tensors[0].device == device and _READABLE.issuperset(traits_of(tensors).kinds)


@functools.cache  # find_spec searches the package folders
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Return whether Triton interprets kernels (``TRITON_INTERPRET=1``), which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launcher(name: str) -> Any:
    """Return the launcher of kernel ``name``; imports Triton, which is slow."""
    return getattr(module_of(name), KERNELS[name])


@functools.cache
def module_of(name: str) -> Any:
    return importlib.import_module(f".triton_{name}", __package__)


def reference_mismatch(name: str, device: torch.device) -> str | None:
    """Return the first difference of kernel ``name`` from its reference on ``device``, or None."""
    for result, found, expected, tolerance in module_of(name).pairs(device):
        values = found.cpu().float(), expected.cpu().float()  # the reference may run on the CPU
        if not torch.allclose(*values, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{result} differs"
    return None


@functools.cache
def _matches_reference_on(name: str, device: torch.device) -> bool:
    """Return whether kernel ``name`` matches its reference on ``device``; warn if it does not."""
    try:
        problem = reference_mismatch(name, device)
    except Exception as error:  # of Triton's import, compiler or driver
        problem = f"it failed with {type(error).__name__}: {error}"
    if problem is not None:
        _warn_once(f"the Triton kernel {name} is not used on {device}: {problem}")
    return problem is None


@functools.cache
def _warn_once(message: str) -> None:
    warn_caller(message)
