"""Remedies for values beyond FP16's range: a registry, the smallest remedy first. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hf_mp.casting.rules import MOST_SCALED, SCALABLE, Divisors
from hf_mp.casting.tables import BEYOND_TORCH
from hf_mp.diagnostics.ranges import OpRange, is_in_place
from hf_mp.scaling.rules import FP16_MAX, power_of_two_below, scale_text, scale_with_headroom
from hf_mp.scaling.scalers import LossScaleError

FP16_NORMAL = 2.0**-14  # the smallest number that FP16 holds with all its bits
FP16_LOST = 2.0**-20  # of a tensor whose largest number is smaller, four bits are left at most, and most of it is zero
SPARE_DOUBLINGS = 4  # that a divided product may still grow
MOST_DIVIDED = 2**12  # a larger divisor takes results of magnitude 1 near FP16's smallest normal number, 2**-14


class Situation(NamedTuple):
    """What decides about a remedy."""

    found: OpRange  # what is out of range
    rules: Mapping[str, str]  # that hold already
    is_lean: bool = False  # whether weights are in FP16
    scale: float = 0.0  # that gradients in 16 bits are to be held at; 0 where the forward is looked at

    @property
    def excess(self) -> float:
        """By how much numbers are beyond FP16's end: those of the forward, or else scaled gradients."""
        return (self.scale * (self.found.fp16_gradient or 0.0) if self.scale else self.found.largest) / FP16_MAX


class Planned(NamedTuple):
    """A remedy for one place, and what made it necessary."""

    remedy: str
    rules: dict[str, str]
    found: OpRange


def _divided_product(at: Situation) -> dict[str, str]:
    """The product, or its backward, of numbers divided by powers of two; of stacked experts, for one of them."""
    found = at.found
    key = found.expert or f"{found.module}:{found.op}"
    before = Divisors.parse(at.rules[key]) if key in at.rules else Divisors()
    is_product = found.op in SCALABLE or (bool(found.expert) and found.op in BEYOND_TORCH)
    if before is None or not is_product or not math.isfinite(at.excess):  # None: it is ruled otherwise
        return {}
    by = _divided_further(before, at)
    # What is divided already was larger. The smallest results are to stay normal in FP16.
    is_normal = by.input * by.weight <= MOST_DIVIDED * max(1.0, found.least * before.input * before.weight)
    is_held = not at.is_lean or by.weight == 1  # a weight in FP16 is inf already
    return {key: str(by)} if is_normal and is_held and max(by) <= MOST_SCALED else {}


def _divided_further(before: Divisors, at: Situation) -> Divisors:
    """Divisors that bring in range what is not with those ``before``: a gradient, a weight or an input."""
    if at.scale:
        return before._replace(gradient=before.gradient * _power_for(at.excess))
    # What makes a result too large is to be divided; an input that is small would vanish.
    weight = at.found.largest_weight
    if weight > FP16_MAX or weight >= at.found.largest > 0.0:
        return before._replace(weight=before.weight * _power_for(weight / FP16_MAX))
    return before._replace(input=before.input * _power_for(at.excess))


def _power_for(excess: float) -> int:
    return 2 ** (max(math.ceil(excess).bit_length(), 1) + SPARE_DOUBLINGS)


def _op_in_fp32(at: Situation) -> dict[str, str]:
    # The target of an op in place stays what it is, in 16 bits.
    return {} if is_in_place(at.found.op) else {f"{at.found.module}:{at.found.op}": "fp32"}


def _module_in_fp32(at: Situation) -> dict[str, str]:
    return {at.found.module: "fp32"} if at.found.module else {}


# The rules of autocast that each puts in place, none where it does not apply; the smallest remedy first.
REMEDIES: dict[str, Callable[[Situation], dict[str, str]]] = {
    "the product of divided numbers": _divided_product,
    "the op in FP32": _op_in_fp32,
    "the module in FP32": _module_in_fp32,
}


def next_remedy(at: Situation) -> Planned:
    """The smallest remedy that was not tried for this place.

    Raises:
        CannotHealError: where all have been tried.
    """
    offers = [(name, rules_of(at)) for name, rules_of in REMEDIES.items()]
    # What holds already has not helped, and neither has what is smaller.
    held = [place for place, (_, rules) in enumerate(offers) if rules and rules.items() <= at.rules.items()]
    for name, rules in offers[max(held, default=-1) + 1 :]:
        if rules:
            return Planned(name, rules, at.found)
    what = f" in its backward at loss scale {scale_text(at.scale)}" if at.scale else ""
    raise CannotHealError(
        f"{at.found.op!r} in {at.found.module!r} stays out of FP16's range{what} with every remedy: use "
        "precision='bf16'"
    )


def leaving_range(ranges: Iterable[OpRange]) -> list[OpRange]:
    """The places where values leave the range that were in it before.

    What such a place feeds is left for the next look: it may be in range then.
    """
    return [found for found in ranges if found.is_origin and math.isfinite(found.largest)]


def cutting(ranges: Iterable[OpRange]) -> list[OpRange]:
    """The places where a finite number became -inf."""
    return [found for found in ranges if found.cuts]


def leaving_range_in_backward(ranges: Iterable[OpRange], scale: float) -> list[OpRange]:
    """The places where gradients leave the range at a loss scale, or are within a doubling of it."""
    return [found for found in ranges if 2.0 * scale * (found.fp16_gradient or 0.0) > FP16_MAX]


class ScaleRange(NamedTuple):
    """The loss scales that suit a backward; where ``fits`` is below ``needs``, no single one does."""

    fits: float  # the largest at which no gradient leaves FP16's range
    needs: float  # the smallest at which none is lost that was normal in FP16 at the scale so far

    def best(self, scale: float, floor: float) -> float:
        """The scale to go down to from ``scale``, not below ``floor``: that fits, or where what is lost is normal."""
        wanted = self.fits if self.fits >= self.needs else self.needs * FP16_NORMAL / FP16_LOST
        return min(scale, max(wanted, floor))


def scale_range(ranges: Iterable[OpRange], scale: float) -> ScaleRange:
    """The loss scales for a backward of these gradients, which overflowed at ``scale``."""
    sizes = [found.fp16_gradient for found in ranges if found.fp16_gradient]
    if not sizes:
        return ScaleRange(scale, 0.0)
    # What FP16 lost before is no loss now.
    held = [size for size in sizes if scale * size >= FP16_NORMAL]
    needs = -power_of_two_below(-FP16_LOST / min(held)) if held else 0.0
    return ScaleRange(scale_with_headroom(max(sizes), 1.0), needs)


def merged(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The rules of several processes as one: of two for the same place, the one with the wider range."""
    # Not the last one: ranks have to agree whatever the order that they are gathered in.
    found: dict[str, str] = {}
    for rules in several:
        for key, value in rules.items():
            found[key] = _wider(found.get(key, value), value)
    return found


def _wider(one: str, other: str) -> str:
    divisors, others = Divisors.parse(one), Divisors.parse(other)
    if divisors is None or others is None:  # FP32 and BF16 have the wider range
        return other if others is None and divisors is not None else one
    return str(Divisors(*map(max, divisors, others)))


class CannotHealError(LossScaleError):
    """No remedy keeps the model in FP16's range, or they would take more FLOPs out of 16 bits than is allowed."""
