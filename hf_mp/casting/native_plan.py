"""The plan of an autocast for the kernels in C++: for each op, which of their rules does what its handler does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from hf_mp.casting.calls import Plan, PlannedCall
from hf_mp.casting.cpu.attention import ATTENTION
from hf_mp.casting.cpu.products import OWN_ELEMENTS
from hf_mp.casting.cpu.upcast import SMALL_ELEMENTS
from hf_mp.casting.cpu_handlers import native_attention, native_product, through_fp32
from hf_mp.casting.handlers import AS_GIVEN, as_given, fp32, fp32_output, lower_precision, widest
from hf_mp.kernels.native import native

# By handler: the rule, and what is otherwise where the first tensor of a call lies on a CPU. All others are Python's.
_RULES: dict[Callable[..., Any], tuple[str, str]] = {
    as_given: ("as_given", "same"),
    lower_precision: ("lower_precision", "same"),
    native_product: ("lower_precision", "python_if_large"),
    native_attention: ("lower_precision", "python"),
    through_fp32: ("lower_precision", "through_fp32"),
    fp32: ("fp32", "same"),
    fp32_output: ("fp32_output", "same"),
    widest: ("widest", "same"),
}


_with_kernels: list[OpOverload] = []  # for good: what a thread does not include changes nothing


def native_plan(calls: Mapping[OpOverload, Callable[..., Any]], plan: Plan, dtype: torch.dtype) -> Any:
    """``plan`` of an autocast in ``dtype`` for kernels in C++ of the ops of ``calls``; None where there is no C++.

    ``calls`` has the function that the handler of each op is given; it only grows.
    """
    if (module := native()) is None:
        return None
    for op in [*calls][len(_with_kernels) :]:
        module.register_op(op.namespace, op._name.partition("::")[2], len(_with_kernels))
        _with_kernels.append(op)
    rules = bytes(module.RULES[_rule(op, call, plan.get(call, AS_GIVEN))] for op, call in calls.items())
    return module.Plan(rules, dtype, OWN_ELEMENTS, SMALL_ELEMENTS)


def _rule(op: OpOverload, call: Callable[..., Any], entry: PlannedCall) -> tuple[str, str]:
    rule, on_cpu = _RULES.get(entry.handler, ("python", "same"))
    if call in ATTENTION:  # which also looks at the number of scores
        on_cpu = "python"
    if rule == "fp32_output" and not any(argument.name == "dtype" for argument in op._schema.arguments):
        rule = "python"
    return rule, on_cpu
