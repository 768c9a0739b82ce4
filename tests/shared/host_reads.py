"""Counts what a step tells the host of the values on its device, for which a GPU would have to be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# item(), bool(), float(), int(), `if tensor:`; equal(); and those whose result has a size that depends on values
_OPERATORS = {
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default,
    _aten._unique2.default,
}  # fmt: skip
_METHODS = ("tolist", "numpy", "cpu", "__array__")  # which reach no dispatcher on a CPU


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS:
            self.found.append("read")
        elif func is _aten._fused_adamw_.default:
            self.found.append("update")
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """``"read"`` for each value that the host asks for, ``"update"`` for each fused AdamW, as they happen."""
    found: list[str] = []

    def counted(original: Any) -> Any:
        return lambda *args, **kwargs: (found.append("read"), original(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch, _Operators(found):
        for name in _METHODS:
            patch.setattr(Tensor, name, counted(getattr(Tensor, name)))
        yield found
