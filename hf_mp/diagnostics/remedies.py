"""Remedies for values beyond FP16's range: a registry, the smallest remedy first. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_mp.casting.rules import SCALABLE
from hf_mp.diagnostics.ranges import OpRange, is_in_place
from hf_mp.scaling.rules import FP16_MAX
from hf_mp.scaling.scalers import LossScaleError

SPARE_DOUBLINGS = 4  # that a divided product may still grow
MOST_DIVIDED = 2**12  # a larger divisor takes numbers of magnitude 1 near FP16's smallest normal one, 2**-14


class Situation(NamedTuple):
    """What decides about a remedy."""

    found: OpRange  # what is out of range
    rules: Mapping[str, str]  # that hold already
    modules: Sequence[str]  # names of all modules
    has_bf16: bool  # whether the device computes in BF16


@dataclass(frozen=True)
class Remedy:
    """One kind of remedy; ``rules`` gives the rules of autocast that put it in place, empty where it does not apply."""

    name: str
    rules: Callable[[Situation], dict[str, str]]


class Planned(NamedTuple):
    """A remedy for one place, and what made it necessary."""

    remedy: str
    rules: dict[str, str]
    found: OpRange


def _divided_product(at: Situation) -> dict[str, str]:
    key, found = f"{at.found.module}:{at.found.op}", at.found
    if found.op not in SCALABLE or found.largest_weight > FP16_MAX or not math.isfinite(found.largest):
        return {}
    before = at.rules.get(key, "scaled/1")
    if not before.startswith("scaled/"):
        return {}
    doublings = max(math.ceil(found.largest / FP16_MAX).bit_length() + SPARE_DOUBLINGS, 1)
    divisor = int(before.removeprefix("scaled/")) * 2**doublings
    return {key: f"scaled/{divisor}"} if divisor <= MOST_DIVIDED else {}


def _op_in_fp32(at: Situation) -> dict[str, str]:
    return {} if is_in_place(at.found.op) else {f"{at.found.module}:{at.found.op}": "fp32"}


def _module_in_fp32(at: Situation) -> dict[str, str]:
    return {at.found.module: "fp32"} if at.found.module else {}


def _branch_in_fp32(at: Situation) -> dict[str, str]:
    """The child of the innermost numbered block: ``model.layers.3.mlp`` of ``model.layers.3.mlp.down_proj``."""
    parts = at.found.module.split(".")
    blocks = [place for place, part in enumerate(parts[:-1]) if part.isdecimal()]
    return {".".join(parts[: blocks[-1] + 2]): "fp32"} if blocks else {}


def _stream_from_here(at: Situation) -> dict[str, str]:
    """This block and all later ones of its stack."""
    parts = at.found.module.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return {}
    stack, dtype = ".".join(parts[:place]), "bf16" if at.has_bf16 else "fp32"
    blocks = [name for name in at.modules if (split := name.rpartition("."))[0] == stack and split[2].isdecimal()]
    return {name: dtype for name in blocks if int(name.rpartition(".")[2]) >= int(parts[place])}


REMEDIES = (
    Remedy("the product of divided numbers", _divided_product),
    Remedy("the op in FP32", _op_in_fp32),
    Remedy("the module in FP32", _module_in_fp32),
    Remedy("its residual branch in FP32", _branch_in_fp32),
    Remedy("the stream from here on", _stream_from_here),
)


def next_remedy(at: Situation) -> Planned | None:
    """The smallest remedy that was not tried for this place; None where none is left."""
    offers = [(remedy.name, remedy.rules(at)) for remedy in REMEDIES]
    held = [place for place, (_, rules) in enumerate(offers) if rules and rules.items() <= at.rules.items()]
    left = [offer for offer in offers[max(held, default=-1) + 1 :] if offer[1]]
    return Planned(*left[0], at.found) if left else None


def next_remedies(
    ranges: Iterable[OpRange], rules: Mapping[str, str], modules: Sequence[str], *, has_bf16: bool = False
) -> list[Planned]:
    """A remedy for each place of ``ranges`` where values leave the range that were in it before.

    What such a place feeds is left for the next look: it may be in range then.

    Raises:
        CannotHealError: for a place whose remedies have all been tried.
    """
    planned = []
    for found in ranges:
        if found.is_origin and math.isfinite(found.largest):
            remedy = next_remedy(Situation(found, rules, modules, has_bf16))
            if remedy is None:
                raise CannotHealError(
                    f"{found.op!r} in {found.module!r} stays out of FP16's range with every remedy: use "
                    "precision='bf16'"
                )
            planned.append(remedy)
    return planned


def merged(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The rules of several processes as one: of two for the same place, the one with the wider range."""
    found: dict[str, str] = {}
    for rules in several:
        for key, value in rules.items():
            found[key] = max(found.get(key, value), value, key=_reach)
    return found


def _reach(value: str) -> float:
    return float(value.removeprefix("scaled/")) if value.startswith("scaled/") else math.inf


class CannotHealError(LossScaleError):
    """No remedy keeps the model in FP16's range, or they would take more FLOPs out of 16 bits than is allowed."""
