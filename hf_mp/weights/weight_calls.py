"""Calls in a forward that mean a weight itself: ``.data``, ``.dtype``, and writes in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hf_mp.casting.handlers import Plan, PlannedCall
from hf_mp.casting.tables import CastRule

if TYPE_CHECKING:
    from hf_mp.weights.region import Region


def calls_of_weights(plan: Plan) -> Plan:
    """What a region does with them; calls that ``plan``, the tables, names are theirs."""
    writes = {func: PlannedCall(CastRule.UNLISTED, "write", write_in_place) for func in _writing_functions()}
    return {**{func: entry for func, entry in writes.items() if func not in plan}, **_DATA, **_DTYPE}


def _writing_functions() -> Iterator[Callable[..., Any]]:
    for holder, start in ((Tensor, ""), (torch, "_foreach_")):
        for name in dir(holder):
            # torch lists its in-place functions nowhere; their names tell.
            is_in_place = name.endswith("_") and not name.startswith("__") and name.startswith(start)
            if is_in_place or (holder is Tensor and name in _OPERATORS):
                yield getattr(holder, name)


_OPERATORS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
              "__ipow__", "__iand__", "__ior__", "__ixor__")  # fmt: skip


def write_in_place(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A write in place: into the parameter, where a slot's working copy is meant."""
    weights = None if is_dynamo_compiling() else region.thread.weights
    if weights is not None and args:
        targets = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        if any([weights.is_copy(target) for target in targets]):
            return weights.write(func, targets, args, kwargs)
    return func(*args, **kwargs)


def _read_or_set_data(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.data``, of which the parameter outside must know."""
    weights = region.thread.weights
    # What is read from one alias and written through it must reach the others, which autograd sees as separate tensors.
    first, *others = [args[0]] if weights is None else weights.data_of(args[0])
    for other in others:
        func(other, *args[1:])
    return func(first, *args[1:])


def _read_dtype(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    weights = None if is_dynamo_compiling() else region.thread.weights
    return func(*args) if weights is None else weights.dtype_of(args[0])


_DATA: Plan = {
    func: PlannedCall(CastRule.UNLISTED, "data", _read_or_set_data)
    for func in (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
}
_DTYPE: Plan = {Tensor.dtype.__get__: PlannedCall(CastRule.UNLISTED, "dtype", _read_dtype)}  # type: ignore[attr-defined]
