"""``ModelReplacement``: what is put in the place of a model's own piece while it is attached."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_mp.casting.tables import TableName


class ModelReplacement:
    """One piece, which computes the same in fewer kernels or less memory."""

    tables: tuple[TableName, ...] | None = None  # for which of autocast's; None for all

    def install(self, model: nn.Module) -> None:
        """Put it wherever ``model`` has the piece."""
        raise NotImplementedError

    def remove(self, model: nn.Module) -> None:
        raise NotImplementedError


class ReplacedForward:
    """Takes the place of a module's ``forward``; a pickled module has its own again, a deep copy one that is new.

    Or of another method ``name``.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        # The module holds this object: a strong reference would keep its weights until the garbage collector runs.
        self.module, self.name = weakref.ref(module), name
        before = module.__dict__.get(name)
        self.original = _class_method(module, name) if before is None or isinstance(before, ReplacedForward) else before

    def remove(self) -> None:
        """Give the module its own forward back, unless a library has put one over this."""
        module = self.module()
        if module is None or module.__dict__.get(self.name) is not self:
            return
        # In vars(): nn.Module's own setattr and delattr look through parameters and buffers first.
        del vars(module)[self.name]
        if getattr(self.original, "__func__", None) is not getattr(type(module), self.name, None):
            vars(module)[self.name] = self.original

    # torch.export asks for it first, and without it fails in words that name nothing.
    @property
    def __code__(self) -> Any:
        raise AttributeError("torch.export cannot see through a model that is attached: export hf_mp.detach(model)")

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> ReplacedForward:
        """The replacement for a deep copy of the module."""
        return type(self)(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedForward:
        if (copied := memo.get(id(self.module()))) is None:  # a module is copied before its attributes
            raise TypeError("a replaced forward is copied only together with its model: copy.deepcopy(model)")
        return self.for_copy(copied, memo)

    def __reduce__(self) -> Any:
        return _class_method, (self.module(), self.name)


@dataclass(frozen=True)
class ForwardReplacement(ModelReplacement):
    """Gives the modules of some classes another ``forward``; one that a library has put over the class's stays."""

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
