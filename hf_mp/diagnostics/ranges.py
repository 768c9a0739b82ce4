"""How large the values of a forward and backward are, op by op, compared with FP16's range.

The forward runs in BF16, which has FP32's exponents: every op gets the dtypes that it would get in FP16, with BF16 for
FP16, but nothing overflows. So what FP16 would make inf of is seen with its true magnitude, to BF16's 8 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.rules import WITH_WEIGHTS, Product
from hf_mp.casting.tables import CastRule
from hf_mp.casting.watching import WatchedCall, watching
from hf_mp.diagnostics.values import UNINITIALISED
from hf_mp.kernels.gradient_scan import largest_magnitude, real_values
from hf_mp.kernels.nested import tensors_in
from hf_mp.scaling.rules import FP16_MAX

RANGE_DTYPE = torch.bfloat16  # for FP16
# Of stacked experts, weights are weights too, though this product cannot be divided.
_WEIGHTED = {**WITH_WEIGHTS, "_grouped_mm": Product((0, "input"))}
MASK = -1e37  # what lies below was written to mask, as finfo(dtype).min is


@dataclass(frozen=True)
class OpRange:
    """The largest magnitudes of one op's calls in one module.

    Attributes:
        module: name of the module that calls the op; ``""`` is the model itself.
        op: torch's name of it.
        largest: the largest magnitude of its results and, for a product, of what it reads; NaN for NaN or inf.
        is_fp16: whether FP16 has to hold that.
        least: the smallest, over the calls, of the largest magnitude among the results; 0 for results in FP32.
        is_origin: whether it is beyond the limit in a call whose inputs in 16 bits are not.
        fp16_gradient: the largest magnitude of the true gradients that FP16 has to hold, times the loss scale: of
            results in 16 bits and, for a product, of what it reads; None without one.
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
        """Doublings until FP16's end, 65504; negative beyond it, inf for zeros."""
        return math.log2(FP16_MAX / self.largest) if self.largest else math.inf

    @property
    def overflows(self) -> bool:
        """Whether FP16 makes inf of it."""
        return self.is_fp16 and not self.largest <= FP16_MAX

    def is_within(self, doublings: float) -> bool:
        """Whether FP16 holds it, but would not after so many doublings."""
        return self.is_fp16 and not self.overflows and self.headroom < doublings

    def with_call(self, call: OpRange) -> OpRange:
        """The range of this op's calls so far and of one more, ``call``, which has no gradient yet."""
        # What FP16 did not have to hold is of no account next to what it has to.
        held = [one for one in (self, call) if one.is_fp16] or [self, call]
        return replace(
            self,
            largest=max_of(one.largest for one in held),
            is_fp16=self.is_fp16 or call.is_fp16,
            least=min(self.least, call.least),
            is_origin=self.is_origin or call.is_origin,
        )


class RangeRecorder:
    """Takes down the magnitudes of all calls that an autocast in BF16 sees.

    Args:
        limit: the largest magnitude that counts as in range; default FP16's largest number.
        backward: also record gradients: each op's output is given a hook.
    """

    def __init__(self, limit: float = FP16_MAX, *, backward: bool = False) -> None:
        self._limit, self._backward = limit, backward
        self._found: dict[tuple[str, str], OpRange] = {}  # by module and op
        self._hooks = ExitStack()

    def recording(self, mode: Any, model: nn.Module) -> AbstractContextManager[None]:
        """To run forwards of ``model`` and backwards in, under the autocast ``mode``."""
        return watching(dict(model.named_modules()), mode, self._record)

    def ranges(self) -> tuple[OpRange, ...]:
        """What was recorded, in the order of the first calls; ends the recording of gradients."""
        self._hooks.close()  # else parameters keep their hooks
        return tuple(self._found.values())

    def _record(self, call: WatchedCall) -> Any:
        """Make a call and take it down."""
        # What was not written yet may hold any bits, inf among them.
        if (name := call.name) is None or name in UNINITIALISED:
            return call.make()
        is_product = call.entry.rule is CastRule.LOWER_PRECISION and call.mode.dtype is RANGE_DTYPE
        given = call.args, call.kwargs
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # Below torch functions: what this looks with is not to be cast or recorded itself.
            operands = _floating(given) if is_product else []
            largest = _largest(operands)  # before they are written to
            read = _largest_read(name, given) if is_in_place(name) else None
        result = call.make()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._take((call.module, name), given, operands, largest, read, _made(name, result, given))
        return result

    def _take(
        self,
        key: tuple[str, str],
        given: Any,
        operands: list[Tensor],
        largest: float,
        read: float | None,
        outputs: list[Tensor],
    ) -> None:
        """Take down a call that was made; of a product, ``largest`` is the largest magnitude in its ``operands``.

        ``read`` is that of what the call was given in 16 bits, if it has written into that.
        """
        if not (outputs or operands):
            return
        held = [output for output in outputs if output.dtype is RANGE_DTYPE]
        in_16_bits = [*held, *operands]
        made, is_fp16 = _largest(held), bool(in_16_bits)
        largest = max_of([largest, made])
        found = OpRange(
            *key,
            largest=largest if is_fp16 else _largest(outputs),
            is_fp16=is_fp16,
            least=made,
            # NaN is not within the limit. What the call is given has to be looked at only where it is beyond.
            is_origin=not largest <= self._limit
            and (_largest_read(key[1], given) if read is None else read) <= self._limit,
        )
        self._found[key] = self._found.get(key, found).with_call(found)
        for tensor in in_16_bits:
            if self._backward and tensor.requires_grad:
                self._hooks.callback(tensor.register_hook(functools.partial(self._take_gradient, key)).remove)

    def _take_gradient(self, key: tuple[str, str], gradient: Tensor | None) -> None:
        if gradient is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                largest = _largest([gradient])
            before = self._found[key].fp16_gradient or 0.0
            self._found[key] = replace(self._found[key], fp16_gradient=max_of([before, largest]))


def _activations(op: str, inputs: tuple[Any, Any]) -> Any:
    """What an op is given; of a product with a weight the input alone."""
    if op not in _WEIGHTED:
        return inputs
    (args, kwargs), (place, name) = inputs, _WEIGHTED[op].input
    return args[place] if len(args) > place else kwargs[name]


def _largest_read(op: str, given: Any) -> float:
    """The largest magnitude of the activations in 16 bits that an op is given."""
    return _largest(tensor for tensor in tensors_in(_activations(op, given)) if tensor.dtype is RANGE_DTYPE)


def _floating(given: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(given) if tensor.is_floating_point() and tensor.layout is torch.strided]


def is_in_place(op: str) -> bool:
    """Whether the op of this name writes into its first argument: ``add_``, or ``iadd`` for ``+=``."""
    return op.endswith("_") or op in ("iadd", "isub", "imul", "itruediv", "ipow")


def _made(op: str, result: Any, given: Any) -> list[Tensor]:
    """The floating tensors in ``result`` that are no views of what the call was given, or that it wrote into."""
    # A view has the range of what it shows, which its own op has told.
    found = [tensor for tensor in _floating(result) if tensor.numel()]
    read = () if is_in_place(op) or not found else tensors_in(given)
    known = {t.untyped_storage()._cdata for t in read if t.layout is torch.strided}
    return [t for t in found if t.untyped_storage()._cdata not in known]


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude, -inf and masks left out; NaN where there is inf or NaN."""
    values = [real_values(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    found = largest_magnitude(values).item()
    if not found < -MASK:  # nearly always it is, and nothing has to be copied
        # In the dtype of each, as FP64 may be beyond FP32.
        kept = [one[~(one < MASK)] for one in values]
        found = max_of(one.abs().max().item() for one in kept if one.numel())
    return found if found < math.inf else math.nan


def max_of(values: Iterable[float]) -> float:
    """The largest of ``values``, NaN if one is; 0 for none."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
