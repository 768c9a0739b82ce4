"""The borders of a scaled forward: the one place where a gradient is multiplied by the loss scale S, or by 1/S.

Forward is the identity (up to the dtype) everywhere. In backward, a gradient that enters the model's graph through one
of its outputs is multiplied by S, and one that leaves it, to a parameter or to any other tensor made outside, by 1/S.
Outside, every gradient is FP32 and true; inside, every FP16 gradient is S times larger and so clear of underflow
(Micikevicius et al. 2017, arXiv 1710.03740, section 3.2). S is that of the time of the backward.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hf_mp.policy import LOWER_PRECISION_DTYPES


class Crossings(Protocol):
    """What a border asks when a gradient crosses it."""

    def scale(self, device: torch.device) -> Tensor | None:
        """S, FP32 of shape (1,); None where nothing is scaled."""

    def inverse(self, device: torch.device, node: Any, index: int) -> Tensor | None:
        """1/S, FP32 of shape (1,), for what ``node`` hands on by its input ``index``; None where it is not scaled."""

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
    """``gradient`` times ``factor`` in FP32 (None for 1), differentiable; ``crossings`` hears of second derivatives."""
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


def _outside_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOWER_PRECISION_DTYPES else dtype


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


# Autograd runs what is ready in the order of these numbers, largest first. A border is made before the forward and
# would come last: all 16-bit gradients would wait for the end of the backward. With AccumulateGrad's, none waits.
_AT_ONCE = 2**64 - 1


@functools.cache
def _has_order() -> bool:
    found = hasattr(torch._C._FunctionBase, "_set_sequence_nr")
    if not found:
        warnings.warn(
            "this torch cannot order autograd nodes (_set_sequence_nr is gone): gradients reach the parameters at the "
            "end of a backward, which takes up to 2 bytes a parameter more, and DDP's all-reduce does not overlap",
            stacklevel=2,
        )
    return found


def inward_borders(
    outside: Sequence[Tensor], copies: Sequence[Tensor | None], crossings: Crossings
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Bring tensors of one device inside, in one autograd node for all of them; their gradients leave unscaled.

    Gives for each of ``outside`` an alias in its own dtype, and one of its FP16/BF16 copy (None where there is none).
    """
    inside = _InwardBorders.apply(crossings, copies, *outside)
    if (node := inside[0].grad_fn) is not None and _has_order():
        node._set_sequence_nr(_AT_ONCE)
    of_copies = iter(inside[len(outside) :])
    return list(inside[: len(outside)]), [None if copy is None else next(of_copies) for copy in copies]


class _OutputBorder(Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, crossings: Crossings, wrap: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.crossings, ctx.dtype = crossings, output.dtype
        ctx.value = output.detach() if output.numel() == 1 else None
        # Never a view: callers change a loss in place (the Trainer does).
        return output.to(_outside_dtype(output.dtype), copy=True) if wrap is None else wrap(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        entering = multiply(gradient, ctx.crossings.scale(gradient.device), ctx.crossings).to(ctx.dtype)
        ctx.crossings.entered(ctx, entering)
        return entering, None, None


def output_border(
    output: Tensor, crossings: Crossings | None, wrap: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """``output`` in FP32; its gradient is multiplied by the loss scale before it is cast to ``output``'s dtype.

    FP64 and complex outputs keep their dtype, with their gradient scaled all the same; all others pass. ``wrap`` makes
    the FP32 tensor of ``output``; default: a copy. Without ``crossings`` there are no gradients.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    if crossings is not None and output.requires_grad and torch.is_grad_enabled():
        return _OutputBorder.apply(output, crossings, wrap)
    return output.to(_outside_dtype(output.dtype))
