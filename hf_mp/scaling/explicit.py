"""Unscaling and overflow check of the gradients of one optimizer, for the methods of GradScaler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_mp.dtypes import needs_loss_scale
from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.scaling.rules import StepReport


@torch.no_grad()
def unscale_gradients(optimizer: Optimizer, inverse: float) -> StepReport | None:
    """Multiply the gradients of ``optimizer`` by ``inverse`` in place; return a report, None without gradients.

    FP16 gradients are replaced by FP32 ones if the optimizer has FP32 masters; otherwise a ValueError is raised.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return None
    _widen([parameter for parameter in parameters if needs_loss_scale(parameter.grad.dtype)], optimizer)
    gradients = [parameter.grad for parameter in parameters]
    if inverse != 1.0:
        _multiply(gradients, inverse)
    largest = largest_magnitude(gradients).item()
    overflow = not largest < float("inf")
    return StepReport(overflow, None if overflow else largest)


def _widen(parameters: list[Tensor], optimizer: Optimizer) -> None:
    """Cast the gradients of ``parameters`` to FP32; a ValueError if ``optimizer`` has no FP32 masters."""
    if parameters and not getattr(optimizer, "keeps_masters", False):
        raise ValueError(
            "Attempting to unscale FP16 gradients: they would underflow. Wrap the optimizer in "
            "hf_mp.MasterWeightOptimizer, or keep the parameters in FP32"
        )
    for parameter in parameters:
        gradient: Any = parameter.grad
        parameter.grad_dtype = None  # allows a gradient of another dtype
        parameter.grad = gradient.float()


def _multiply(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply in place; on an accelerator by one multi-tensor call for each device and dtype."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient._values() if gradient.is_sparse else gradient)
    for (device, _), group in groups.items():
        if device.type == "cpu":
            # The multi-tensor call is also a loop, and rounds the factor to BF16 for BF16 gradients.
            for values in group:
                values.mul_(factor)
        else:
            torch._foreach_mul_(group, factor)
