"""The Triton kernels and their references, and which of the two a call uses.

``HF_MP_KERNELS`` in the environment decides, at each call: ``auto`` (default) is the kernel on a CUDA GPU, once it has
shown there that it computes what its reference does (a small sample, at its first use on that device), and the
reference elsewhere; ``triton`` the kernel without that, and where it cannot run the reference, with one warning that
says why; ``reference`` always the reference. Of GPUs, an H200 has run the kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mp._warnings import warn_caller
from hf_mp.kernels.tensors import KINDS, traits_of

VARIABLE = "HF_MP_KERNELS"
SETTINGS = ("auto", "triton", "reference")

# What a kernel gave, by name, what its reference gives, and by how much they may differ, relatively.
Pair = tuple[str, Tensor, Tensor, float]

# The launcher of each, in hf_mp.kernels.triton_<name>; pairs(device) there compares it with its reference.
KERNELS = {"gradient_scan": "scan", "adamw": "Update", "cross_entropy": "RowKernels"}
_READABLE = {KINDS[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def kernel_for(name: str, tensors: Sequence[Tensor]) -> Any:
    """The launcher of the kernel ``name``, if a call that reads ``tensors`` uses it; None for the reference.

    Raises:
        ValueError: for an ``HF_MP_KERNELS`` that is not ``auto``, ``triton`` or ``reference``.
    """
    if (asked := os.environ.get(VARIABLE, "auto")) not in SETTINGS:
        raise ValueError(f"{VARIABLE}={asked!r} is not known: use one of {', '.join(SETTINGS)}")
    # The environment is read at each call, so that a test or a user may change it in a running program.
    if asked == "reference" or torch.compiler.is_compiling() or not any(map(Tensor.numel, tensors)):
        return None
    device = tensors[0].device
    if asked == "auto":
        # Where the first tensor is on a CPU, as in each step there, the others need no look.
        is_right = device.type != "cpu" and why_not(tensors) is None and _is_right_on(name, device)
    elif not (is_right := (reason := why_not(tensors)) is None):
        _warn_once(f"{VARIABLE}=triton: the reference of {name} is used, because {reason}")
    return launcher(name) if is_right else None


def why_not(tensors: Sequence[Tensor]) -> str | None:
    """Why no kernel can run on these tensors; None where they can."""
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


@functools.cache  # where there is none, every look goes through the folders of packages, at each step
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (``TRITON_INTERPRET=1``), which it can on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launcher(name: str) -> Any:
    """The launcher of the kernel ``name``, whose module is imported at its first use."""
    # Not at import: Triton takes long to import, and many machines have none.
    return getattr(module_of(name), KERNELS[name])


@functools.cache
def module_of(name: str) -> Any:
    """Where the kernel ``name`` and its comparison are."""
    return importlib.import_module(f".triton_{name}", __package__)


def difference(name: str, device: torch.device) -> str | None:
    """What the kernel ``name`` computes otherwise than its reference on ``device``; None for nothing."""
    for what, found, expected, allowed in module_of(name).pairs(device):
        # The reference may have run on the CPU, where its rounding is known.
        values = found.cpu().float(), expected.cpu().float()
        if not torch.allclose(*values, rtol=allowed, atol=allowed, equal_nan=True):
            return f"{what} differs"
    return None


@functools.cache
def _is_right_on(name: str, device: torch.device) -> bool:
    """Whether the kernel ``name`` gives its reference's values on ``device``; warns if it does not."""
    try:
        problem = difference(name, device)
    except Exception as error:
        # Whatever Triton's compiler or the driver raises, also where there is no Triton: training goes on, and says so.
        problem = f"it failed with {type(error).__name__}: {error}"
    if problem is not None:
        _warn_once(f"the Triton kernel {name} is not used on {device}: {problem}")
    return problem is None


@functools.cache
def _warn_once(message: str) -> None:
    warn_caller(message)
