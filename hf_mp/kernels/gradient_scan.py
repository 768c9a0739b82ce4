"""Largest magnitude and norm of gradients. The magnitude is finite only if all gradients are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from hf_mp.kernels.registry import kernel_for
from hf_mp.kernels.split import cache_blocks
from hf_mp.kernels.tensors import is_on_host

OVERFLOW_LIMIT = 2.0**64  # the square of every smaller number is finite in FP32
_JOINED_ELEMENTS = 2**12
_BLOCK_ELEMENTS_PER_THREAD = 2**17  # 512 KiB in FP32, half of a core's cache


class Scan(NamedTuple):
    """Largest magnitude and global 2-norm, FP32 of shape ()."""

    largest: Tensor
    norm: Tensor


def scan_reference(tensors: Sequence[Tensor]) -> Scan:
    """Reference of the kernel ``gradient_scan``, for dense tensors up to FP32 on one device."""
    values = torch.cat([tensor.float().flatten() for tensor in tensors])
    return Scan(torch.linalg.vector_norm(values, math.inf), torch.linalg.vector_norm(values))


@torch.no_grad()
def largest_magnitude(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude in all tensors, FP32 of shape (), on the device of the first with elements.

    Tensors are floating, dense or sparse. Without elements the result is 0, on the CPU. A NaN among the elements makes
    it NaN; otherwise an ``inf``, or an FP64 value beyond FP32, makes it ``inf``.
    """
    tensors = list(tensors)
    if (kernel := kernel_for("gradient_scan", tensors)) is not None:
        return kernel(tensors).largest
    # Nearly all gradients are dense FP32, and the call costs more than the check.
    dense = [t if t.dtype is torch.float32 and t.layout is torch.strided else real_values(t) for t in tensors]
    values = [value for value in dense if value.numel()]
    if not values:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    if all([tensor.device.type == "cpu" for tensor in values]):
        values = _join_small(values)
        # On a CPU torch's multi-tensor norm is some 15 times slower.
        extremes = [extreme for tensor in values for extreme in torch.aminmax(tensor)]
        if len({tensor.dtype for tensor in values}) == 1:
            return torch.stack(extremes).abs().max().to(torch.float32)
    else:
        # One launch on a GPU.
        extremes = list(torch._foreach_norm(values, float("inf")))
    device = values[0].device
    return torch.stack([extreme.abs().to(device, torch.float32) for extreme in extremes]).max()


def _join_small(values: list[Tensor]) -> list[Tensor]:
    """Concatenate small vectors of one dtype, for which a call costs more than its work."""
    groups: dict[torch.dtype | int, list[Tensor]] = {}
    for index, value in enumerate(values):
        is_small = value.dim() == 1 and value.numel() <= _JOINED_ELEMENTS and type(value) is Tensor
        groups.setdefault(value.dtype if is_small else index, []).append(value)
    return [group[0] if len(group) == 1 else torch.cat(group) for group in groups.values()]


def all_finite(tensors: Iterable[Tensor], limit: float = math.inf) -> bool:
    """Return whether all magnitudes are smaller than ``limit`` and none is NaN."""
    return bool(largest_magnitude(tensors) < limit)  # False for NaN


@torch.no_grad()
def largest_magnitude_and_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return :func:`largest_magnitude` and ``get_total_norm`` of dense FP32 tensors, bit for bit on a CPU."""
    if (kernel := kernel_for("gradient_scan", tensors)) is not None:
        return kernel(tensors)
    return largest_magnitude(tensors), get_total_norm(tensors)


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of floating tensors on one device, FP32 of shape (); 0 for none.

    It differs by rounding from ``torch.nn.utils.get_total_norm``: no 16-bit tensor is copied to FP32 as a whole.
    """
    if (kernel := kernel_for("gradient_scan", tensors)) is not None:
        return kernel(tensors).norm
    return norm_of([tensor_norm(tensor) for tensor in tensors])


def norm_of(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors from their norms, FP32 of shape (); 0 for none."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@torch.no_grad()
def scan_part(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of one dense tensor, FP32 of shape (), and its part for :func:`norm_of_parts`.

    The part is the norm in FP32, from the kernel the sum of squares in FP64.
    """
    kernel = None if is_on_host(tensor) else kernel_for("gradient_scan", [tensor])
    if kernel is None:
        return largest_magnitude([tensor]), tensor_norm(tensor)
    return kernel([tensor], sums_squares=True)


def norm_of_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return :func:`total_norm` from the parts of tensors on one device.

    Bit for bit from norms. Sums of squares are added in another order than in the kernel: the FP32 result differs in
    one of 10**8 cases.
    """
    if parts and parts[0].dtype is torch.float64:
        return torch.stack(list(parts)).sum().sqrt().to(torch.float32)
    return norm_of(parts)


def tensor_norm(tensor: Tensor) -> Tensor:
    """Return the 2-norm of one tensor, FP32 of shape ()."""
    if tensor.dtype is torch.float64:
        return torch.linalg.vector_norm(tensor).to(torch.float32)
    size = torch.get_num_threads() * _BLOCK_ELEMENTS_PER_THREAD
    is_whole = tensor.device.type != "cpu" or tensor.dtype is torch.float32 or tensor.numel() <= size
    if is_whole or type(tensor) is not Tensor:
        return torch.linalg.vector_norm(tensor, dtype=torch.float32)
    # On a CPU vector_norm(dtype=...) copies its 16-bit tensor to FP32.
    blocks = cache_blocks(tensor, elements=size)
    return norm_of([torch.linalg.vector_norm(block, dtype=torch.float32) for (block,) in blocks])


def real_values(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor``, coalesced if sparse, with complex numbers as pairs of real ones."""
    # The sum of duplicate coordinates may overflow.
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
