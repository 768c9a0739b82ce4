"""Autograd functions that several test files give to models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Times(torch.autograd.Function):
    """``x * weight``, without any decorator; gives the weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Rewriting(Times):
    """Writes through a view of what it is given, as bitsandbytes takes outliers out, and gives a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x.view(-1).mul_(1).abs()
        return Times.forward(ctx, x, weight).view(x.shape)


class Identity(torch.autograd.Function):
    """The identity; what inherits from it says what its gradient is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)


class LargeFactor(Identity):
    """The identity, whose gradient is a billion times too large."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e9
