"""The Triton kernels, each beside its reference, and which of the two a call uses.

``HF_MP_KERNELS`` in the environment decides, at each call:

- ``auto`` (default): the kernel on a CUDA GPU, once it has shown there that it computes what its reference does
  (a small sample, at its first use on that device); the reference elsewhere.
- ``triton``: the kernel without that; where it cannot run, the reference and one warning that says why.
- ``reference``: always the reference.

The kernels were run in Triton's interpreter and compiled for Hopper; they are not measured on a GPU yet.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VARIABLE = "HF_MP_KERNELS"
SETTINGS = ("auto", "triton", "reference")
_SMALLEST_CAPABILITY = (7, 0)  # of a CUDA GPU that Triton compiles for; BF16 is read as integers


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: by which it is asked for.
        triton: the kernel's launcher, as ``module:function``; the module is imported at the first use.
        check: compares it with its reference on a device, as ``module:function``; returns what differs, or None.
        dtypes: of the tensors that it reads.
    """

    name: str
    triton: str
    check: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "gradient_scan",
            triton="hf_mp.kernels.triton_gradient_scan:scan",
            check="hf_mp.kernels.triton_gradient_scan:check",
        ),
        Kernel(
            "adamw",
            triton="hf_mp.kernels.triton_adamw:adamw_",
            check="hf_mp.kernels.triton_adamw:check",
        ),
        Kernel(
            "cross_entropy",
            triton="hf_mp.kernels.triton_cross_entropy:RowKernels",
            check="hf_mp.kernels.triton_cross_entropy:check",
        ),
    )
}


def setting() -> str:
    """What ``HF_MP_KERNELS`` says.

    Raises:
        ValueError: for anything but ``auto``, ``triton`` and ``reference``.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value not in SETTINGS:
        raise ValueError(f"{VARIABLE}={value!r} is not known: use one of {', '.join(SETTINGS)}")
    return value


def chosen(name: str, tensors: Sequence[Tensor]) -> Any:
    """The launcher of a kernel, if this call is to use it; None for the reference.

    Args:
        name: of an entry of :data:`KERNELS`.
        tensors: what the kernel would read.
    """
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
    if (asked := setting()) == "reference" or (asked == "auto" and not on_gpu) or torch.compiler.is_compiling():
        return None
    if not any(tensor.numel() for tensor in tensors):
        return None
    kernel = KERNELS[name]
    reason = why_not(kernel, tensors)
    if reason is None and asked == "auto":
        return load(kernel.triton) if _is_right_on(kernel, tensors[0].device) else None
    if reason is not None and asked == "triton":
        _warn_once(f"{VARIABLE}=triton: the reference of {name} is used, because {reason}")
    return None if reason is not None else load(kernel.triton)


def why_not(kernel: Kernel, tensors: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot run on these tensors; None where it can."""
    if not _has_triton():
        return "triton is not installed"
    for tensor in tensors:
        if type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):  # a DTensor, a fake tensor
            return f"a tensor is a {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return f"a tensor is {tensor.layout}"
        if tensor.dtype not in kernel.dtypes:
            return f"a tensor is {tensor.dtype}"
        if not tensor.is_contiguous():
            return f"a tensor of shape {tuple(tensor.shape)} is not contiguous"
    devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    if len(devices) > 1:
        return f"the tensors are on {' and '.join(devices)}"
    return _why_not_on(tensors[0].device)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (``TRITON_INTERPRET=1``), which it can on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_not_on(device: torch.device) -> str | None:
    if is_interpreting() and device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the device is {device}, not a CUDA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _SMALLEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, below 7.0"
    return None


@functools.cache
def load(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _is_right_on(kernel: Kernel, device: torch.device) -> bool:
    """Whether the kernel gives what its reference gives on ``device``; looked at once in a process."""
    check: Callable[[torch.device], str | None] = load(kernel.check)
    try:
        problem = check(device)
    except Exception as error:
        # Whatever Triton's compiler or the driver raises: training goes on without it, and says so.
        problem = f"it failed with {type(error).__name__}: {error}"
    if problem is not None:
        _warn_once(f"the Triton kernel {kernel.name} is not used on {device}: {problem}")
    return problem is None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
