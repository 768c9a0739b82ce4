"""The one place where a gradient is multiplied by the loss scale S, or by 1/S."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Crossings(Protocol):
    """What a border of the scaled region asks when a gradient crosses it."""

    def scale(self, device: torch.device) -> Tensor | None:
        """S, as FP32 of shape (1,); None where nothing is scaled."""

    def inverse(self, device: torch.device, node: Any, index: int) -> Tensor | None:
        """1/S, as FP32 of shape (1,), for the gradient that an autograd node hands on by its input ``index``.

        None where nothing is scaled, or where this backward has not come in through an output.
        """

    def entered(self, node: Any, gradient: Tensor) -> None:
        """A gradient goes in through the autograd node ``node``, before anything of the model's backward runs."""

    def take(self, weight: Tensor, gradients: Sequence[Tensor], node: Any, index: int) -> bool:
        """A weight's gradients go out, still scaled; True if they were taken in place of autograd's ``.grad``."""


class _Multiply(Function):
    """Multiply a gradient by a factor in FP32; its own backward is the identity.

    What enters through the derivative of an unscaled gradient (a gradient penalty) then travels inside at S times its
    value, as everything inside does, and leaves through a border once.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor, crossings: Crossings) -> Tensor:
        ctx.dtype, ctx.crossings = gradient.dtype, crossings
        return gradient * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.crossings.entered(ctx, gradient)
        return gradient.to(ctx.dtype), None, None


def multiply(gradient: Tensor, factor: Tensor | None, crossings: Crossings) -> Tensor:
    """``gradient`` times ``factor`` in FP32, differentiable; itself where the factor is None.

    Args:
        gradient: of any floating dtype and layout.
        factor: FP32 of shape (1,), or None.
        crossings: told when a second derivative goes in through this gradient.
    """
    if factor is None:
        return gradient
    if torch.is_grad_enabled():  # create_graph=True
        return _Multiply.apply(gradient, factor, crossings).reshape(gradient.shape)
    if gradient.is_sparse:
        return gradient.to(torch.float32) * factor.squeeze()
    # FP16 times FP32 of shape (1,) is computed in FP32 and is FP32: one kernel.
    return (gradient * factor).reshape(gradient.shape)


def accumulates(node: Any, index: int) -> bool:
    """Whether the backward of ``node`` leads into ``.grad`` by its input ``index``, and not to ``autograd.grad``."""
    if torch.is_grad_enabled():  # create_graph=True
        return False
    try:
        return torch._C._will_engine_execute_node(node.next_functions[index][0])
    except RuntimeError:  # how torch says that this is torch.autograd.grad
        return False
