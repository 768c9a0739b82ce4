"""The modules and parameters of a model, for what walks over them at every step: found once, and kept."""

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
# The modules of each model, held weakly, and the key of what they have inside.
_WALKS: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], Any]] = weakref.WeakKeyDictionary()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, in a third of the time while no module is added, replaced or removed."""
    references, children = _WALKS.get(model, ([], None))
    # A module that was removed may be gone, and its address taken by another one.
    modules = [module for reference in references if (module := reference()) is not None]
    if len(modules) != len(references) or _children(modules) != children:
        modules = list(model.modules())
        _WALKS[model] = [weakref.ref(module) for module in modules], _children(modules)
    return modules


def _children(modules: list[nn.Module]) -> Any:
    """A key of the modules that lie in ``modules``."""
    found = None if (module := native()) is None else module.children(modules)
    return [id(child) for each in modules for child in each._modules.values()] if found is None else found


class Walk:
    """The modules and weights of a model; equal to an earlier one where nothing but the values of weights changed."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules_of(model)
        # Weights are held as long as their key: another could take the address of one that is gone.
        self.weights, self._key = look(self.modules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Walk) and self._key == other._key and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]


def look(modules: list[nn.Module]) -> tuple[list[Any], Any]:
    """The weights in ``modules``, with all repeats, and a key of all that decides about their borders."""
    found = None if (module := native()) is None else module.look(modules)
    return look_reference(modules) if found is None else found


def look_reference(modules: Sequence[nn.Module]) -> tuple[list[Any], Any]:
    """What :func:`look` gives without C++, and where a module keeps its own in no dictionary, as TorchScript's."""
    named: list[tuple[str, Any]] = [
        item for module in modules for item in module._parameters.items() if item[1] is not None
    ]
    key = [
        (
            *(name, id(weight), weight.requires_grad, weight.dtype, weight.data_ptr(), weight.shape),
            weight.stride() if weight.layout is torch.strided else None,
            # One that has hooks has a border of its own.
            bool(weight._backward_hooks or weight._post_accumulate_grad_hooks),
        )
        for name, weight in named
    ]
    return [weight for _, weight in named], key


def model_parameters(model: nn.Module) -> list[nn.Parameter]:
    """``list(model.parameters())``, faster by :func:`modules_of`."""
    found = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    # A tied weight once; parameters are compared by identity, since == compares their values.
    return list({id(parameter): parameter for parameter in found}.values())


def plain_name(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    for wrapper in _OF_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters in all groups of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def widen_buffers(model: nn.Module) -> None:
    """Make 16-bit buffers FP32: running statistics in FP16 would swamp their updates, as weights would."""
    for buffer in model.buffers():
        if buffer.dtype in LOWER_PRECISION_DTYPES:
            buffer.data = buffer.data.float()
