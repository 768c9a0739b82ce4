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
_MAX_GROWTH = 1.5  # of the rows of all experts: with fewer tokens an expert, padding takes too much memory


def grouped_mm(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``, ``torch._grouped_mm``, with padded groups of rows of its first argument.

    Other calls (groups of columns, another device, no offsets) are made as they are.
    """
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if len(args) < 2 or offsets is None or not _are_grouped_rows(*args[:2]):
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


def _are_grouped_rows(x: Any, weight: Any) -> bool:
    # Not a fake tensor, which has no offsets to read.
    is_on_cpu = type(x) is Tensor and isinstance(weight, Tensor) and x.device.type == "cpu"
    return is_on_cpu and x.dim() == 2 and weight.dim() == 3


def is_expert_linear(name: str, args: Sequence[Any]) -> bool:
    """Whether a call of op ``name`` multiplies rows by the weight of one expert: a slice of a parameter of all."""
    if name not in ("linear", "matmul") or len(args) < 2:
        return False
    x, weight = args[:2]
    if type(x) is not Tensor or not isinstance(weight, Tensor) or x.dim() != 2 or weight.dim() != 2:
        return False
    base = weight._base
    return base is not None and base.dim() == 3 and x.device.type == "cpu"


def padded_linear(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func``, for which :func:`is_expert_linear`, with padded rows of its first argument."""
    x = args[0]
    missing = -len(x) % ROWS
    if not missing or missing > (_MAX_GROWTH - 1) * len(x):
        return func(*args, **kwargs)
    return func(F.pad(x, (0, 0, 0, missing)), *args[1:], **kwargs)[: len(x)]
