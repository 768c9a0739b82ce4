"""``autocast.explain``: the dtypes of each op in each module."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_mp.casting.call_observer import ObservedCall, observe_calls
from hf_mp.casting.mode import autocast
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import CastRule, TableName, op_name
from hf_mp.casting.text_table import format_columns
from hf_mp.dtypes import spell
from hf_mp.kernels.nested import tensors_in

Dtypes = tuple[str, ...]


@dataclass(frozen=True)
class ExplainedOp:
    """Calls of one op in one module with the same rule and dtypes.

    Attributes:
        module: name of the innermost module; empty outside modules.
        op: name of the op.
        rule: the table or rule that was applied, for example ``"lower precision"``; ``"unlisted"`` if none applies.
        inputs: dtypes of the floating inputs.
        cast: dtypes that the op received.
        outputs: dtypes of the floating results.
        count: number of calls.
    """

    module: str
    op: str
    rule: str
    inputs: Dtypes
    cast: Dtypes
    outputs: Dtypes
    count: int = 1


@dataclass(frozen=True)
class Explanation:
    """Calls under autocast, in the order of their first occurrence; prints as a table."""

    ops: tuple[ExplainedOp, ...]

    def __str__(self) -> str:
        rows = [("", "rule", "came as", "ran as", "gave", "calls")]
        for op in self.ops:
            ran = _join_dtypes(op.cast) if op.cast != op.inputs else "same"
            rows.append((f"  {op.op}", op.rule, _join_dtypes(op.inputs), ran, _join_dtypes(op.outputs), str(op.count)))
        header, *lines = format_columns(rows).splitlines()
        shown, lines_left = [header], iter(lines)
        for module, ops in itertools.groupby(self.ops, key=lambda op: op.module):
            shown += [module or "outside of any module", *(next(lines_left) for _ in ops)]
        return "\n".join(shown)


def _join_dtypes(dtypes: Dtypes) -> str:
    """Shorten ``("float16", "float32", "float32")`` to ``"fp16, fp32 x2"``."""
    runs = [(spell(dtype), len([*same])) for dtype, same in itertools.groupby(dtypes)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


def explain(
    function: Callable[..., Any],
    *inputs: Any,
    dtype: torch.dtype = torch.float16,
    tables: TableName = "cuda",
    rules: Rules | None = None,
    **kwargs: Any,
) -> Explanation:
    """Call ``function`` once under autocast and record the dtypes of each op.

    Args:
        function: a model or any function. An attached model runs in its own autocast.
        inputs: its positional arguments.
        dtype, tables, rules: as for :class:`autocast`; no effect for an attached model.
        kwargs: its keyword arguments.
    """
    model = function if isinstance(function, nn.Module) else None
    attached = getattr(getattr(function, "forward", None), "runtime", None)
    mode = autocast(dtype, tables=tables, rules=rules, model=model) if attached is None else attached.autocast
    counts: Counter[ExplainedOp] = Counter()
    modules = {} if model is None else dict(model.named_modules())
    with observe_calls(modules, mode, functools.partial(_record, counts)), mode if attached is None else nullcontext():
        function(*inputs, **kwargs)
    return Explanation(tuple(replace(op, count=count) for op, count in counts.items()))


def _record(counts: Counter[ExplainedOp], call: ObservedCall) -> Any:
    rule, inputs = call.entry.rule, _dtypes((call.args, call.kwargs))
    if rule is CastRule.UNLISTED:
        result, cast = call.make(), inputs
    elif rule is CastRule.LOWER_PRECISION:
        # Also if the CPU computes in FP32, because the operands are rounded.
        result, cast = call.make(), len(inputs) * (_name(call.mode.dtype),)
    else:
        result, cast = _result_and_casts(call, inputs)
    if outputs := _dtypes(result):  # attributes (`.shape`) and integer arithmetic have none
        op = op_name(call.func) if rule is CastRule.UNLISTED else call.entry.name
        counts[ExplainedOp(call.module, op, rule.value, inputs, cast, outputs)] += 1
    return result


def _result_and_casts(call: ObservedCall, inputs: Dtypes) -> tuple[Any, Dtypes]:
    """Make a call, and return its result and the dtypes after its casts."""
    received: list[Dtypes] = []

    @functools.wraps(call.func)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        received.append(_dtypes((args, kwargs)))
        return call.func(*args, **kwargs)

    result = call.make(recorded)
    # Empty if a function of hf_mp replaced the op.
    return result, received[0] if received else inputs


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(value: Any) -> Dtypes:
    # Otherwise the active autocast would record these reads.
    with torch._C.DisableTorchFunction():
        return tuple(_name(tensor.dtype) for tensor in tensors_in(value) if tensor.is_floating_point())
