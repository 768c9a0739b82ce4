"""Matmuls of the experts of a mixture on a CPU, with rows (tokens) padded to multiples of :data:`ROWS`.

oneDNN compiles a kernel for each new shape in 16 bits, which takes longer than to multiply the tokens of one expert.
The number of these tokens differs in each step. Padded, few shapes are left. Rows of zeros change no other row, and add
zeros to the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
_ROWS_FIRST = ("linear", "matmul", "__matmul__")  # functions with the rows as first argument
_MAX_GROWTH = 1.5  # of the rows of all experts: with fewer tokens an expert, padding takes too much memory


def grouped_mm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``, ``torch._grouped_mm``, with padded groups of rows of its first argument.

    Other calls (groups of columns, another device, no offsets) are made as they are.
    """
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if offsets is None or not _are_rows(args, weight_dim=3):
        return func(*args, **kwargs)
    x, weight = args[:2]
    ends = offsets.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + ROWS - 1) // ROWS * ROWS
    padded_ends = padded.cumsum(0)
    used, padded_used = int(ends[-1]), int(padded_ends[-1])
    if used == padded_used or padded_used > _MAX_GROWTH * used:
        return func(*args, **kwargs)
    # Rows behind the last group belong to no expert. They stay behind it.
    shift = torch.full((len(x),), padded_used - used)
    shift[:used] = (padded_ends - padded - ends + counts).repeat_interleave(counts, output_size=used)
    rows = torch.arange(len(x)) + shift
    padded_x = x.new_zeros(padded_used + len(x) - used, x.shape[1]).index_copy(0, rows, x)
    others = {name: value for name, value in kwargs.items() if name != "offs"}
    result = func(padded_x, weight, padded_ends.to(offsets.dtype), *args[3:], **others)
    return result.index_select(0, rows)


def _are_rows(args: Sequence[Any], *, weight_dim: int) -> bool:
    """Whether the first two of ``args`` are rows on a CPU, and a weight of ``weight_dim`` dimensions."""
    # Not fake tensors, which have no offsets to read.
    if len(args) < 2 or type(args[0]) is not Tensor or not isinstance(args[1], Tensor):
        return False
    x, weight = args[:2]
    return x.device.type == "cpu" and x.dim() == 2 and weight.dim() == weight_dim


def is_expert_linear(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func``, a matmul, multiplies rows by the weight of one expert: a slice of a parameter of all."""
    if getattr(func, "__name__", "") not in _ROWS_FIRST or kwargs.get("out") is not None:
        return False
    return _are_rows(args, weight_dim=2) and args[1]._base is not None and args[1]._base.dim() == 3


def padded_linear(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``, for which :func:`is_expert_linear` is True, with padded rows of its first argument."""
    x = args[0]
    missing = -len(x) % ROWS
    if not missing or missing > (_MAX_GROWTH - 1) * len(x):
        return func(*args, **kwargs)
    return func(F.pad(x, (0, 0, 0, missing)), *args[1:], **kwargs)[: len(x)]
