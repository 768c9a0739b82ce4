"""The borders of a scaled forward: where backward multiplies gradients by the loss scale S, and where by 1/S.

Forward is the identity (up to the dtype) everywhere. In backward, a gradient that enters the model's graph through one
of its outputs is multiplied by S, and one that leaves it, to a parameter or to any other tensor made outside, by 1/S.
Outside, every gradient is FP32 and true; inside, every FP16 gradient is S times larger and so clear of underflow
(Micikevicius et al. 2017, section 3.2). S is that of the time of the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_mp.casting.deferred_output import DeferredOutput, can_be_deferred
from hf_mp.policy import LOWER_PRECISION_DTYPES
from hf_mp.scaling.multiply import Crossings, multiply


class _InwardBorders(Function):
    @staticmethod
    def forward(ctx: Any, crossings: Crossings, copies: Sequence[Tensor | None], *outside: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.crossings, ctx.outside = crossings, outside
        ctx.has_copy = [copy is not None for copy in copies]
        # Views cannot be written to in place: copies must not be, activations that come in may.
        return *[tensor.detach() for tensor in outside], *[copy.view_as(copy) for copy in copies if copy is not None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_copies = iter(gradients[len(ctx.outside) :])
        found: list[Tensor | None] = []
        for index, (outside, has_copy) in enumerate(zip(ctx.outside, ctx.has_copy, strict=True)):
            uses = (gradients[index], next(of_copies) if has_copy else None)
            found.append(_leave(ctx, index, outside, [use for use in uses if use is not None]))
        return None, None, *found


def _leave(ctx: Any, index: int, outside: Tensor, gradients: list[Tensor]) -> Tensor | None:
    """The gradient of a tensor outside from those of its uses inside: each times 1/S in FP32, then summed."""
    if not gradients or ctx.crossings.take(outside, gradients, ctx, index):
        return None
    inverse = ctx.crossings.inverse(outside.device, ctx, index)
    dtype = _outside_dtype(outside.dtype)  # of an FP16 activation outside, autograd rounds it
    first, *others = [multiply(gradient, inverse, ctx.crossings).to(dtype) for gradient in gradients]
    return functools.reduce(torch.add, others, first)


def inward_borders(
    outside: Sequence[Tensor], copies: Sequence[Tensor | None], crossings: Crossings
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Bring tensors inside, in one autograd node for all of them; their gradients leave unscaled.

    Args:
        outside: parameters, or other tensors with grad, on one device.
        copies: the FP16/BF16 working copy of each, or None where it is not wanted.
        crossings: asked for 1/S when a gradient leaves.

    Returns:
        For each of ``outside`` an alias in its own dtype, and one of its copy (None where there is none).
    """
    inside = _InwardBorders.apply(crossings, copies, *outside)
    of_copies = iter(inside[len(outside) :])
    return list(inside[: len(outside)]), [None if copy is None else next(of_copies) for copy in copies]


class _OutputBorder(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, crossings: Crossings, deferred: bool) -> Tensor:
        ctx.crossings, ctx.dtype = crossings, output.dtype
        ctx.value = output.detach() if output.numel() == 1 else None
        # Never a view: callers change a loss in place (the Trainer does).
        return DeferredOutput(output) if deferred else output.to(_outside_dtype(output.dtype), copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        entering = multiply(gradient, ctx.crossings.scale(gradient.device), ctx.crossings).to(ctx.dtype)
        ctx.crossings.entered(ctx, entering)
        return entering, None, None


def _outside_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOWER_PRECISION_DTYPES else dtype


def output_border(output: Tensor, crossings: Crossings | None, *, deferred: bool = False) -> Tensor:
    """``output`` in FP32; its gradient is multiplied by the loss scale before it is cast to ``output``'s dtype.

    FP64 and complex outputs keep their dtype, with their gradient scaled all the same; all others pass.

    Args:
        output: any tensor.
        crossings: asked for S when a gradient enters; None where there are no gradients.
        deferred: cast FP16/BF16 values when they are read (:class:`DeferredOutput`); only where gradients are wanted.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    if crossings is not None and output.requires_grad and torch.is_grad_enabled():
        return _OutputBorder.apply(output, crossings, deferred and can_be_deferred(output))
    return output.to(_outside_dtype(output.dtype))
