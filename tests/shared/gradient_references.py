"""The reference of the fused scan of gradients: one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_mp.kernels.gradient_scan import real_values


def largest_magnitude_reference(tensors: Iterable[Tensor]) -> Tensor:
    """FP32, of shape (), on the CPU."""
    largest = torch.zeros((), dtype=torch.float32, device="cpu")
    for tensor in tensors:
        values = real_values(tensor).detach().abs()
        if values.numel():
            largest = torch.maximum(largest, values.max().to("cpu", torch.float32))
    return largest
