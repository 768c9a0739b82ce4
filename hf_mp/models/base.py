"""Base classes of the replacements for parts of an attached model."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_mp.casting.tables import TableName


class ModelReplacement:
    """Replacement of one kind of part, with the same result in fewer kernels or less memory."""

    tables: tuple[TableName, ...] | None = None  # op tables that use it; None for all

    def install(self, model: nn.Module) -> None:
        """Replace every such part of ``model``."""
        raise NotImplementedError

    def remove(self, model: nn.Module) -> None:
        """Restore the parts of ``model``."""
        raise NotImplementedError


class ReplacedForward:
    """Replacement for the ``forward``, or another method ``name``, of one module.

    Pickling the module restores the original. A deep copy of the module gets a new replacement.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        # Weak: in a reference cycle, the weights would live until the garbage collector runs.
        self.module, self.name = weakref.ref(module), name
        before: Any = module.__dict__.get(name)
        is_original = before is not None and not isinstance(before, ReplacedForward)
        self.original = before if is_original else _class_method(module, name)

    def remove(self) -> None:
        """Restore the original method, unless a library has replaced this one."""
        module = self.module()
        if module is None or module.__dict__.get(self.name) is not self:
            return
        is_of_class = getattr(self.original, "__func__", None) is getattr(type(module), self.name, None)
        # Through vars(): setattr and delattr of nn.Module search parameters and buffers first.
        if is_of_class:
            del vars(module)[self.name]
        else:
            vars(module)[self.name] = self.original

    # torch.export reads it first. Without it, the error does not name the cause.
    @property
    def __code__(self) -> Any:
        raise AttributeError("torch.export cannot see through a model that is attached: export hf_mp.detach(model)")

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> ReplacedForward:
        """Return the replacement for ``module``, a deep copy."""
        return type(self)(module, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward:
        if (copied := memo.get(id(self.module()))) is None:  # deepcopy copies a module before its attributes
            raise TypeError("a replaced forward is copied only together with its model: copy.deepcopy(model)")
        return self.for_copy(copied, memo)

    def __reduce__(self) -> Any:
        return _class_method, (self.module(), self.name)


@dataclass(frozen=True)
class ForwardReplacement(ModelReplacement):
    """Replaces the ``forward`` of modules of some classes, except where a library has replaced it already."""

    kind: type[ReplacedForward]
    is_for: Callable[[type[Any]], bool]
    tables: tuple[TableName, ...] | None = None

    def install(self, model: nn.Module) -> None:
        for module in model.modules():
            if "forward" not in vars(module) and self.is_for(type(module)):
                vars(module)["forward"] = self.kind(module)

    def remove(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(forward := vars(module).get("forward"), self.kind):
                forward.remove()


def _class_method(module: Any, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)
