"""Matmuls and attention with FP64 accumulation: no bit of a result depends on the summation order of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_mp.casting.cpu.upcast import run_through_fp32
from hf_mp.casting.handlers import CASTABLE, call_unchanged, cast_all
from hf_mp.casting.plan_entry import Mode, Plan
from hf_mp.casting.tables import OPS, CastRule, TableName
from hf_mp.kernels.nested import map_tensors, tensors_in

_GROUPED = ("_grouped_mm", "grouped_mm_fallback")  # grouped matmuls of stacked experts, of torch and of Transformers


def exact_plan(plan: Plan, tables: TableName) -> Plan:
    """Return ``plan`` with all matmuls and attention in FP64.

    Raises:
        ValueError: if a rule leaves the dtypes of one of them unchanged.
    """
    exact = dict(plan)
    lowered = {func: name for func, (rule, name) in OPS[tables].items() if rule is CastRule.LOWER_PRECISION}
    # Transformers' op is in plans only.
    grouped = {func: entry.name for func, entry in plan.items() if entry.name in _GROUPED}
    for func, name in {**lowered, **grouped}.items():
        entry = plan[func]
        if entry.rule not in _HANDLERS:
            raise ValueError(
                f"exact_generation=True sums {name} in FP64, and a rule keeps the dtypes it is called with: leave that "
                "rule out, or make it 'fp32'"
            )
        exact[func] = entry._replace(handler=_raise_for_grouped if name in _GROUPED else _HANDLERS[entry.rule])
    return exact


def sum_in_fp64(
    mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Run a lower-precision op in FP64, with operands and result in ``dtype``, by default that of ``mode``."""
    dtype, out = mode.dtype if dtype is None else dtype, kwargs.get("out")
    if out is not None:  # without autograd, as in TRL's head; operands are not rounded
        to_fp64 = functools.partial(map_tensors, lambda one: one.double() if one.dtype in CASTABLE else one)
        others = {key: to_fp64(value) for key, value in kwargs.items() if key != "out"}
        return out.copy_(call_unchanged(mode, name, func, tuple(map(to_fp64, args)), others))
    if any(one.dtype is torch.float64 for one in tensors_in((args, kwargs))):
        return func(*args, **kwargs)
    args, kwargs = cast_all(mode, dtype, args, kwargs)
    return run_through_fp32(func, args, kwargs, dtype, torch.float64)


def _raise_for_grouped(mode: Mode, name: str, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    raise ValueError(
        "exact_generation=True sums matmuls in FP64, and grouped matmuls of experts have no FP64 kernel: load the "
        "model with experts_implementation='eager'"
    )


_HANDLERS: dict[CastRule, Callable[..., Any]] = {
    CastRule.LOWER_PRECISION: sum_in_fp64,
    CastRule.FP32: functools.partial(sum_in_fp64, dtype=torch.float32),
}
