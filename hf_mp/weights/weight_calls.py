"""Calls in a forward that mean a weight itself: ``.data``, ``.dtype``, and gradients that are asked for there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hf_mp.casting.handlers import Plan, PlannedCall
from hf_mp.casting.tables import CastRule

if TYPE_CHECKING:
    from hf_mp.weights.region import Region


def _read_or_set_data(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.data``, of which the parameter outside must know."""
    slots = region.thread.slots
    # What is read from one alias and written through it must reach the others, which autograd sees as separate tensors.
    first, *others = [args[0]] if slots is None else slots.data_of(args[0])
    for other in others:
        func(other, *args[1:])
    return func(first, *args[1:])


def _read_dtype(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    slots = None if is_dynamo_compiling() else region.thread.slots
    return func(*args) if slots is None else slots.dtype_of(args[0])


def _take_gradients(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if (slots := region.thread.slots) is None:
        return func(*args, **kwargs)
    slots.must_be_watched = True  # so that later forwards are asked as well
    # Products may use another alias of a weight, and some of a CPU write the gradient of the weight itself.
    outputs, inputs = args
    return func(outputs, [slots.outside_of(one) if isinstance(one, Tensor) else one for one in inputs], **kwargs)


CALLS_OF_WEIGHTS: Plan = {
    **dict.fromkeys(
        (Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
        PlannedCall(CastRule.UNLISTED, "data", _read_or_set_data),
    ),
    Tensor.dtype.__get__: PlannedCall(CastRule.UNLISTED, "dtype", _read_dtype),  # type: ignore[attr-defined]
    torch.autograd.grad: PlannedCall(CastRule.UNLISTED, "grad", _take_gradients),
}
"""What a region does with them."""
