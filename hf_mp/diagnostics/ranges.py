"""How large the values of a forward and backward are, op by op, compared with FP16's range.

The forward runs in BF16, which has FP32's exponents: every op gets the dtypes that it would get in FP16, with BF16 for
FP16, but nothing overflows. So what FP16 would make inf of is seen with its true magnitude, to BF16's 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hf_mp.casting.explain import watching_modules
from hf_mp.casting.nested import tensors_in
from hf_mp.casting.rules import SCALABLE
from hf_mp.casting.tables import CastRule, called_name
from hf_mp.kernels.gradient_scan import real_values
from hf_mp.scaling.rules import FP16_MAX

STAND_IN = torch.bfloat16  # for FP16
MASK = -1e37  # what lies below was written to mask, as finfo(dtype).min is


@dataclass(frozen=True)
class OpRange:
    """The largest magnitudes of one op's calls in one module.

    Attributes:
        module: name of the module that calls the op; ``""`` is the model itself.
        op: torch's name of it.
        largest: the largest magnitude of its results and, for a product, of what it reads; NaN for NaN or inf.
        is_fp16: whether FP16 has to hold that.
        largest_weight: of a product with a weight, the largest magnitude of that; else 0.
        is_origin: whether it is beyond the limit in a call whose inputs in 16 bits are not.
        gradient: the largest magnitude of the true gradient of its results; None without one.
        flops: floating point operations of all calls.
        fp32_flops: of these, the ones that are not in 16 bits.
    """

    module: str
    op: str
    largest: float = 0.0
    is_fp16: bool = False
    largest_weight: float = 0.0
    is_origin: bool = False
    gradient: float | None = None
    flops: int = 0
    fp32_flops: int = 0

    @property
    def headroom(self) -> float:
        """Doublings until FP16's end, 65504; negative beyond it, inf for zeros."""
        return math.log2(FP16_MAX / self.largest) if self.largest else math.inf

    @property
    def overflows(self) -> bool:
        """Whether FP16 makes inf of it."""
        return self.is_fp16 and not self.largest <= FP16_MAX

    def is_within(self, doublings: float) -> bool:
        """Whether FP16 holds it, but would not after so many doublings."""
        return self.is_fp16 and not self.overflows and self.headroom < doublings


class RangeRecorder:
    """Takes down the magnitudes of all calls that an autocast in BF16 sees.

    Args:
        limit: the largest magnitude that counts as in range; default FP16's largest number.
        backward: also record gradients: each op's output is given a hook.
    """

    def __init__(self, limit: float = FP16_MAX, *, backward: bool = False) -> None:
        self._limit, self._backward = limit, backward
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        self._modules: list[str] = []  # that run, innermost last
        self._flops = FlopCounterMode(display=False)

    @contextmanager
    def recording(self, mode: Any, model: nn.Module) -> Iterator[None]:
        """To run forwards of ``model`` and backwards in, under the autocast ``mode``."""
        before, mode.observer = mode.observer, lambda *call: self._observe(mode, *call)
        try:
            with watching_modules(model, self._modules.append, self._modules.pop), self._flops:
                yield
        finally:
            mode.observer = before

    def ranges(self) -> tuple[OpRange, ...]:
        """What was recorded, in the order of the first calls."""
        return tuple(OpRange(module, op, **row) for (module, op), row in self._rows.items())

    def _observe(
        self, mode: Any, entry: tuple[CastRule, str] | None, func: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        is_listed = entry is not None and entry[0] is not CastRule.UNLISTED
        name = entry[1] if entry is not None and is_listed else called_name(func)
        if name is None:
            return mode.apply(entry, func, args, kwargs)
        is_product = entry is not None and entry[0] is CastRule.LOWER_PRECISION and mode.dtype is STAND_IN
        read, weight = _operands(name, args, kwargs) if is_product else (0.0, 0.0)
        flops = self._flops.get_total_flops()
        result = mode.apply(entry, func, args, kwargs)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            outputs = _made(result, () if is_in_place(name) else (args, kwargs))
            if outputs or is_product:
                flops = self._flops.get_total_flops() - flops
                self._take(name, max(read, weight), weight, outputs, (args, kwargs), is_product, flops)
        return result

    def _take(
        self, op: str, read: float, weight: float, outputs: list[Tensor], inputs: Any, is_product: bool, flops: int
    ) -> None:
        row = self._rows.setdefault((self._modules[-1] if self._modules else "", op), {})
        held = max_of([read, _largest(output for output in outputs if output.dtype is STAND_IN)])
        is_fp16 = is_product or any(output.dtype is STAND_IN for output in outputs)
        if is_fp16 and not row.get("is_fp16"):
            row.update(is_fp16=True, largest=0.0)  # what FP16 does not have to hold is of no account
        if is_fp16 or not row.get("is_fp16"):
            row["largest"] = max_of([row.get("largest", 0.0), held if is_fp16 else _largest(outputs)])
        row["largest_weight"] = max(row.get("largest_weight", 0.0), weight)
        if not held <= self._limit and not row.get("is_origin"):
            came = _largest(t for t in tensors_in(_activations(op, inputs)) if t.dtype is STAND_IN)
            row["is_origin"] = came <= self._limit
        row["flops"] = row.get("flops", 0) + flops
        in_fp32 = flops if outputs and all(output.dtype is not STAND_IN for output in outputs) else 0
        row["fp32_flops"] = row.get("fp32_flops", 0) + in_fp32
        for output in outputs if self._backward else ():
            if output.requires_grad:
                output.register_hook(lambda gradient: self._take_gradient(row, gradient))

    def _take_gradient(self, row: dict[str, Any], gradient: Tensor | None) -> None:
        if gradient is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                row["gradient"] = max_of([row.get("gradient") or 0.0, _largest([gradient])])


def _operands(op: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[float, float]:
    """The largest magnitudes of what a product reads: of its input, and of its weight and bias."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        read, weight = tensors_in(_activations(op, (args, kwargs))), tensors_in(_parameters(op, (args, kwargs)))
        return _largest(read), _largest(weight)


def _activations(op: str, inputs: tuple[Any, Any]) -> Any:
    """What an op is given, without the weight and bias of a product."""
    if op not in SCALABLE:
        return inputs
    (args, kwargs), place = inputs, int(op == "addmm")
    return args[place] if len(args) > place else kwargs[SCALABLE[op][place]]


def _parameters(op: str, inputs: tuple[Any, Any]) -> list[Tensor]:
    if op not in SCALABLE:
        return []
    activation = _activations(op, inputs)
    return [tensor for tensor in tensors_in(inputs) if tensor is not activation]


def is_in_place(op: str) -> bool:
    """Whether the op of this name writes into its first argument: ``add_``, or ``iadd`` for ``+=``."""
    return op.endswith("_") or op in ("iadd", "isub", "imul", "itruediv", "ipow")


def _made(result: Any, given: Any) -> list[Tensor]:
    """The floating tensors in ``result`` that are no views of what the call was given."""
    found = [t for t in tensors_in(result) if t.is_floating_point() and t.layout is torch.strided and t.numel()]
    known = {t.untyped_storage()._cdata for t in tensors_in(given) if t.layout is torch.strided} if found else ()
    return [t for t in found if t.untyped_storage()._cdata not in known]


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude, -inf and masks left out; NaN where there is inf or NaN."""
    return max_of(_largest_of(tensor) for tensor in tensors if tensor.is_floating_point() and tensor.numel())


def _largest_of(tensor: Tensor) -> float:
    values = real_values(tensor.detach())
    smallest, largest = (found.item() for found in torch.aminmax(values))
    if smallest < MASK:
        kept = values[values >= MASK]
        smallest, largest = (found.item() for found in torch.aminmax(kept)) if kept.numel() else (0.0, 0.0)
    found = max(-smallest, largest)
    return found if found < math.inf else math.nan


def max_of(values: Iterable[float]) -> float:
    """The largest of ``values``, NaN if one is; 0 for none."""
    found = 0.0
    for value in values:
        if math.isnan(value):
            return math.nan
        found = max(found, value)
    return found
