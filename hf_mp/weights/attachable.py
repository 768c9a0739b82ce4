"""What mixed precision can be attached to, and what is refused, with the way out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_mp.policy import PrecisionPolicy
from hf_mp.weights.distributed import check_masters, check_parallelism, updates
from hf_mp.weights.split_parameter import SplitParameter

UNKNOWN_OPTIMIZER = (
    "this model is attached to a MixedPrecision, and an optimizer that it does not know updates its weights: updates "
    "that overflow are not skipped, and the loss scale stands still. Call attach_optimizer(optimizer), or detach()"
)
NO_BORDER = (
    "gradients reached the parameters of an attached model, but none came in through its outputs, so the loss scale "
    "was not applied and small ones may be lost. The loss was computed from a tensor that forward() did not return (a "
    "hook, an attribute, a closure): return it, in a tuple, a mapping, a dataclass or an object"
)


def check_attachable(model: nn.Module) -> None:
    """Raise a ValueError if mixed precision cannot be attached to ``model`` in any layout."""
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel replicates a model behind our back: use DistributedDataParallel (torchrun)")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no floating parameters, so there is nothing to train in mixed precision"
        )
    check_parallelism(model)
    if any(hasattr(module.__dict__.get("forward"), "runtime") for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is attached to a MixedPrecision already: detach() that first")


def check_layout(model: nn.Module, policy: PrecisionPolicy, *, is_scaled: bool) -> None:
    """Raise a ValueError if mixed precision cannot be attached to ``model`` with this policy."""
    if policy.is_lean and isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"precision={str(policy)!r} stores weights in 16 bits, and this DistributedDataParallel has laid out its "
            "buckets for FP32: attach to the model first, then wrap it"
        )
    if policy.exact_generation and (reasons := list(_inexact(model))):
        raise ValueError(f"exact_generation=True would not be exact for {type(model).__name__}: {reasons[0]}")
    if not policy.is_lean:
        check_masters(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, SplitParameter) and parameter.is_saved_in_full:
            raise ValueError(
                f"{name} is in the lean layout of another model that mixed precision is attached to, and its gradients "
                "would be mixed up: attach one model with both parts, or use a default layout (fp16, bf16) for both"
            )
    for name, module in model.named_modules() if is_scaled else ():
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"{name or type(model).__name__} is a TorchScript module, and gradients would reach its parameters "
                "multiplied by the loss scale: leave it as a Python module (torch.compile is supported), freeze its "
                "parameters, or use a precision that scales nothing (bf16)"
            )


def _inexact(model: nn.Module) -> Iterator[str]:
    """Why results of ``model`` depend on how many tokens are computed at once, even with sums in FP64.

    In dense models only products and attention depend on it.
    """
    for name, part in model.named_modules():
        if getattr(part, "_is_stateful", False):
            yield "it has a recurrent state, which training computes in another order than generation"
        attention = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if attention not in (None, "sdpa"):
            yield f"its attention is {attention!r}, with a softmax in FP32; load it with attn_implementation='sdpa'"
        is_convolution = isinstance(part, torch.nn.modules.conv._ConvNd)
        for key, weight in part._parameters.items():
            if weight is not None and weight.dim() > 2 and not is_convolution:
                yield f"{name}.{key} of shape {tuple(weight.shape)} has the weights of several experts in one"


def head_of(model: nn.Module) -> str:
    """The name of the output embedding of ``model``, as ``get_output_embeddings()`` of it or of a part has it.

    Raises:
        ValueError: where there is none.
    """
    for part in model.modules():
        head = getattr(part, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            if head is not None and module is head:
                return name
    raise ValueError(
        f"fp32_head=True is for a model with an output embedding, and {type(model).__name__} has none: name the "
        "modules to run in FP32, as in rules={'score': 'fp32'}"
    )


def check_optimizer(optimizer: Optimizer, model: nn.Module | None) -> None:
    """Raise a TypeError or ValueError where the steps of ``optimizer`` cannot be guarded for ``model``."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"attach_optimizer takes one torch optimizer, not {type(optimizer).__name__}: call it once for each"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} calls its closure several times in a step, and what overflowed in one of "
            "them cannot be skipped: use an optimizer whose step() works without a closure, or precision='fp32'"
        )
    if model is not None and not updates(optimizer, model):
        raise ValueError(
            f"no parameter of this {type(optimizer).__name__} belongs to the attached {type(model).__name__}: make "
            "the optimizer from model.parameters()"
        )


def check_step(optimizer: Any, *, in_scaled_backward: bool) -> None:
    """Raise a RuntimeError if a ``torch.amp.GradScaler`` steps ``optimizer``, as its attributes tell, or a backward."""
    if in_scaled_backward:
        raise RuntimeError(
            "optimizer.step() was called in a backward, of which the other gradients would be divided by the next loss "
            "scale: use free_gradients='backward' in a lean layout, or a precision that scales nothing (bf16)"
        )
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        optimizer.found_inf = optimizer.grad_scale = None
        raise RuntimeError(
            "a torch.amp.GradScaler steps the optimizer of an attached model, whose gradients are unscaled already: "
            "call loss.backward() and optimizer.step() without a scaler"
        )
