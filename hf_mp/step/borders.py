"""The borders of the scaled region: where gradients are multiplied by the loss scale, and where by its inverse.

Forward is the identity (up to the dtype) everywhere. In backward a gradient that enters the model's graph through one
of its outputs is multiplied by S, and one that leaves it, to a parameter or to an input, by 1/S. Outside, every
gradient is FP32 and true; inside, every FP16 gradient is S times larger and so clear of underflow (Micikevicius et al.
2017, section 3.2).

Second derivatives: backward of the scaling and of the unscaling is the identity. What enters through the derivative of
an unscaled gradient (a gradient penalty) then travels inside at S times its value, as everything inside does, and
leaves through the parameter border once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hf_mp.casting.deferred_output import DeferredOutput, can_be_deferred
from hf_mp.policy import LOWER_PRECISION_DTYPES


class BorderFunction(Function):
    """An autograd function that takes parameters as they are."""


class _Multiply(BorderFunction):
    """Multiply a gradient by a factor in FP32; its own backward is the identity."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor) -> Tensor:
        ctx.dtype = gradient.dtype
        return gradient * factor  # FP16 times FP32 of shape (1,) is computed in FP32 and is FP32: one kernel

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def _times(gradient: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:  # nothing is scaled
        return gradient
    if torch.is_grad_enabled():  # create_graph=True
        return _Multiply.apply(gradient, factor).reshape(gradient.shape)
    if gradient.is_sparse:
        return gradient.to(torch.float32) * factor.squeeze()
    return (gradient * factor).reshape(gradient.shape)


class _OutputBorder(BorderFunction):
    @staticmethod
    def forward(ctx: Any, output: Tensor, scale: Tensor | None, on_backward: Callable[[], None] | None) -> Tensor:
        ctx.scale, ctx.on_backward, ctx.dtype = scale, on_backward, output.dtype
        # Never a view: callers change a loss in place (the Trainer does).
        return output.to(_outside_dtype(output.dtype), copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.on_backward is not None:
            ctx.on_backward()
        return _times(gradient, ctx.scale).to(ctx.dtype), None, None


class _DeferredOutputBorder(_OutputBorder):
    @staticmethod
    def forward(ctx: Any, output: Tensor, scale: Tensor | None, on_backward: Callable[[], None] | None) -> Tensor:
        ctx.scale, ctx.on_backward, ctx.dtype = scale, on_backward, output.dtype
        return DeferredOutput(output)


class _LeavingBorder(BorderFunction):
    """The border to a parameter or an input: ``value`` goes on in place of ``outside``, whose gradient it earns."""

    @staticmethod
    def forward(ctx: Any, outside: Tensor, value: Tensor | None, inverse: Tensor | None) -> Tensor:
        ctx.inverse, ctx.dtype = inverse, outside.dtype
        # A parameter that is a working copy itself decides per backward in which form it takes a gradient.
        ctx.take_scaled = getattr(outside, "take_scaled_gradient", None)
        if ctx.take_scaled is not None:
            ctx.dtype = torch.float32
        return outside.view_as(outside) if value is None else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.take_scaled is not None and accumulates(ctx) and ctx.take_scaled(gradient):
            return None, None, None
        return unscale(gradient, ctx.inverse).to(ctx.dtype), None, None


def accumulates(node: Any) -> bool:
    """Whether this is the backward of ``loss.backward()`` into ``.grad``, whose reader knows what it finds there."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    try:
        return torch._C._will_engine_execute_node(node.next_functions[0][0])
    except RuntimeError:  # how torch says that this is torch.autograd.grad
        return False


def unscale(gradient: Tensor, inverse: Tensor | None) -> Tensor:
    """``gradient`` multiplied by the inverse loss scale in FP32; differentiable."""
    return _times(gradient, inverse)


def _outside_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOWER_PRECISION_DTYPES else dtype


def output_border(
    output: Tensor, scale: Tensor | None, on_backward: Callable[[], None] | None = None, *, deferred: bool = False
) -> Tensor:
    """``output`` in FP32; its gradient is multiplied by the loss scale before it is cast to ``output``'s dtype.

    FP64 and complex outputs keep their dtype, with their gradient scaled all the same; all others pass.

    Args:
        output: any tensor.
        scale: FP32, of shape (1,), on ``output``'s device; its value at the time of the backward counts. None where
            nothing is scaled.
        on_backward: called when a gradient enters through this output.
        deferred: cast FP16/BF16 values when they are read (:class:`DeferredOutput`); only where gradients are wanted.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    if output.requires_grad and torch.is_grad_enabled():
        border = _DeferredOutputBorder if deferred and can_be_deferred(output) else _OutputBorder
        return border.apply(output, scale, on_backward)
    return output.to(_outside_dtype(output.dtype))


def input_border(value: Tensor, inverse: Tensor | None) -> Tensor:
    """``value`` unchanged; a gradient that leaves the region through it is multiplied by the inverse loss scale."""
    if value.requires_grad and torch.is_grad_enabled():
        return _LeavingBorder.apply(value, None, inverse)
    return value


def parameter_border(parameter: Tensor, working_copy: Tensor | None, inverse: Tensor | None) -> Tensor:
    """``working_copy`` (or the parameter itself) for use inside; ``parameter`` receives its gradient unscaled."""
    if parameter.requires_grad and torch.is_grad_enabled():
        return _LeavingBorder.apply(parameter, working_copy, inverse)
    return parameter if working_copy is None else working_copy


def needs_borders(function: type[Function]) -> bool:
    """Whether borders are put around the arguments of this autograd function: it is neither ours nor torch's.

    torch's own carry whole graphs and their parameters (a compiled model), with borders inside.
    """
    return not issubclass(function, BorderFunction) and not function.__module__.startswith("torch.")


def watch_autograd_functions(border_argument: Callable[[Any], Any]) -> None:
    """Put the parameter border around the arguments of every autograd function (``MyFunction.apply(x, weight)``).

    A torch function mode does not see such a call, and a parameter that went into it bare would be given a gradient
    that is still scaled. Installed once, for all functions but those of the borders themselves. In compiled code
    ``apply`` is the compiler's own: see :mod:`hf_mp.casting.torch_patches.compiler`.

    Args:
        border_argument: gives the argument to use instead; called at every ``apply``, inside a region or not.
    """
    original = Function.apply.__func__  # type: ignore[attr-defined]

    @torch.compiler.disable
    @functools.wraps(original)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if needs_borders(cls):
            args = tuple([border_argument(arg) for arg in args])
            kwargs = {key: border_argument(arg) for key, arg in kwargs.items()}
        return original(cls, *args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]


def watch_script_functions(border_argument: Callable[[Any], Any]) -> None:
    """Put the parameter border around the arguments of every function that ``torch.jit.script`` compiled.

    No torch function mode sees what runs in TorchScript either. Parameters that a scripted *module* holds are out of
    reach: see :func:`check_reachable`.

    Args:
        border_argument: as for :func:`watch_autograd_functions`.
    """
    original: Any = torch.jit.ScriptFunction.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple([border_argument(arg) for arg in args])
        return original(self, *args, **{key: border_argument(arg) for key, arg in kwargs.items()})

    torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign]


def check_reachable(model: nn.Module) -> None:
    """Refuse a model with parameters that no border can be put around, where a loss is scaled.

    Raises:
        ValueError: if a part of ``model`` was compiled by TorchScript and has trainable parameters.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"{name or type(model).__name__} is a TorchScript module, and gradients would reach its parameters "
                "multiplied by the loss scale: leave it as a Python module (torch.compile is supported), freeze its "
                "parameters, or use a precision that scales nothing (bf16)"
            )
