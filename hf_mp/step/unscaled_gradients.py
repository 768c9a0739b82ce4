"""``hf_mp.unscaled_gradients``: a decorator for gradient hooks and backwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hf_mp.casting.autocast_stack import state
from hf_mp.kernels.nested import apply_to_tensors, tensors_in
from hf_mp.scale_boundary import is_in_graph, scale_gradient
from hf_mp.step.custom_backward import CustomBackward, scaled_runtimes
from hf_mp.step.runtime import StepRuntime

_Function = TypeVar("_Function", bound=Callable[..., Any])
# torch has no public API for the node that runs.
_current_node = getattr(torch._C, "_current_autograd_node", lambda: None)


def unscaled_gradients(function: _Function) -> _Function:
    """Call ``function`` with unscaled FP32 gradients, and multiply the gradients that it returns by the loss scale.

    In the graph of an attached model, gradients are multiplied by the loss scale. A function that is not linear in them
    needs this decorator::

        # in forward(), where the tensor is computed
        hidden.register_hook(hf_mp.unscaled_gradients(lambda gradient: gradient.clamp(-1, 1)))

        class Clamped(torch.autograd.Function):
            @staticmethod
            @hf_mp.unscaled_gradients
            def backward(ctx, gradient): ...

    Unscaled gradients (``bf16``, outside the graph of an attached model) are passed unchanged.

    Args:
        function: a hook for ``Tensor.register_hook``, ``nn.Module.register_full_backward_hook`` or
            ``register_full_backward_pre_hook``, or the ``backward`` of a ``torch.autograd.Function``. Backwards that
            it runs are not scaled, so small FP16 gradients in them may underflow.

    Returns:
        A function with the same arguments. Gradients that a hook returns are cast to their original dtypes.

    Raises:
        RuntimeError: at the call of a tensor's hook that was decorated outside a forward, and of the hook of a module
            that runs both as an attached model and inside one.
    """
    made_in = state.forward

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        backward = state.backward
        if isinstance(args[0], FunctionCtx) and isinstance(backward, CustomBackward):
            return _call_backward(function, args, backward) if backward.is_scaled else function(*args)
        runtime = _runtime_of_hook(args, made_in)
        return function(*args) if runtime is None else _call_hook(function, args, runtime)

    return call  # type: ignore[return-value]


def _call_backward(function: Callable[..., Any], args: tuple[Any, ...], backward: CustomBackward) -> Any:
    """Call ``function``, the scaled ``backward``, with unscaled gradients; return its results scaled."""
    unscaled = apply_to_tensors(functools.partial(_multiplied, backward.runtime, is_inverse=True), args)
    with backward.unscaled():
        results = function(*unscaled)
        return apply_to_tensors(functools.partial(_multiplied, backward.runtime, is_inverse=False), results)


def _call_hook(function: Callable[..., Any], args: tuple[Any, ...], runtime: StepRuntime) -> Any:
    """Call ``function``, a hook, with unscaled gradients; return its results scaled, in the dtypes of the gradients."""
    unscaled = apply_to_tensors(functools.partial(_multiplied, runtime, is_inverse=True), args)
    # The result of a module's hook replaces its second argument.
    dtypes = (tensor.dtype for tensor in tensors_in(args[0] if isinstance(args[0], Tensor) else args[1]))

    def scale(gradient: Tensor) -> Tensor:
        return _multiplied(runtime, gradient, is_inverse=False).to(next(dtypes, gradient.dtype))

    return apply_to_tensors(scale, function(*unscaled))


def _multiplied(runtime: StepRuntime, gradient: Tensor, *, is_inverse: bool) -> Tensor:
    """Multiply ``gradient`` by S or 1/S in FP32; return integers unchanged."""
    factors = runtime.scaler.scale_and_inverse(gradient.device)
    factor = factors.inverse if is_inverse else factors.scale
    return scale_gradient(gradient, factor, runtime.scale_provider) if gradient.is_floating_point() else gradient


def _runtime_of_hook(args: tuple[Any, ...], made_in: Any) -> StepRuntime | None:
    """Return the runtime that scales the gradients ``args`` of a hook; None if they are unscaled.

    ``made_in`` is the :class:`ForwardContext` in which the hook was decorated, or None.
    """
    runtimes = scaled_runtimes()
    if not runtimes:
        return None
    if not isinstance(args[0], Tensor):
        return _runtime_of_module(args[0], runtimes)
    if made_in is None:
        raise RuntimeError(
            "a tensor's hook was decorated with hf_mp.unscaled_gradients outside of a forward of the attached model, "
            "so that it is not known whether the tensor belongs to the model's graph: decorate it in forward()"
        )
    node = _current_node()
    # Nodes of a recomputation, in autograd's threads, have other numbers; functorch has no record of the first node.
    has_first_node = made_in.weights is not None and not made_in.is_recomputing
    first_node = made_in.weights.external.first_node if has_first_node else -1
    is_scaled = made_in.runtime in runtimes and (node is None or is_in_graph(node, first_node))
    return made_in.runtime if is_scaled else None


def _runtime_of_module(module: Any, runtimes: list[Any]) -> StepRuntime | None:
    """Return that of ``runtimes`` with ``module`` inside its model; None for the model itself: outputs are unscaled."""
    within = [runtime for runtime in runtimes if runtime.model is not None and module in runtime.model.modules()]
    if any([runtime.model is module for runtime in within]):
        return None
    forwards = [forward for runtime in within for reference in runtime.forwards if (forward := reference()) is not None]
    is_attached_part = any([forward.module() is module for forward in forwards])
    if is_attached_part or len(within) > 1:
        raise RuntimeError(
            f"a hook of {type(module).__name__} was decorated with hf_mp.unscaled_gradients, and its gradients are "
            "scaled only if it is called inside of an attached model: register the hook at a module inside of it"
        )
    return within[0] if within else None
