"""``fp32_head=True`` where TRL multiplies by the head's weight itself, in the place of calling the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

from torch import nn

from hf_mp.step.forward import entry_points

_MARK, _OPTION = "fused_lm_head", "cast_lm_head_to_fp32"  # of trl.trainer.utils.add_fused_lm_head


def set_fused_heads_to_fp32(model: nn.Module) -> Callable[[], None]:
    """Switch on what TRL's fused head was made with or without: FP32, outside of autocast.

    TRL makes it before training, also where its config has no such option (DPO, RLOO).

    Returns:
        What switches it back.

    Raises:
        ValueError: for a fused head without that option.
    """
    before = [(cell, cell.cell_contents) for module in entry_points(model) for cell in _options(module)]
    for cell, _ in before:
        cell.cell_contents = True

    def switch_back() -> None:
        for cell, value in before:
            cell.cell_contents = value

    return switch_back


def _options(module: nn.Module) -> Iterator[CellType]:
    """The variable of each fused forward among those that ``module`` has over its own."""
    # TRL's function reads its option from a closure: there is no attribute to set. Others may have wrapped it since.
    forward: Any = module.__dict__.get("forward")
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        code = getattr(function, "__code__", None)
        if code is not None and _MARK in code.co_varnames:
            if _OPTION not in code.co_freevars:
                raise ValueError(
                    "fp32_head=True: this version of TRL multiplies by the head's weight itself, and has no "
                    f"{_OPTION} to do that in FP32: use TRL 1.16, or leave fp32_head out"
                )
            yield function.__closure__[code.co_freevars.index(_OPTION)]
        forward = getattr(forward, "original", None) or getattr(function, "__wrapped__", None)
