"""The modules and parameters of a model, for what walks over them at every step: found once, and kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.kernels.native import native
from hf_mp.policy import LOWER_PRECISION_DTYPES

# The modules of each model, held weakly, and the key of what they have inside.
_WALKS: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], Any]] = weakref.WeakKeyDictionary()


class Walk:
    """The modules and weights of a model, found in a third of the time while no module is added, replaced or removed.

    Equal to an earlier one where nothing but the values of weights has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        references, children = _WALKS.get(model, ([], None))
        # A module that was removed may be gone, and its address taken by another one.
        modules = [module for reference in references if (module := reference()) is not None]
        found, self.weights, self._seen = look(modules)
        if not modules or len(modules) != len(references) or found != children:
            modules = list(model.modules())
            found, self.weights, self._seen = look(modules)
            _WALKS[model] = [weakref.ref(module) for module in modules], found
        self.modules = modules

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Walk) and self._seen == other._seen and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]


def look(modules: list[nn.Module]) -> tuple[Any, list[Any], Any]:
    """Keys of what lies in ``modules``: of the modules there, and of the weights, which are given with all repeats.

    The key of a weight changes with all that decides about its border; not with its values. Weights are to be held as
    long as their key, since another could take the address of one that is gone.
    """
    found = None if (module := native()) is None else module.look(modules)
    return look_reference(modules) if found is None else found


def look_reference(modules: Sequence[nn.Module]) -> tuple[Any, list[Any], Any]:
    """What :func:`look` gives without C++, and where a module keeps its own in no dictionary, as TorchScript's."""
    children = [id(child) for module in modules for child in module._modules.values()]
    named: list[tuple[str, Any]] = [
        item for module in modules for item in module._parameters.items() if item[1] is not None
    ]
    return children, [weight for _, weight in named], [(name, *_key_of(weight)) for name, weight in named]


def _key_of(weight: Tensor) -> tuple[Any, ...]:
    place = weight.data_ptr(), weight.shape, weight.stride() if weight.layout is torch.strided else None
    # One that has hooks has a border of its own.
    has_hooks = bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
    return id(weight), weight.requires_grad, weight.dtype, *place, has_hooks


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, faster by :class:`Walk`."""
    return Walk(model).modules


def model_parameters(model: nn.Module) -> list[nn.Parameter]:
    """``list(model.parameters())``, faster by :class:`Walk`."""
    # A tied weight once; parameters are compared by identity, since == compares their values.
    return list({id(parameter): parameter for parameter in Walk(model).weights}.values())


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters in all groups of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def widen_buffers(model: nn.Module) -> None:
    """Make 16-bit buffers FP32: running statistics in FP16 would swamp their updates, as weights would."""
    for buffer in model.buffers():
        if buffer.dtype in LOWER_PRECISION_DTYPES:
            buffer.data = buffer.data.float()
