"""Plans: the plan entry of each torch function in a table."""

from __future__ import annotations

import functools
import sys

import torch
from torch.compiler import is_dynamo_compiling

from hf_mp.casting.composites import COMPOSITES
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.casting.cpu_handlers import upcast_plan
from hf_mp.casting.handlers import plan_of
from hf_mp.casting.plan_entry import Plan
from hf_mp.casting.rules import OpRules
from hf_mp.casting.tables import OPS, CastRule, TableName

# Made at import: torch.compile reads a constant dictionary, but not a cached function.
_COMPOSITES = plan_of({func: (CastRule.COMPOSITE, func.__name__) for func in COMPOSITES})
_PLANS: dict[TableName, Plan] = {name: {**_COMPOSITES, **plan_of(ops)} for name, ops in OPS.items()}
# By the part of a name that ops in FP32 have: all of them, or convolutions.
_UPCAST = {part: {name: upcast_plan(plan, part) for name, plan in _PLANS.items()} for part in ("", "conv")}


def _upcast_part(dtype: torch.dtype) -> str | None:
    """Return the key in ``_UPCAST`` of the ops that this CPU runs in FP32 instead of ``dtype``; None without any."""
    if not runs_natively(dtype, "cpu"):
        return ""
    return None if runs_natively(dtype, "cpu", "conv") else "conv"


def plan_for(tables: TableName, dtype: torch.dtype) -> Plan:
    """Return the plan of ``tables`` for this machine; callers do not change it."""
    if "transformers.integrations.moe" in sys.modules and not is_dynamo_compiling():
        _add_grouped_matmul()
    part = _upcast_part(dtype)
    return _PLANS[tables] if part is None else _UPCAST[part][tables]


# Transformers registers the op when its module is imported, maybe after this one.
@functools.cache
def _add_grouped_matmul() -> None:
    """Add Transformers' grouped matmul to all plans; compiled code has it instead of ``grouped_mm``."""
    if (op := getattr(torch.ops.transformers, "grouped_mm_fallback", None)) is not None:
        lowered = plan_of(dict.fromkeys([op, op.default], (CastRule.LOWER_PRECISION, "grouped_mm_fallback")))
        for name, plan in _PLANS.items():
            plan.update(lowered)
            for part, plans in _UPCAST.items():
                plans[name].update(upcast_plan(lowered, part))


def with_rules(plan: Plan, ops: OpRules, dtype: torch.dtype) -> Plan:
    """Return ``plan`` with rules by op."""
    ruled = plan_of(ops)
    for func, entry in ruled.items():
        if entry.rule is CastRule.UNLISTED:
            ruled[func] = _COMPOSITES.get(func, entry)  # decomposed, as without a rule
    part = _upcast_part(dtype)
    return {**plan, **(ruled if part is None else upcast_plan(ruled, part))}
