"""Measures the magnitudes of a forward and backward, op by op.

The forward runs in BF16: nothing overflows, and values beyond FP16's range are measured to 8 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.call_observer import ObservedCall, observe_calls
from hf_mp.casting.rules import WITH_WEIGHTS, ScalableOp
from hf_mp.casting.tables import CastRule
from hf_mp.diagnostics.values import UNINITIALISED
from hf_mp.kernels.gradient_scan import largest_magnitude, real_values
from hf_mp.kernels.nested import tensors_in
from hf_mp.scaling.rules import FP16_MAX

RANGE_DTYPE = torch.bfloat16  # replaces FP16
# Ops with a weight.
_WEIGHTED = {**WITH_WEIGHTS, "_grouped_mm": ScalableOp((0, "input"))}
MASK = -1e37  # smaller values are masks, for example finfo(dtype).min


@dataclass(frozen=True)
class OpRange:
    """Largest magnitudes in the calls of one op by one module.

    Attributes:
        module: name of the module; ``""`` is the model itself.
        op: torch's name of the op.
        largest: largest magnitude of the results and, for a lower-precision op, of the operands; NaN for inf or NaN.
        is_fp16: whether these values are FP16 in training.
        least: minimum over the calls of the largest magnitude of the results; 0 for FP32 results.
        is_origin: whether a call exceeds the limit although its 16-bit inputs do not.
        fp16_gradient: largest magnitude of the unscaled gradients of FP16 results and operands; None if there are none.
    """

    module: str
    op: str
    largest: float = 0.0
    is_fp16: bool = False
    least: float = 0.0
    is_origin: bool = False
    fp16_gradient: float | None = None

    @property
    def headroom(self) -> float:
        """Doublings of ``largest`` until 65504, FP16's largest number: negative beyond it, inf for zeros."""
        return math.log2(FP16_MAX / self.largest) if self.largest else math.inf

    @property
    def overflows(self) -> bool:
        return self.is_fp16 and not self.largest <= FP16_MAX

    def is_within(self, doublings: float) -> bool:
        """Whether ``largest`` is in FP16's range, and leaves it after ``doublings``."""
        return self.is_fp16 and not self.overflows and self.headroom < doublings

    def with_call(self, call: OpRange) -> OpRange:
        """Return the range of these calls and ``call``, which has no gradient yet."""
        # FP32 values count only without FP16 values.
        held = [one for one in (self, call) if one.is_fp16] or [self, call]
        return replace(
            self,
            largest=max_of(one.largest for one in held),
            is_fp16=self.is_fp16 or call.is_fp16,
            least=min(self.least, call.least),
            is_origin=self.is_origin or call.is_origin,
        )


class _Before(NamedTuple):
    """Magnitudes before a call, which may overwrite its inputs."""

    operands: list[Tensor]  # of a lower-precision op; else empty
    largest: float  # of the operands
    largest_read: float | None  # of the 16-bit activations; None if they can be read after the call


class RangeRecorder:
    """Records the magnitudes of all calls under an autocast in BF16.

    Args:
        limit: largest magnitude in range; default FP16's largest number.
        backward: also record gradients, by hooks; default False.
    """

    def __init__(self, limit: float = FP16_MAX, *, backward: bool = False) -> None:
        self._limit, self._backward = limit, backward
        self._found: dict[tuple[str, str], OpRange] = {}  # by module and op
        self._hooks = ExitStack()

    def recording(self, mode: Any, model: nn.Module) -> AbstractContextManager[None]:
        return observe_calls(dict(model.named_modules()), mode, self._record)

    def ranges(self) -> tuple[OpRange, ...]:
        """Return the ranges in the order of the first calls, and remove all hooks."""
        self._hooks.close()
        return tuple(self._found.values())

    def _record(self, call: ObservedCall) -> Any:
        name = call.name
        if name is None or name in UNINITIALISED:
            return call.make()
        is_lowered = call.entry.rule is CastRule.LOWER_PRECISION and call.mode.dtype is RANGE_DTYPE
        given = call.args, call.kwargs
        # The measurement must not be cast or recorded.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            operands = _floating(given) if is_lowered else []
            before = _Before(
                operands,
                largest=_largest(operands),
                largest_read=_largest_read(name, given) if is_in_place(name) else None,
            )
        result = call.make()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._add_call((call.module, name), given, before, _new_results(name, result, given))
        return result

    def _add_call(self, key: tuple[str, str], given: Any, before: _Before, outputs: list[Tensor]) -> None:
        """Add a call to the range of ``key``, the names of module and op."""
        if not (outputs or before.operands):
            return
        results = [output for output in outputs if output.dtype is RANGE_DTYPE]
        in_16_bits = [*results, *before.operands]
        largest_result = _largest(results)
        largest = max_of([before.largest, largest_result])
        is_origin = False
        if not largest <= self._limit:  # NaN is beyond the limit too
            read = _largest_read(key[1], given) if before.largest_read is None else before.largest_read
            is_origin = read <= self._limit
        found = OpRange(
            *key,
            largest=largest if in_16_bits else _largest(outputs),
            is_fp16=bool(in_16_bits),
            least=largest_result,
            is_origin=is_origin,
        )
        self._found[key] = self._found.get(key, found).with_call(found)
        for tensor in in_16_bits:
            if self._backward and tensor.requires_grad:
                self._hooks.callback(tensor.register_hook(functools.partial(self._add_gradient, key)).remove)

    def _add_gradient(self, key: tuple[str, str], gradient: Tensor | None) -> None:
        if gradient is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                largest = _largest([gradient])
            found = self._found[key]
            self._found[key] = replace(found, fp16_gradient=max_of([found.fp16_gradient or 0.0, largest]))


def _largest_read(op: str, given: tuple[Any, Any]) -> float:
    """Return the largest magnitude of the 16-bit inputs of an op, without weight and bias."""
    inputs: Any = given
    if op in _WEIGHTED:
        (args, kwargs), (place, name) = given, _WEIGHTED[op].input
        inputs = args[place] if len(args) > place else kwargs[name]
    return _largest(tensor for tensor in tensors_in(inputs) if tensor.dtype is RANGE_DTYPE)


def _floating(given: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(given) if tensor.is_floating_point() and tensor.layout is torch.strided]


def is_in_place(op: str) -> bool:
    """Whether ``op`` writes to its first argument: ``add_``, or ``iadd`` for ``+=``."""
    return op.endswith("_") or op in ("iadd", "isub", "imul", "itruediv", "ipow")


def _new_results(op: str, result: Any, given: Any) -> list[Tensor]:
    """Return the floating tensors that a call has computed, without views."""
    found = [tensor for tensor in _floating(result) if tensor.numel()]
    if is_in_place(op) or not found:
        return found
    storages_read = {t.untyped_storage()._cdata for t in tensors_in(given) if t.layout is torch.strided}
    return [t for t in found if t.untyped_storage()._cdata not in storages_read]


def _largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest magnitude without masks; NaN for inf or NaN, 0 for none."""
    values = [real_values(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    found = largest_magnitude(values).item()
    if not found < -MASK:
        # Each in its own dtype: FP64 may exceed FP32.
        kept = [one[~(one < MASK)] for one in values]
        found = max_of(one.abs().max().item() for one in kept if one.numel())
    return found if found < math.inf else math.nan


def max_of(values: Iterable[float]) -> float:
    """Return the largest value; NaN if one is NaN, 0 for none."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
