"""States of a training that lose bits: each is found by a function of what the training holds, with the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_mp.diagnostics.contract.swamped import swamped
from hf_mp.dtypes import LOWER_PRECISION_DTYPES, spell

_LOSES_MANY = 0.01  # share of updates from which on the advice is to keep masters
# Of healthy FP32 moments none is stuck; of BF16 with beta2=0.999 nearly all. In between lies nothing known.
_STUCK = 0.5  # share of second moments
_HARDLY_ANY = 0.01  # rows of an embedding that no token reads keep the values that they were loaded with
_BETA2 = 0.999
FINE_TUNING_RATE = 1e-5  # of AdamW for models of a billion parameters and more
ASSUMED = "assumed for fine-tuning (--learning-rate sets another)"
_NORM = re.compile(r"(^|\.)(\w*norm\w*|ln\w*|bn\d*)\.(weight|scale|gamma)$", re.IGNORECASE)


@dataclass(frozen=True)
class Held:
    """A tensor that a training or a checkpoint holds, as far as it was looked at.

    Attributes:
        name: where it is from.
        dtype: as it is stored.
        elements: of all of it.
        values: some of them, of shape (n,), in that dtype.
        lost_share: of a weight, the share of its updates that rounding drops; None where their size is not known.
        unchanged_share: of a weight, the share of its elements that are those of the base; None where none is compared.
    """

    name: str
    dtype: torch.dtype
    elements: int
    values: Tensor
    lost_share: float | None = None
    unchanged_share: float | None = None

    @property
    def is_norm(self) -> bool:
        """Whether it is the weight of a norm, by its name: norms begin at 1, where 16 bits are coarse."""
        return _NORM.search(self.name) is not None


@dataclass
class Evidence:
    """What is known of a training, by role.

    Attributes:
        weights: those that are, or may be, trained.
        firsts, seconds: moments: averages of gradients, and of their squares.
        masters: FP32 values next to 16-bit weights.
        sums: Kahan's: what rounding took from the updates so far.
        learning_rate: the largest; None where it is not known.
        assumes_learning_rate: whether it is :data:`FINE_TUNING_RATE`, for 16-bit weights in files that give none.
        beta2: the smallest decay of the second moments.
        keeps_bits: whether the optimizer has its own way to keep small updates, as stochastic rounding.
        is_training: whether an optimizer updates the weights, or is assumed to.
        is_saved: whether these are files; else a training that runs.
    """

    weights: list[Held] = field(default_factory=list)
    firsts: list[Held] = field(default_factory=list)
    seconds: list[Held] = field(default_factory=list)
    masters: list[Held] = field(default_factory=list)
    sums: list[Held] = field(default_factory=list)
    learning_rate: float | None = None
    assumes_learning_rate: bool = False
    beta2: float = _BETA2
    keeps_bits: bool = False
    is_training: bool = False
    is_saved: bool = False

    @property
    def narrow_weights(self) -> list[Held]:
        """Those of 16 bits."""
        return [one for one in self.weights if one.dtype in LOWER_PRECISION_DTYPES]

    @property
    def has_more_bits(self) -> bool:
        """Whether updates that 16-bit weights drop are kept elsewhere."""
        return bool(self.masters or self.sums) or self.keeps_bits


@dataclass(frozen=True)
class Risk:
    """A state that loses bits; prints as what it is and what to do.

    Attributes:
        kind: of :data:`RULES`, as ``"no masters"``.
        says: what is there, with numbers.
        way_out: what to do.
    """

    kind: str
    says: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}\n  way out: {self.way_out}"


def find_risks(evidence: Evidence) -> tuple[Risk, ...]:
    """All risks of a training, in the order of :data:`RULES`."""
    return tuple(Risk(kind, *words) for kind, rule in RULES.items() if (words := rule(evidence)) is not None)


Words = tuple[str, str] | None  # says, way out


def _no_masters(evidence: Evidence) -> Words:
    narrow = evidence.narrow_weights
    known = [(one.elements, one.lost_share) for one in narrow if one.lost_share is not None]
    # At a learning rate of 1 even BF16 keeps what counts: a warning there would be one too many.
    loses = evidence.is_training and not (known and mean(known) < _LOSES_MANY)
    if not (narrow and loses) or evidence.has_more_bits or _are_of_fp32(evidence):
        return None
    share = f"{mean(known):.0%}" if known else "an unknown share"
    rate = "" if evidence.learning_rate is None else f" at learning rate {evidence.learning_rate:g}"
    rate += f", {ASSUMED}," if evidence.assumes_learning_rate else ""
    return (
        f"{_elements(narrow):,} of {_elements(evidence.weights):,} weights are {_spelled(narrow)} without an FP32 "
        f"master, and {share} of their updates{rate} are less than half a unit in the last place: rounding drops them",
        "give them masters: MixedPrecisionCallback('bf16') or hf_mp.prepare(model, optimizer, 'bf16'), or load the "
        "model with dtype=torch.float32" + ("; --keeps-bits for stochastic rounding" if evidence.is_saved else ""),
    )


def _lost_updates(evidence: Evidence) -> Words:
    norms = [one for one in evidence.narrow_weights if one.is_norm and one.unchanged_share is not None]
    moved = 1.0 - mean((one.elements, share) for one in evidence.weights if (share := one.unchanged_share) is not None)
    # Where nothing moved at all, nobody trained.
    if not norms or not moved or evidence.has_more_bits or any(one.unchanged_share != 1.0 for one in norms):
        return None
    return (
        f"all {len(norms)} norm weights, in {_spelled(norms)}, are bit for bit those of the base, and {moved:.2%} of "
        "all weights are not: unless norms were frozen, rounding dropped their updates, which near 1 are less than "
        "half a unit in the last place",
        "these files lack what was lost: train again with masters (MixedPrecisionCallback('bf16'), or "
        "hf_mp.prepare(model, optimizer, 'bf16')), or load the model with dtype=torch.float32",
    )


def _rounded(evidence: Evidence) -> Words:
    if not (evidence.is_saved and evidence.weights) or evidence.has_more_bits:
        return None
    whole = mean((one.elements, 1.0 - _share_of_16_bits(one.values)) for one in evidence.weights)
    # torch makes moments in the dtype of their weight, so FP32 ones tell of weights that were FP32.
    wide = _moments_of_fp32(evidence)
    # Adapters: the base is 16-bit by right, and what was trained is a small part of the weights.
    trained = min(1.0, _elements(wide) / _elements(evidence.weights))
    if not wide or whole > _HARDLY_ANY * trained or (evidence.narrow_weights and not _are_of_fp32(evidence)):
        return None
    return (
        f"the moments are fp32, and {1.0 - whole:.0%} of the weights, stored in {_spelled(evidence.weights)}, are "
        "16-bit values: FP32 weights were rounded when they were saved, and a run resumed from here lacks their bits",
        "resume from a checkpoint with FP32 weights; save without model.half(), model.to(torch.bfloat16) or a 16-bit "
        "gather (hf_mp's save_dtype leaves checkpoints in FP32)",
    )


def _stuck_seconds(evidence: Evidence) -> Words:
    narrow = [one for one in evidence.seconds if one.dtype is torch.bfloat16]
    # The decay is what has to survive: an increase is large where a gradient is, and gets through.
    decay = 1.0 - evidence.beta2  # all that a step with a gradient of 0 does
    stuck = mean((one.elements, swamped(one.values, one.values.double() * -decay, one.dtype).share) for one in narrow)
    if not narrow or stuck < _STUCK:
        return None
    return (
        f"{_elements(narrow):,} of the second moments are bf16, and with beta2={evidence.beta2:g} a decay of "
        f"{decay:.2g} is less than half a unit in the last place: {stuck:.0%} of them stay where their "
        "largest gradient took them",
        "keep moments in FP32: train FP32 weights, whose moments torch makes FP32, or a beta2 of 0.99 and less",
    )


def _fp16_moments(evidence: Evidence) -> Words:
    narrow = [one for one in (*evidence.firsts, *evidence.seconds) if one.dtype is torch.float16]
    if not narrow:
        return None
    zeros = mean((one.elements, float((one.values == 0).float().mean())) for one in narrow)
    return (
        f"{_elements(narrow):,} of the moments are fp16, where a gradient below 2.4e-4 has a square that is rounded to "
        f"0: {zeros:.0%} of them are 0",
        "keep moments in FP32: train FP32 weights, whose moments torch makes FP32",
    )


def _other_masters(evidence: Evidence) -> Words:
    nearest = []
    # Optimizers number their masters: each is compared with the weight of its size that is nearest to it. DeepSpeed's
    # are flat and cut across ranks, so that none has the size of a weight.
    for master in evidence.masters if evidence.is_saved else ():
        size = master.elements, len(master.values)
        alike = [one for one in evidence.narrow_weights if (one.elements, len(one.values)) == size]
        nearest += sorted((_share_apart(master, one), one.name) for one in alike)[:1]
    # A thousandth is left for what an optimizer rounds otherwise, such as stochastically.
    off = [(share, name) for share, name in nearest if share > 1e-3]
    if not off:
        return None
    return (
        f"{len(off)} of {len(nearest)} masters do not round to their 16-bit weights ({off[0][0]:.0%} of "
        f"{off[0][1]}): a resumed training continues from the masters, and an evaluation reads the weights",
        "save both at one step, or write the masters into the weights first (DeepSpeed: zero_to_fp32.py)",
    )


RULES: dict[str, Callable[[Evidence], Words]] = {
    "no masters": _no_masters,
    "lost updates": _lost_updates,
    "rounded weights": _rounded,
    "stuck second moments": _stuck_seconds,
    "fp16 moments": _fp16_moments,
    "masters disagree": _other_masters,
}


# What the rules are made of

_ROLES = {
    # First match wins: "fp32_groups" of DeepSpeed would else be read by the words below.
    "masters": r"master|fp32_groups|fp32_flat_groups|fp32_from_fp16",
    "sums": r"kahan|compensation|residual|rest$|correction",
    "seconds": r"exp_avg_sq|square_avg|state2$|\bv$",
    "firsts": r"exp_avg|momentum_buffer|state1$|\bm$",
}


def role_of(key: str) -> str | None:
    """The role in :class:`Evidence` of an optimizer's state by the last word of its name; None for others."""
    last = re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2]  # a list numbers what it holds
    return next((role for role, words in _ROLES.items() if re.search(words, last)), None)


def learning_rate_of(groups: Iterable[Mapping[str, Any]]) -> float | None:
    """The largest of those now and those that an LR scheduler keeps; None where the optimizer finds its own."""
    rates = (group.get(key) for group in groups for key in ("lr", "initial_lr"))
    return max((float(rate) for rate in rates if rate is not None), default=None)


def beta2_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """The smallest decay of second moments in an optimizer's groups, Adam's default where they name none."""
    return min((float(group["betas"][1]) for group in groups if len(group.get("betas") or ()) > 1), default=_BETA2)


def _share_of_16_bits(values: Tensor) -> float:
    """The share of values that BF16 or FP16 holds; 1 where all do."""
    return max(float((values.to(dtype).to(values.dtype) == values).float().mean()) for dtype in LOWER_PRECISION_DTYPES)


def _share_apart(master: Held, weight: Held) -> float:
    """The share of weights that are a unit in the last place and more away from their masters."""
    # eps is a unit in the last place at 1; below the normal numbers the spacing stays what it is.
    limits, exact = torch.finfo(weight.dtype), master.values.double()
    unit = (exact.abs() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    return float(((exact - weight.values.double()).abs() > unit).float().mean())


def _are_of_fp32(evidence: Evidence) -> bool:
    """Whether 16-bit weights in files have FP32 moments, as torch makes them for FP32 weights."""
    wide = [one for one in evidence.weights if one.dtype is torch.float32]
    spare = _elements(_moments_of_fp32(evidence)) - _elements(wide)
    # Half: 8-bit optimizers and frozen parts leave some weights without moments.
    return evidence.is_saved and spare >= _elements(evidence.narrow_weights) / 2


def _moments_of_fp32(evidence: Evidence) -> list[Held]:
    return [
        one
        for one in evidence.seconds or evidence.firsts
        if one.dtype is torch.float32 and not re.search(r"state[12]$", one.name)  # bitsandbytes': FP32 over any weight
    ]


def mean(weighted: Iterable[tuple[int, float]]) -> float:
    """Of values, each with its weight; 0 of none."""
    pairs = list(weighted)
    return sum(count * value for count, value in pairs) / max(1, sum(count for count, _ in pairs))


def _elements(held: Iterable[Held]) -> int:
    return sum(one.elements for one in held)


def _spelled(held: Iterable[Held]) -> str:
    return " and ".join(sorted({spell(one.dtype) for one in held}))
