"""``autocast.explain``: what ran in which dtype, op by op and module by module."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_mp.casting.nested import tensors_in
from hf_mp.casting.tables import CastRule, op_name
from hf_mp.policy import spell

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
        modules = [""]
        for op in self.ops:
            ran = _shortly(op.cast) if op.cast != op.inputs else "same"
            rows.append((f"  {op.op}", op.rule, _shortly(op.inputs), ran, _shortly(op.outputs), str(op.count)))
            modules.append(op.module or "outside of any module")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[0] = min(widths[0], 20)  # few names are longer: they take a line of their own, and all fits 80 columns
        lines = []
        for number, (module, row) in enumerate(zip(modules, rows, strict=True)):
            if number and module != modules[number - 1]:
                lines.append(module)
            if len(row[0]) > widths[0]:
                lines.append(row[0])
                row = ("", *row[1:])
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return "\n".join(lines)


def _shortly(dtypes: Dtypes) -> str:
    """``"fp16, fp32 x2"`` of ``("float16", "float32", "float32")``."""
    runs = [(spell(dtype), len([*same])) for dtype, same in itertools.groupby(dtypes)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


class Recorder:
    """Takes down each call that autocast sees, with the module that made it."""

    def __init__(self) -> None:
        self.modules: list[str] = []  # that run, innermost last
        self._calls: Counter[ExplainedOp] = Counter()

    def observe(
        self, mode: Any, entry: tuple[CastRule, str] | None, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Make a call in place of ``mode.apply`` and take it down."""
        got: list[Any] = []

        @functools.wraps(func)
        def watched(*cast_args: Any, **cast_kwargs: Any) -> Any:
            got.append((cast_args, cast_kwargs))
            return func(*cast_args, **cast_kwargs)

        came = _dtypes((args, kwargs))
        if entry is None or entry[0] is CastRule.UNLISTED:
            result = mode.apply(entry, func, args, kwargs)
            self._record(op_name(func), "unlisted", came, came, result)
        elif entry[0] is CastRule.LOWER_PRECISION:  # also where the CPU computes through FP32: the numbers are FP16's
            result = mode.apply(entry, func, args, kwargs)
            self._record(entry[1], entry[0].value, came, len(came) * (_name(mode.dtype),), result)
        else:
            result = mode.apply(entry, watched, args, kwargs)
            # A function of ours in the place of the op reads what came.
            self._record(entry[1], entry[0].value, came, _dtypes(got[0]) if got else came, result)
        return result

    def _record(self, op: str, rule: str, came: Dtypes, ran: Dtypes, result: Any) -> None:
        outputs = _dtypes(result)
        if not outputs:  # questions (`.shape`) and integer arithmetic
            return
        module = self.modules[-1] if self.modules else ""
        self._calls[ExplainedOp(module, op, rule, came, ran, outputs)] += 1

    def explanation(self) -> Explanation:
        """What was recorded."""
        return Explanation(tuple(replace(op, count=count) for op, count in self._calls.items()))


@contextlib.contextmanager
def watching_modules(model: nn.Module, enter: Callable[[str], None], leave: Callable[[], Any]) -> Iterator[None]:
    """Call ``enter`` with the name of each module of ``model`` that is called, and ``leave`` when it has returned."""
    handles = []

    def left(*_: Any) -> None:
        leave()

    for name, module in model.named_modules():
        entered = functools.partial(lambda name, *_: enter(name), name)
        handles.append(module.register_forward_pre_hook(entered, prepend=True))
        handles.append(module.register_forward_hook(left, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(value: Any) -> Dtypes:
    with torch._C.DisableTorchFunction():
        return tuple(_name(tensor.dtype) for tensor in tensors_in(value) if tensor.is_floating_point())
