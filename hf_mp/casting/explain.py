"""``autocast.explain``: what ran in which dtype, op by op and module by module."""

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
from hf_mp.casting.watching import WatchedCall, watching
from hf_mp.dtypes import spell
from hf_mp.kernels.nested import tensors_in

Dtypes = tuple[str, ...]


@dataclass(frozen=True)
class ExplainedOp:
    """Calls of one op in one module that were treated alike.

    Attributes:
        module: name of the innermost module that made the call; empty outside of any.
        op: name of the op.
        rule: the table or rule that decided, such as ``"lower precision"``; ``"unlisted"`` where none speaks of it.
        inputs: dtypes in which the floating inputs came.
        cast: dtypes in which the op got them; of an unlisted op the same as ``inputs``.
        outputs: dtypes of its floating results.
        count: number of such calls.
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
    """The calls under autocast, in the order in which they first came; prints as a table."""

    ops: tuple[ExplainedOp, ...]

    def __str__(self) -> str:
        rows = [("", "rule", "came as", "ran as", "gave", "calls")]
        for op in self.ops:
            ran = _shortly(op.cast) if op.cast != op.inputs else "same"
            rows.append((f"  {op.op}", op.rule, _shortly(op.inputs), ran, _shortly(op.outputs), str(op.count)))
        header, *lines = aligned(rows).splitlines()
        shown = [header]
        for module, calls in itertools.groupby(zip(self.ops, lines, strict=True), key=lambda pair: pair[0].module):
            shown += [module or "outside of any module", *(line for _, line in calls)]
        return "\n".join(shown)


def _shortly(dtypes: Dtypes) -> str:
    """``"fp16, fp32 x2"`` of ``("float16", "float32", "float32")``."""
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
    """Call ``function`` once under autocast and tell what ran in which dtype.

    Args:
        function: a model or any function; a model that mixed precision is attached to is explained as it runs.
        inputs: what to call it with.
        dtype, tables, rules: as for :class:`autocast`; of no effect for an attached model.
        kwargs: what to call it with, by name.

    Returns:
        An :class:`Explanation`: a table when printed, its rows as data in ``.ops``.
    """
    model = function if isinstance(function, nn.Module) else None
    attached = getattr(getattr(function, "forward", None), "runtime", None)
    mode = autocast(dtype, tables=tables, rules=rules, model=model) if attached is None else attached.autocast
    recorder = _Recorder()
    # An attached model enters its autocast itself.
    modules = {} if model is None else dict(model.named_modules())
    with watching(modules, mode, recorder.record), mode if attached is None else nullcontext():
        function(*inputs, **kwargs)
    return recorder.explanation()


class _Recorder:
    """Takes down the dtypes of each call that autocast sees."""

    def __init__(self) -> None:
        self._calls: Counter[ExplainedOp] = Counter()

    def record(self, call: WatchedCall) -> Any:
        """Make a call and take it down."""
        cast: list[Any] = []

        @functools.wraps(call.func)
        def watched(*args: Any, **kwargs: Any) -> Any:
            cast.append((args, kwargs))
            return call.func(*args, **kwargs)

        came = ran = _dtypes((call.args, call.kwargs))
        # The others cast inside: what the op itself is given is seen by a function in its place.
        is_whole = call.entry.rule in (CastRule.UNLISTED, CastRule.LOWER_PRECISION)
        result = call.make(None if is_whole else watched)
        # Also where the CPU computes through FP32: the numbers are FP16's.
        if call.entry.rule is CastRule.LOWER_PRECISION:
            ran = len(came) * (_name(call.mode.dtype),)
        elif cast:  # else hf_mp's function in the place of the op has read what came
            ran = _dtypes(cast[0])
        if outputs := _dtypes(result):  # questions (`.shape`) and integer arithmetic have none
            op = op_name(call.func) if call.entry.rule is CastRule.UNLISTED else call.entry.name
            self._calls[ExplainedOp(call.module, op, call.entry.rule.value, came, ran, outputs)] += 1
        return result

    def explanation(self) -> Explanation:
        """What was recorded."""
        return Explanation(tuple(replace(op, count=count) for op, count in self._calls.items()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(value: Any) -> Dtypes:
    # The autocast is active, and would record these questions as calls of the model.
    with torch._C.DisableTorchFunction():
        return tuple(_name(tensor.dtype) for tensor in tensors_in(value) if tensor.is_floating_point())
