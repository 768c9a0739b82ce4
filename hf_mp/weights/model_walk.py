"""The modules and parameters of a model, for what walks over them at every step: found once, and kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from hf_mp.policy import LOWER_PRECISION_DTYPES

# The modules of each model, held weakly, and by identity what each of them has inside.
_WALKS: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], list[int]]] = (
    weakref.WeakKeyDictionary()
)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, in a third of the time while no module is added, replaced or removed."""
    references, children = _WALKS.get(model, ([], None))
    # A module that was removed may be gone, and its address taken by another one.
    modules = [module for reference in references if (module := reference()) is not None]
    if len(modules) != len(references) or _children(modules) != children:
        modules = list(model.modules())
        _WALKS[model] = [weakref.ref(module) for module in modules], _children(modules)
    return modules


def model_parameters(model: nn.Module) -> list[nn.Parameter]:
    """``list(model.parameters())``, faster by :func:`modules_of`."""
    found = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    # A tied weight once; parameters are compared by identity, since == compares their values.
    return list({id(parameter): parameter for parameter in found}.values())


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters in all groups of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def widen_buffers(model: nn.Module) -> None:
    """Make 16-bit buffers FP32: running statistics in FP16 would swamp their updates, as weights would."""
    for buffer in model.buffers():
        if buffer.dtype in LOWER_PRECISION_DTYPES:
            buffer.data = buffer.data.float()


def _children(modules: Iterable[nn.Module]) -> list[int]:
    return [id(child) for module in modules for child in module._modules.values()]
