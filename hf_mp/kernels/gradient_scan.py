"""One read of all gradients: their largest magnitude, which also tells whether all of them are finite."""

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

OVERFLOW_LIMIT = 2.0**64  # FP32 holds the square of every smaller number
_JOINED_ELEMENTS = 2**12
_BLOCK_ELEMENTS_PER_THREAD = 2**17  # in FP32, half of what a core's cache of 1 MiB holds


class Scan(NamedTuple):
    """What one read of gradients tells: FP32 scalar tensors."""

    largest: Tensor  # the largest magnitude; finite if and only if every element is
    norm: Tensor  # the global 2-norm


def scan_reference(tensors: Sequence[Tensor]) -> Scan:
    """What the kernel ``gradient_scan`` computes, of dense tensors up to FP32 on one device."""
    # All in one tensor, whatever the order in which blocks are summed: what the kernel is held against.
    values = torch.cat([tensor.float().flatten() for tensor in tensors])
    return Scan(torch.linalg.vector_norm(values, math.inf), torch.linalg.vector_norm(values))


@torch.no_grad()
def largest_magnitude(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in all tensors, which is finite if and only if every element is.

    Tensors are floating, of any dtype and device; sparse ones count by their values. FP32, of shape (), on the first's
    device: 0 for no elements, ``inf`` or ``nan`` if there is one (``nan`` wins), ``inf`` for FP64 values beyond FP32.
    """
    tensors = list(tensors)
    if (kernel := kernel_for("gradient_scan", tensors)) is not None:
        return kernel(tensors).largest
    # FP32 first: nearly all gradients are FP32, and the call costs more than the check.
    values = [t if t.dtype is torch.float32 and t.layout is torch.strided else real_values(t) for t in tensors]
    values = [value for value in values if value.numel()]
    if not values:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    if all([tensor.device.type == "cpu" for tensor in values]):
        values = _joined(values)
        # One pass a tensor; torch's multi-tensor norm is some 15 times slower on a CPU.
        extremes = [extreme for tensor in values for extreme in torch.aminmax(tensor)]
        if len({tensor.dtype for tensor in values}) == 1:
            return torch.stack(extremes).abs().max().to(torch.float32)
    else:
        # On a GPU one launch for all: aminmax would be one a tensor.
        extremes = list(torch._foreach_norm(values, float("inf")))
    device = values[0].device
    return torch.stack([extreme.abs().to(device, torch.float32) for extreme in extremes]).max()


def _joined(values: list[Tensor]) -> list[Tensor]:
    """The same values in fewer tensors: biases and weights of norms, of which a call costs more than its work."""
    large: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for value in values:
        is_small = value.dim() == 1 and value.numel() <= _JOINED_ELEMENTS and type(value) is Tensor
        (small.setdefault(value.dtype, []) if is_small else large).append(value)
    return [*large, *map(torch.cat, small.values())]


def all_finite(tensors: Iterable[Tensor], limit: float = math.inf) -> bool:
    """Whether all elements are smaller than ``limit`` and none is NaN."""
    return bool(largest_magnitude(tensors) < limit)  # no comparison with NaN is true


@torch.no_grad()
def largest_magnitude_and_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What :func:`largest_magnitude` and ``get_total_norm`` give, bit for bit on a CPU, of dense FP32 tensors."""
    if (kernel := kernel_for("gradient_scan", tensors)) is not None:
        return kernel(tensors)
    return largest_magnitude(tensors), get_total_norm(tensors)


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.nn.utils.get_total_norm`` in FP32 of floating tensors on one device, without FP32 copies of 16-bit ones.

    On a CPU these are cast a block at a time, so it differs from torch's by rounding. 0 for no tensors.
    """
    if (kernel := kernel_for("gradient_scan", tensors)) is not None:
        return kernel(tensors).norm
    return norm_of([tensor_norm(tensor) for tensor in tensors])


def norm_of(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all from the norms of each, FP32 of shape (); 0 for none."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


@torch.no_grad()
def scan_part(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of one dense tensor, FP32 of shape (), and its part of the norm of several.

    For a tensor that is freed before the norm is asked for: see :func:`norm_of_parts`.
    """
    kernel = None if is_on_host(tensor) else kernel_for("gradient_scan", [tensor])
    if kernel is not None:
        largest, squares = kernel([tensor], sums_squares=True)
        return largest, squares
    return largest_magnitude([tensor]), tensor_norm(tensor)


def norm_of_parts(parts: Sequence[Tensor]) -> Tensor:
    """What :func:`total_norm` gives of tensors with these parts of :func:`scan_part`, on one device.

    Bit for bit from norms. Sums of squares are FP64, and added in another order than the kernel's, which the rounding
    to FP32 hides but for one in 10**8 cases.
    """
    if parts and parts[0].dtype is torch.float64:
        return torch.stack(list(parts)).sum().sqrt().to(torch.float32)
    return norm_of(parts)


def tensor_norm(tensor: Tensor) -> Tensor:
    """The 2-norm of one tensor, FP32 of shape (), without an FP32 copy of the whole."""
    if tensor.dtype is torch.float64:
        return torch.linalg.vector_norm(tensor).to(torch.float32)
    size = torch.get_num_threads() * _BLOCK_ELEMENTS_PER_THREAD
    is_whole = tensor.device.type != "cpu" or tensor.dtype is torch.float32 or tensor.numel() <= size
    if is_whole or type(tensor) is not Tensor:
        return torch.linalg.vector_norm(tensor, dtype=torch.float32)
    # vector_norm(dtype=...) of 16 bits makes an FP32 copy of the whole tensor on a CPU.
    blocks = cache_blocks(tensor, elements=size)
    return norm_of([torch.linalg.vector_norm(block, dtype=torch.float32) for (block,) in blocks])


def real_values(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` as real numbers: those of a sparse one coalesced, real and imaginary parts apart."""
    # Duplicate coordinates of a sparse gradient add up when they are coalesced, and only then may overflow.
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
