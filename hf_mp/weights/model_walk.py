"""The modules and parameters of a model, for what walks over them at every step: found once, and kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from hf_mp.policy import LOWER_PRECISION_DTYPES


class _Walk:
    """The modules of a model, held weakly, and by identity what each of them has inside."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.children = _children(modules)


_WALKS: weakref.WeakKeyDictionary[nn.Module, _Walk] = weakref.WeakKeyDictionary()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """``list(model.modules())``, a third of its time while no module is added, replaced or removed."""
    if (walk := _WALKS.get(model)) is not None:
        # A module that was removed may be gone, and its address taken by another one.
        modules = [module for reference in walk.modules if (module := reference()) is not None]
        if len(modules) == len(walk.modules) and _children(modules) == walk.children:
            return modules
    modules = list(model.modules())
    _WALKS[model] = _Walk(modules)
    return modules


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """``list(model.parameters())``, as :func:`modules_of`."""
    found = [p for module in modules_of(model) for p in module._parameters.values() if p is not None]
    # A tied weight once; parameters are compared by identity, since == compares their values.
    return list({id(parameter): parameter for parameter in found}.values())


def widen_buffers(model: nn.Module) -> None:
    """Make 16-bit buffers FP32: running statistics in FP16 would swamp their updates, as weights would."""
    for buffer in model.buffers():
        if buffer.dtype in LOWER_PRECISION_DTYPES:
            buffer.data = buffer.data.float()


def _children(modules: Iterable[nn.Module]) -> list[int]:
    return [id(child) for module in modules for child in module._modules.values()]
