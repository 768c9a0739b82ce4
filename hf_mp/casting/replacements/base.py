"""``ModelReplacement``: what is put in the place of a model's own piece while it is attached."""

from __future__ import annotations

import types
from typing import Any, ClassVar

from torch import nn

from hf_mp.casting.tables import TableName


class ModelReplacement:
    """One piece, which computes the same in fewer kernels or less memory.

    Attributes:
        tables: for which of autocast's tables; None for all.
    """

    tables: ClassVar[tuple[TableName, ...] | None] = None

    def install(self, model: nn.Module) -> None:
        """Put it wherever ``model`` has the piece."""
        raise NotImplementedError

    def remove(self, model: nn.Module) -> None:
        """Undo :meth:`install`."""
        raise NotImplementedError


def class_forward(module: nn.Module) -> Any:
    """The ``forward`` of the module's class, bound to it."""
    return types.MethodType(type(module).forward, module)
