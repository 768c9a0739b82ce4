"""Cached modules and parameters of a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.native import native

_OF_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpointing and torch.compile
# Weak references to the modules of each model, and the key of their child modules.
_CACHE: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], Any]] = weakref.WeakKeyDictionary()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return ``list(model.modules())``, in a third of the time while no module is added, replaced or removed."""
    references, children = _CACHE.get(model, ([], None))
    # The address of a freed module may be in use again, so references are compared too.
    modules = [module for reference in references if (module := reference()) is not None]
    if len(modules) != len(references) or _children(modules) != children:
        modules = list(model.modules())
        _CACHE[model] = [weakref.ref(module) for module in modules], _children(modules)
    return modules


def _children(modules: list[nn.Module]) -> Any:
    extension = native()
    found = None if extension is None else extension.children(modules)
    return [id(child) for module in modules for child in module._modules.values()] if found is None else found


class ModelIndex:
    """Modules and weights of a model. Equal to an earlier one if only values of weights changed."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules_of(model)
        # The weights stay referenced, so that no other weight has an address in the key.
        self.weights, self._key = weights_and_key(self.modules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelIndex) and self._key == other._key and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]


def weights_and_key(modules: list[nn.Module]) -> tuple[list[Any], Any]:
    """Return the weights of ``modules``, with repeats, and a key of all that determines their unscale nodes."""
    extension = native()
    found = None if extension is None else extension.weights_and_key(modules)
    return weights_and_key_reference(modules) if found is None else found


def weights_and_key_reference(modules: Sequence[nn.Module]) -> tuple[list[Any], Any]:
    """Reference of :func:`weights_and_key`; also used for TorchScript, where ``_parameters`` is no dictionary."""
    named: list[tuple[str, Any]] = [
        item for module in modules for item in module._parameters.items() if item[1] is not None
    ]
    key = [
        (
            *(name, id(weight), weight.requires_grad, weight.dtype, weight.data_ptr(), weight.shape),
            weight.stride() if weight.layout is torch.strided else None,
            # A weight with hooks has a separate unscale node.
            bool(weight._backward_hooks or weight._post_accumulate_grad_hooks),
        )
        for name, weight in named
    ]
    return [weight for _, weight in named], key


def model_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return ``list(model.parameters())``, faster by :func:`modules_of`."""
    found = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    # Each tied weight once. By identity, because == compares values.
    return list({id(parameter): parameter for parameter in found}.values())


def plain_name(name: str) -> str:
    """Return the name of a parameter without wrappers."""
    for wrapper in _OF_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def widen_buffers(model: nn.Module) -> None:
    """Cast 16-bit buffers to FP32, because FP16 running statistics would lose small updates."""
    for buffer in model.buffers():
        if buffer.dtype in LOWER_PRECISION_DTYPES:
            buffer.data = buffer.data.float()
