"""``fp32_head=True`` for TRL's fused head, which multiplies by the weight of the head without calling the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

from torch import nn

from hf_mp.step.forward import entry_points

# Argument and closure variable of the forward in trl.trainer.utils.add_fused_lm_head.
_ARGUMENT, _OPTION = "fused_lm_head", "cast_lm_head_to_fp32"


def set_fused_heads_to_fp32(model: nn.Module) -> Callable[[], None]:
    """Make TRL's fused heads in ``model`` compute in FP32, also if the config has no such option (DPO, RLOO).

    Returns a function that restores them.
    """
    before = [(cell, cell.cell_contents) for module in entry_points(model) for cell in _option_cells(module)]
    for cell, _ in before:
        cell.cell_contents = True

    def restore() -> None:
        for cell, value in before:
            cell.cell_contents = value

    return restore


def _option_cells(module: nn.Module) -> Iterator[CellType]:
    """Yield the cell of the option of each fused forward in the wrappers of ``module``."""
    forward: Any = module.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        code: Any = getattr(function, "__code__", None)
        if code is not None and _ARGUMENT in code.co_varnames:
            if _OPTION not in code.co_freevars:
                raise ValueError(
                    "fp32_head=True: this version of TRL multiplies by the head's weight itself, and has no "
                    f"{_OPTION} to do that in FP32: use TRL 1.16, or leave fp32_head out"
                )
            yield function.__closure__[code.co_freevars.index(_OPTION)]
        forward = getattr(forward, "original", None) or getattr(function, "__wrapped__", None)
