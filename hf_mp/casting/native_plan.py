"""Plans for the C++ kernels: a C++ rule for the handler of each op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from hf_mp.casting.cpu.attention import ATTENTION
from hf_mp.casting.cpu.matmul import MIN_ELEMENTS
from hf_mp.casting.cpu.upcast import SMALL_ELEMENTS
from hf_mp.casting.cpu_handlers import native_attention, native_product, through_fp32
from hf_mp.casting.handlers import UNCHANGED, call_unchanged, fp32, fp32_output, lower_precision, widest
from hf_mp.casting.plan_entry import Plan, PlanEntry
from hf_mp.kernels.native import native

# Handler -> C++ rule, and its variant if the first tensor is on a CPU. Other handlers run in Python.
_NATIVE_RULES: dict[Callable[..., Any], tuple[str, str]] = {
    call_unchanged: ("unchanged", "same"),
    lower_precision: ("lower_precision", "same"),
    native_product: ("lower_precision", "python_if_large"),
    native_attention: ("lower_precision", "python"),
    through_fp32: ("lower_precision", "through_fp32"),
    fp32: ("fp32", "same"),
    fp32_output: ("fp32_output", "same"),
    widest: ("widest", "same"),
}


# Ops with a C++ kernel, by number. They are never unregistered.
_with_kernels: list[OpOverload] = []


def native_plan(calls: Mapping[OpOverload, Callable[..., Any]], plan: Plan, dtype: torch.dtype) -> Any:
    """Return ``plan`` for the C++ kernels of an autocast in ``dtype``; None without C++.

    ``calls`` maps each op to the function that its handler receives. It only grows: its first ops have kernels.
    """
    module = native()
    if module is None:
        return None
    for op in [*calls][len(_with_kernels) :]:
        module.register_op(op.namespace, op._name.partition("::")[2], len(_with_kernels))
        _with_kernels.append(op)
    rules = bytes(module.RULES[_native_rule(op, call, plan.get(call, UNCHANGED))] for op, call in calls.items())
    return module.Plan(rules, dtype, MIN_ELEMENTS, SMALL_ELEMENTS)


def _native_rule(op: OpOverload, call: Callable[..., Any], entry: PlanEntry) -> tuple[str, str]:
    rule, on_cpu = _NATIVE_RULES.get(entry.handler, ("python", "same"))
    if call in ATTENTION:
        on_cpu = "python"
    if rule == "fp32_output" and not any(argument.name == "dtype" for argument in op._schema.arguments):
        rule = "python"
    return rule, on_cpu
