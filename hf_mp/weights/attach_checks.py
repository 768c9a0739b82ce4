"""Checks of models and optimizers before mixed precision is attached, and :func:`detach`."""

from __future__ import annotations

import glob
import inspect
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hf_mp.casting.experts import has_stacked_experts
from hf_mp.casting.rules import Rules
from hf_mp.models.base import ReplacedForward
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import Parallelism, check_parallelism, check_updates
from hf_mp.weights.split_parameter import SplitParameter

RUNTIMES: weakref.WeakSet[Any] = weakref.WeakSet()  # all MixedPrecision objects
_Module = TypeVar("_Module", bound=nn.Module)


def runtimes_of(model: nn.Module) -> list[Any]:
    """Return each MixedPrecision attached to ``model``, to a model inside it, or to one that contains it."""
    modules = list(model.modules())
    # attach() replaces the forward of a model and of each Transformers model inside. A library's wrapper has a copy of
    # its attributes, also after detach.
    forwards = [module.__dict__.get("forward") for module in modules]
    of_forwards = [one.runtime for one in forwards if isinstance(one, ReplacedForward) and hasattr(one, "runtime")]
    # A library may also have replaced the attached forward.
    within = set(map(id, modules))
    return list(dict.fromkeys([*of_forwards, *(one for one in RUNTIMES if id(one.model) in within)]))


def detach(model: _Module) -> _Module:
    """Remove mixed precision that ``prepare``, ``attach``, a Trainer or a deep copy attached to ``model``.

    Afterwards it is an ordinary FP32 model, and its optimizers have no hook, wrapper or copy. In a lean layout, then
    step your own optimizer instead of the one that ``prepare`` returned.

    Args:
        model: any module. Mixed precision of a model inside it, or of a wrapper around this Transformers model, is
            removed as well, if there is any.

    Returns:
        The same model.

    Raises:
        TypeError: for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"detach takes a model, not {type(model).__name__}: what hf_mp.prepare(...) returned first")
    for runtime in runtimes_of(model):
        runtime.detach()
    return model


def check_attachable(model: nn.Module, parallelism: Parallelism, policy: PrecisionPolicy, *, is_scaled: bool) -> None:
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel's replicas bypass the attached model: use DistributedDataParallel (torchrun)")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no floating parameters, so there is nothing to train in mixed precision"
        )
    check_parallelism(model, parallelism)
    if runtimes_of(model):
        raise ValueError(
            f"this {type(model).__name__}, or a part of it, is attached to a MixedPrecision already: call "
            "hf_mp.detach(model) first"
        )
    if policy.is_lean and isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"precision={str(policy)!r} stores weights in 16 bits, and this DistributedDataParallel has laid out its "
            "buckets for FP32: attach to the model first, then wrap it"
        )
    if policy.exact_generation and (reasons := list(_batch_dependence(model))):
        raise ValueError(f"exact_generation=True would not be exact for {type(model).__name__}: {reasons[0]}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, SplitParameter):
            raise ValueError(
                f"{name} is in the lean layout of another model that mixed precision is attached to, and its gradients "
                "would be mixed up: attach one model with both parts, or use a default layout (fp16, bf16) for both"
            )
    _check_scripts(model, policy, is_scaled=is_scaled)


def _check_scripts(model: nn.Module, policy: PrecisionPolicy, *, is_scaled: bool) -> None:
    """Raise a ValueError for a trained TorchScript module with weights that need an unscale node or a hook."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule) or not any(p.requires_grad for p in module.parameters()):
            continue
        if is_scaled:
            problem = "gradients would reach its parameters multiplied by the loss scale"
        elif policy.is_lean and isinstance(module, torch.jit.RecursiveScriptModule):
            problem = "it takes no hook that saves split parameters in FP32"
        else:
            continue
        raise ValueError(
            f"{name or type(model).__name__} is a TorchScript module, and {problem}: leave it as a Python module "
            "(torch.compile is supported), freeze its parameters, or use precision='bf16'"
        )


def _batch_dependence(model: nn.Module) -> Iterator[str]:
    """Yield the reasons why results of ``model`` depend on the number of tokens in a call, even with FP64 accumulation.

    Those of dense models and of experts that Transformers stacks do not.
    """
    for name, part in model.named_modules():
        # Set by Transformers for models that cannot go back to an earlier token (Mamba, RWKV).
        if getattr(part, "_is_stateful", False):
            yield "it has a recurrent state, which training computes in another order than generation"
        positions = getattr(type(part), "_prepare_position_ids_for_generation", None)
        if positions is not None and not positions.__qualname__.startswith("GenerationMixin."):
            yield "generate() counts its positions in a way of its own, over text and images"
        attention = getattr(getattr(part, "config", None), "_attn_implementation", None)
        if attention not in (None, "sdpa"):
            advice = "load it with attn_implementation='sdpa'"
            if not getattr(part, "_supports_sdpa", True):
                advice = "Transformers has no 'sdpa' for it, so leave exact_generation out: fp16 has a small gap"
            yield f"its attention is {attention!r}, with a softmax in FP32; {advice}"
        is_convolution = hasattr(part, "kernel_size")
        for key, weight in part._parameters.items():
            if weight is not None and weight.dim() > 2 and not is_convolution and not has_stacked_experts(part):
                yield f"{name}.{key} of shape {tuple(weight.shape)} has the weights of several experts in one"


def head_of(model: nn.Module) -> str:
    """Return the name of the output embedding of ``model`` or of a part; a ValueError if there is none."""
    for part in model.modules():
        head = getattr(part, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            if module is head:
                return name
    raise ValueError(
        f"fp32_head=True is for a model with an output embedding, and {type(model).__name__} has none: name the "
        "modules to run in FP32, as in rules={'score': 'fp32'}"
    )


def rules_for(model: nn.Module | None, policy: PrecisionPolicy, rules: Rules) -> Rules:
    """Return ``rules``, with an FP32 rule for the head of ``model`` if ``policy.fp32_head``."""
    if model is None:  # rules may name its modules
        return {} if any(isinstance(key, str) for key in rules) else rules
    if not policy.fp32_head:
        return rules
    head = glob.escape(head_of(model))
    if rules.get(head, "fp32") != "fp32":
        raise ValueError(f"fp32_head=True contradicts rules={{{head!r}: {rules[head]!r}}}: leave out one of them")
    # Last, because the last matching rule has priority.
    return {**{key: rule for key, rule in rules.items() if key != head}, head: "fp32"}


def check_optimizer(optimizer: Optimizer, model: nn.Module | None) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"attach_optimizer takes one torch optimizer, not {type(optimizer).__name__}: call it once for each"
        )
    check_closure(optimizer)
    if model is not None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter (requires_grad is False for all), so the optimizer "
                "would update nothing: unfreeze some before, or attach the model without an optimizer, to evaluate: "
                "hf_mp.MixedPrecision(...).attach(model)"
            )
        check_updates(optimizer, model)


def check_closure(optimizer: Optimizer) -> None:
    """Raise a ValueError if ``optimizer`` calls its closure several times in a step."""
    # LBFGS requires the argument; others call it once, and it is optional.
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} calls its closure several times in a step, and what overflowed in one of "
            "them cannot be skipped: use an optimizer whose step() works without a closure, or precision='fp32'"
        )
