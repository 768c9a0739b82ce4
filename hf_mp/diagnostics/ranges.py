"""How large the values of a forward and backward are, op by op, compared with FP16's range.

The forward runs in BF16, which has FP32's exponents: every op gets the dtypes that it would get in FP16, with BF16 for
FP16, but nothing overflows. So what FP16 would make inf of is seen with its true magnitude, to BF16's 8 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from hf_mp.casting.experts import ExpertCall, ExpertCalls
from hf_mp.casting.nested import tensors_in
from hf_mp.casting.rules import SCALABLE, WITH_WEIGHTS, Product
from hf_mp.casting.tables import CastRule
from hf_mp.casting.watching import WatchedCall, watching
from hf_mp.diagnostics.values import UNINITIALISED
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
        least: the same of the call where it is smallest, of results alone; 0 where they are in FP32.
        largest_weight: of a product, the largest magnitude of its weight and bias, or other factors; else 0.
        is_origin: whether it is beyond the limit in a call whose inputs in 16 bits are not.
        fp16_gradient: the largest magnitude of the true gradients that FP16 has to hold, times the loss scale: of
            results in 16 bits and, for a product, of what it reads; None without one.
        cuts: whether rounding to 16 bits made -inf of a finite number, as of ``finfo(float32).min`` in a mask.
        flops: floating point operations of all calls.
        expert: of stacked experts, whose rows it is about, by the weight of the last product, such as
            ``"model.layers.3.mlp.experts.gate_up_proj[5]"``; ``""`` for all other calls.
    """

    module: str
    op: str
    largest: float = 0.0
    is_fp16: bool = False
    least: float = 0.0
    largest_weight: float = 0.0
    is_origin: bool = False
    fp16_gradient: float | None = None
    cuts: bool = False
    flops: int = 0
    expert: str = ""

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
        """This op with a further call."""
        # What FP16 did not have to hold is of no account next to what it has to.
        held = [one for one in (self, call) if one.is_fp16] or [self, call]
        return replace(
            self,
            largest=max_of(one.largest for one in held),
            is_fp16=self.is_fp16 or call.is_fp16,
            least=min(self.least, call.least),
            largest_weight=max(self.largest_weight, call.largest_weight),
            is_origin=self.is_origin or call.is_origin,
            cuts=self.cuts or call.cuts,
            flops=self.flops + call.flops,
        )


class RangeRecorder:
    """Takes down the magnitudes of all calls that an autocast in BF16 sees.

    Args:
        limit: the largest magnitude that counts as in range; default FP16's largest number.
        backward: also record gradients: each op's output is given a hook.
    """

    def __init__(self, limit: float = FP16_MAX, *, backward: bool = False) -> None:
        self._limit, self._backward = limit, backward
        self._found: dict[tuple[str, str, str], OpRange] = {}  # by module, op and expert
        self._flops = FlopCounterMode(display=False)
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def recording(self, mode: Any, model: nn.Module) -> Iterator[None]:
        """To run forwards of ``model`` and backwards in, under the autocast ``mode``."""
        self._experts = ExpertCalls(model)
        # Counted op by op, since a rule may move one op of a module out of 16 bits.
        with watching(dict(model.named_modules()), mode, self._record), self._flops:
            yield

    def ranges(self) -> tuple[OpRange, ...]:
        """What was recorded, in the order of the first calls; ends the recording of gradients."""
        for hook in self._hooks:  # parameters keep theirs else
            hook.remove()
        self._hooks.clear()
        return tuple(self._found.values())

    def _record(self, call: WatchedCall) -> Any:
        """Make a call and take it down."""
        # What was not written yet may hold any bits, inf among them.
        if (name := call.name) is None or name in UNINITIALISED:
            return call.make()
        experts = self._experts.of(call.module, call.func, call.args, call.kwargs)
        is_product = call.rule is CastRule.LOWER_PRECISION and call.mode.dtype is STAND_IN
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # Below torch functions: what this looks with is not to be cast, counted or recorded itself.
            given = _Given.of(name, call.args, call.kwargs, experts, is_product)
            operands = given.largest_operands()  # before they are written to
        flops = self._flops.get_total_flops()
        result = call.make()
        self._experts.made(call.module, call.func, call.args, result)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            outputs = _made(result, () if is_in_place(name) else (call.args, call.kwargs))
            if outputs or is_product:
                flops = self._flops.get_total_flops() - flops
                # Not strict: results of other rows than the experts' are one part, whose operands come first.
                for part, largest in zip(given.parts_of(outputs), operands, strict=False):
                    key = call.module, name, part.name
                    found = self._range_of(key, given, part, largest, outputs, flops)
                    self._found[key] = self._found[key].with_call(found) if key in self._found else found
                    if self._backward:
                        self._watch_gradients(key, given, part, outputs)
        return result

    def _range_of(
        self,
        key: tuple[str, str, str],
        given: _Given,
        part: _Part,
        operands: tuple[float, float],
        outputs: list[Tensor],
        flops: int,
    ) -> OpRange:
        """One call."""
        found = [part.of(output) for output in outputs]
        in_16_bits = [output for output in found if output.dtype is STAND_IN]
        made = _largest(in_16_bits)
        held = max_of([*operands, made])
        is_fp16 = given.is_product or bool(in_16_bits)
        return OpRange(
            *key[:2],
            largest=held if is_fp16 else _largest(found),
            is_fp16=is_fp16,
            least=made,
            largest_weight=operands[1],
            # NaN is not within the limit. What the call is given has to be looked at only where it is beyond.
            is_origin=not held <= self._limit
            and _largest(part.of(read) for read in given.computed if read.dtype is STAND_IN) <= self._limit,
            cuts=_has_minus_inf(in_16_bits) and not _has_minus_inf(given.floating),
            flops=round(flops * part.share),
            expert=part.name,
        )

    def _watch_gradients(self, key: tuple[str, str, str], given: _Given, part: _Part, outputs: list[Tensor]) -> None:
        """Take down gradients of results and, for a product, of what it reads."""
        held = [output for output in outputs if output.dtype is STAND_IN]
        for tensor in [*held, *given.floating] if given.is_product else held:
            if tensor.requires_grad:
                take = functools.partial(self._take_gradient, key, part, tensor is part.weight)
                self._hooks.append(tensor.register_hook(take))

    def _take_gradient(self, key: tuple[str, str, str], part: _Part, of_weight: bool, gradient: Tensor | None) -> None:
        if gradient is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                largest = _largest([part.of(gradient, of_weight=of_weight)])
            before = self._found[key].fp16_gradient or 0.0
            self._found[key] = replace(self._found[key], fp16_gradient=max_of([before, largest]))


class _Part(NamedTuple):
    """All of a call, or in one of stacked experts what belongs to one of them."""

    name: str = ""  # full one of the expert's weight
    expert: int = 0
    rows: Tensor | None = None  # bool: which are the expert's; None for all of the call
    share: float = 1.0  # of the rows
    weight: Tensor | None = None  # that the call is given for all experts

    def of(self, tensor: Tensor, *, of_weight: bool = False) -> Tensor:
        """What belongs to it of ``tensor``: an operand, a result or a gradient; ``of_weight``: of ``weight``."""
        if self.rows is None:
            return tensor
        if of_weight or tensor is self.weight:
            return tensor[self.expert]
        return tensor[self.rows] if len(tensor) == len(self.rows) else tensor


class _Given(NamedTuple):
    """What a call is given."""

    floating: list[Tensor]
    computed: list[Tensor]  # by the model: not the weights of products
    factors: list[Tensor]  # of a product that can be divided, all but its input
    parts: list[_Part]
    is_product: bool

    @classmethod
    def of(cls, op: str, args: Any, kwargs: Mapping[str, Any], experts: ExpertCall | None, is_product: bool) -> _Given:
        floating = _floating((args, kwargs))
        if experts is None or not len(experts.rows.experts):
            read = _activations(op, (args, kwargs), SCALABLE)
            factors = [tensor for tensor in floating if tensor is not read] if op in SCALABLE else []
            return cls(floating, [*tensors_in(_activations(op, (args, kwargs)))], factors, [_Part()], is_product)
        place = experts.place
        weight = None if place is None else args[place] if isinstance(place, int) else kwargs[place]
        computed = [tensor for tensor in floating if tensor is not weight]
        return cls(floating, computed, [] if weight is None else [weight], _parts_of(experts, weight), is_product)

    def largest_operands(self) -> list[tuple[float, float]]:
        """Of each part, the largest magnitudes of what a product reads: of its input, and of all else; 0 for another
        call."""
        if not self.is_product:
            return [(0.0, 0.0)] * len(self.parts)
        factors = {id(tensor) for tensor in self.factors}
        read = [tensor for tensor in self.computed if id(tensor) not in factors]
        return [(_largest(map(part.of, read)), _largest(map(part.of, self.factors))) for part in self.parts]

    def parts_of(self, outputs: list[Tensor]) -> list[_Part]:
        """The parts in which results are to be looked at: of other rows than the experts', all of them together."""
        are_rows = all(part.rows is None or len(output) == len(part.rows) for part in self.parts for output in outputs)
        return self.parts if are_rows else [_Part()]


def _parts_of(call: ExpertCall, weight: Tensor | None) -> list[_Part]:
    """What belongs to each expert of a call, which is given ``weight``."""
    parts, rows = [], call.rows
    for expert in rows.experts[rows.experts >= 0].unique().tolist():
        its = rows.experts == expert
        share, whole = its.double().mean().item(), weight if rows.is_whole else None
        parts.append(_Part(call.expert(expert), expert, its, share, whole))
    return parts


def _activations(op: str, inputs: tuple[Any, Any], products: Mapping[str, Product] = WITH_WEIGHTS) -> Any:
    """What an op is given; of ``products`` the input alone, without the weight and bias."""
    if op not in products:
        return inputs
    (args, kwargs), (place, name) = inputs, products[op].input
    if op == "einsum" and isinstance(args[1], (list, tuple)):
        return args[1][0]
    return args[place] if len(args) > place else kwargs[name]


def _has_minus_inf(tensors: Iterable[Tensor]) -> bool:
    return any(bool(tensor.isneginf().any()) for tensor in tensors)


def _floating(given: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(given) if tensor.is_floating_point() and tensor.layout is torch.strided]


def is_in_place(op: str) -> bool:
    """Whether the op of this name writes into its first argument: ``add_``, or ``iadd`` for ``+=``."""
    return op.endswith("_") or op in ("iadd", "isub", "imul", "itruediv", "ipow")


def _made(result: Any, given: Any) -> list[Tensor]:
    """The floating tensors in ``result`` that are no views of what the call was given."""
    # A view has the range of what it shows, which its own op has told.
    found = [tensor for tensor in _floating(result) if tensor.numel()]
    known = {t.untyped_storage()._cdata for t in tensors_in(given) if t.layout is torch.strided} if found else ()
    return [t for t in found if t.untyped_storage()._cdata not in known]


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude, -inf and masks left out; NaN where there is inf or NaN."""
    return max_of(_largest_of(tensor) for tensor in tensors if tensor.is_floating_point() and tensor.numel())


def _largest_of(tensor: Tensor) -> float:
    values = real_values(tensor.detach())
    # One pass, and two numbers: .abs() would copy each activation.
    smallest, largest = (found.item() for found in torch.aminmax(values))
    if smallest < MASK:
        kept = values[values >= MASK]
        smallest, largest = (found.item() for found in torch.aminmax(kept)) if kept.numel() else (0.0, 0.0)
    found = max(-smallest, largest)
    return found if found < math.inf else math.nan


def max_of(values: Iterable[float]) -> float:
    """The largest of ``values``, NaN if one is; 0 for none."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
