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

from hf_mp.casting.columns import aligned
from hf_mp.casting.mode import autocast
from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import CastRule, TableName, op_name
from hf_mp.casting.watching import WatchedCall, observe_calls
from hf_mp.dtypes import spell
from hf_mp.kernels.nested import tensors_in

Dtypes = tuple[str, ...]


@dataclass(frozen=True)
class ExplainedOp:
    """Calls of one op in one module with the same rule and dtypes.

    Attributes:
        module: name of the innermost module that made the call; empty outside modules.
        op: name of the op.
        rule: the table or rule that was applied, for example ``"lower precision"``; ``"unlisted"`` if none applies.
        inputs: dtypes of the floating inputs.
        cast: dtypes that the op received; the same as ``inputs`` for an unlisted op.
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
        header, *lines = aligned(rows).splitlines()
        shown = [header]
        for module, calls in itertools.groupby(zip(self.ops, lines, strict=True), key=lambda pair: pair[0].module):
            shown += [module or "outside of any module", *(line for _, line in calls)]
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

    Returns:
        An :class:`Explanation`: prints as a table; its rows are in ``.ops``.
    """
    model = function if isinstance(function, nn.Module) else None
    attached = getattr(getattr(function, "forward", None), "runtime", None)
    mode = autocast(dtype, tables=tables, rules=rules, model=model) if attached is None else attached.autocast
    recorder = _Recorder()
    modules = {} if model is None else dict(model.named_modules())
    with observe_calls(modules, mode, recorder.record), mode if attached is None else nullcontext():
        function(*inputs, **kwargs)
    return recorder.explanation()


class _Recorder:
    """Records the dtypes of each call that autocast intercepts."""

    def __init__(self) -> None:
        self._calls: Counter[ExplainedOp] = Counter()

    def record(self, call: WatchedCall) -> Any:
        """Make a call and record its dtypes."""
        received: list[Any] = []

        @functools.wraps(call.func)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            received.append((args, kwargs))
            return call.func(*args, **kwargs)

        inputs = cast = _dtypes((call.args, call.kwargs))
        # The handlers of other rules choose the casts: wrap the function to record its arguments.
        has_fixed_casts = call.entry.rule in (CastRule.UNLISTED, CastRule.LOWER_PRECISION)
        result = call.make(None if has_fixed_casts else recorded)
        # Also if the CPU computes in FP32, because the operands are rounded.
        if call.entry.rule is CastRule.LOWER_PRECISION:
            cast = len(inputs) * (_name(call.mode.dtype),)
        elif received:  # if empty, a function of hf_mp replaced the op, and read the inputs unchanged
            cast = _dtypes(received[0])
        if outputs := _dtypes(result):  # attributes (`.shape`) and integer arithmetic have none
            op = op_name(call.func) if call.entry.rule is CastRule.UNLISTED else call.entry.name
            self._calls[ExplainedOp(call.module, op, call.entry.rule.value, inputs, cast, outputs)] += 1
        return result

    def explanation(self) -> Explanation:
        """Return the recorded calls."""
        return Explanation(tuple(replace(op, count=count) for op, count in self._calls.items()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(value: Any) -> Dtypes:
    # The active autocast would record these reads as calls of the model.
    with torch._C.DisableTorchFunction():
        return tuple(_name(tensor.dtype) for tensor in tensors_in(value) if tensor.is_floating_point())
