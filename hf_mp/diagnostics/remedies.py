"""Remedies for values beyond FP16's range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hf_mp.casting.rules import MOST_SCALED, SCALABLE, parse_divisor
from hf_mp.diagnostics.ranges import OpRange, is_in_place
from hf_mp.scaling.rules import FP16_MAX, scale_with_headroom
from hf_mp.scaling.scalers import LossScaleError

SPARE_DOUBLINGS = 4
MOST_DIVIDED = 2**12  # brings results of magnitude 1 near FP16's smallest normal number, 2**-14


@dataclass(frozen=True)
class Remedy:
    """A remedy for one op of one module.

    Attributes:
        remedy: its key in :data:`REMEDIES`.
        rules: the autocast rules that it adds.
        module, op: with values beyond FP16's range.
        largest: their largest magnitude; FP16 ends at 65504.
        step: number of the step that added it, from 1.
    """

    remedy: str
    rules: dict[str, str]
    module: str
    op: str
    largest: float
    step: int = 0

    def __str__(self) -> str:
        where = f"{self.op!r} in {f'module {self.module!r}' if self.module else 'the model itself'}"
        return f"{where} reached {self.largest:g}, and FP16 ends at {FP16_MAX:g}: {self.remedy} ({self.rules})"


def _divided_product(found: OpRange, held: Mapping[str, str]) -> dict[str, str]:
    """Return a rule that divides the input of a matmul; empty if that cannot help."""
    key, excess = f"{found.module}:{found.op}", found.largest / FP16_MAX
    active = parse_divisor(held[key]) if key in held else 1  # None for another rule
    if active is None or found.op not in SCALABLE or not math.isfinite(excess):
        return {}
    divisor = active * 2 ** (max(math.ceil(excess).bit_length(), 1) + SPARE_DOUBLINGS)
    # The smallest results, measured after the active division, must stay normal in FP16.
    keeps_normal = divisor <= MOST_DIVIDED * max(1.0, found.least * active)
    return {key: f"scaled/{divisor}"} if keeps_normal and divisor <= MOST_SCALED else {}


# The smallest first. Each returns rules, or none if it does not apply; `held` are the active ones.
REMEDIES: dict[str, Callable[[OpRange, Mapping[str, str]], dict[str, str]]] = {
    "the product of divided numbers": _divided_product,
    # The target of an in-place op stays 16-bit.
    "the op in FP32": lambda found, held: {} if is_in_place(found.op) else {f"{found.module}:{found.op}": "fp32"},
    "the module in FP32": lambda found, held: {found.module: "fp32"} if found.module else {},
}


def next_remedy(found: OpRange, held: Mapping[str, str]) -> Remedy:
    """Return the smallest remedy for ``found`` that is larger than the active rules ``held``.

    Raises:
        CannotHealError: if all remedies have been tried.
    """
    all_rules = {name: rules_of(found, held) for name, rules_of in REMEDIES.items()}
    offers = [Remedy(name, rules, found.module, found.op, found.largest) for name, rules in all_rules.items() if rules]
    # An active remedy has not helped, nor would a smaller one.
    while any(offer.rules.items() <= held.items() for offer in offers):
        offers.pop(0)
    if not offers:
        raise CannotHealError(
            f"{found.op!r} in {found.module!r} stays out of FP16's range with every remedy: use precision='bf16'"
        )
    return offers[0]


def first_out_of_range(ranges: Iterable[OpRange]) -> list[OpRange]:
    """Return the ops with values out of range from inputs in range."""
    return [found for found in ranges if found.is_origin and math.isfinite(found.largest)]


def fitting_scale(ranges: Iterable[OpRange], scale: float) -> float:
    """Return the largest loss scale with all gradients in FP16's range; ``scale`` without gradients."""
    largest = max((found.fp16_gradient or 0.0 for found in ranges), default=0.0)
    return scale_with_headroom(largest, 1.0) if largest else scale


def merged(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge the rules of several ranks. Of two for one key, the wider range has priority."""
    found: dict[str, str] = {}
    for rules in several:
        for key, value in rules.items():
            # "fp32", without a divisor, has the widest range.
            found[key] = max(found.get(key, value), value, key=lambda rule: parse_divisor(rule) or math.inf)
    return found


class CannotHealError(LossScaleError):
    """No remedy keeps the model in FP16's range."""
