"""One read of all gradients: their largest magnitude, which also tells whether all of them are finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def largest_magnitude_reference(tensors: Iterable[Tensor]) -> Tensor:
    """Plain form of :func:`largest_magnitude`."""
    largest = torch.zeros((), dtype=torch.float32)
    for tensor in tensors:
        values = _values(tensor)
        if values.numel():
            largest = torch.maximum(largest, _to_fp32(values.detach().abs().max()).to("cpu"))
    return largest


@torch.no_grad()
def largest_magnitude(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in all tensors, which is finite if and only if every element is.

    Args:
        tensors: floating tensors of any dtype and device; sparse ones count by their values, empty ones not at all.

    Returns:
        A FP32 scalar tensor on the device of the first tensor: 0 for no elements, ``inf`` or ``nan`` if there is one
        (``nan`` wins), FP32's largest number for finite FP64 values beyond it. Reading its value is the one
        synchronisation with a GPU.
    """
    values = [values for tensor in tensors if (values := _values(tensor)).numel()]
    if not values:
        return torch.zeros((), dtype=torch.float32)
    if all(tensor.device.type == "cpu" for tensor in values):
        # One pass a tensor; torch's multi-tensor norm is some 15 times slower on a CPU.
        extremes = [extreme for tensor in values for extreme in torch.aminmax(tensor)]
    else:
        extremes = list(torch._foreach_norm(values, float("inf")))
    device = values[0].device
    return torch.stack([_to_fp32(extreme.abs()).to(device) for extreme in extremes]).max()


def _to_fp32(magnitude: Tensor) -> Tensor:
    if magnitude.dtype is not torch.float64:
        return magnitude.to(torch.float32)
    largest = torch.finfo(torch.float32).max
    return torch.where(magnitude.isfinite(), magnitude.clamp(max=largest), magnitude).to(torch.float32)


def _values(tensor: Tensor) -> Tensor:
    # Duplicate coordinates of a sparse gradient add up when they are coalesced, and only then may overflow.
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
