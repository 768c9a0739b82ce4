"""Finds states of a training that lose bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_mp.diagnostics.contract.lost_update_count import count_lost_updates
from hf_mp.dtypes import LOWER_PRECISION_DTYPES, spell

_MIN_LOST_SHARE = 0.01
_MIN_STUCK_SHARE = 0.5  # of second moments: 0 with FP32 moments, nearly 1 with BF16 and beta2=0.999
_MAX_UNROUNDED_SHARE = 0.01  # of weights: embeddings of unused tokens are not updated
_BETA2 = 0.999  # default of Adam
FINE_TUNING_RATE = 1e-5  # learning rate of AdamW for models of a billion parameters and more
ASSUMED = "assumed for fine-tuning (--learning-rate sets another)"
_NORM = re.compile(r"(^|\.)(\w*norm\w*|ln\w*|bn\d*)\.(weight|scale|gamma)$", re.IGNORECASE)


@dataclass(frozen=True)
class TensorSample:
    """A sampled tensor.

    Attributes:
        name: of the parameter or the state.
        dtype: stored dtype.
        elements: their number.
        values: sampled elements, of shape (n,), in ``dtype``.
        lost_share: share of a weight's updates that rounding drops, or None.
        unchanged_share: share of a weight's elements equal to the base, or None.
    """

    name: str
    dtype: torch.dtype
    elements: int
    values: Tensor
    lost_share: float | None = None
    unchanged_share: float | None = None

    @property
    def is_norm(self) -> bool:
        return _NORM.search(self.name) is not None


Held = TensorSample  # former name, for one release


@dataclass
class Evidence:
    """Tensors and settings of a training or a checkpoint.

    Attributes:
        weights: trained weights.
        firsts, seconds: moments of gradients, and of their squares.
        masters: FP32 master weights.
        sums: Kahan sums, the rounding errors of earlier updates.
        learning_rate: the largest; None if unknown.
        assumes_learning_rate: whether it is :data:`FINE_TUNING_RATE`, for files without one.
        beta2: the smallest decay of second moments.
        keeps_bits: whether the optimizer preserves small updates.
        is_training: whether the weights are or will be updated.
        is_saved: whether these are files.
    """

    weights: list[TensorSample] = field(default_factory=list)
    firsts: list[TensorSample] = field(default_factory=list)
    seconds: list[TensorSample] = field(default_factory=list)
    masters: list[TensorSample] = field(default_factory=list)
    sums: list[TensorSample] = field(default_factory=list)
    learning_rate: float | None = None
    assumes_learning_rate: bool = False
    beta2: float = _BETA2
    keeps_bits: bool = False
    is_training: bool = False
    is_saved: bool = False

    @property
    def narrow_weights(self) -> list[TensorSample]:
        return [one for one in self.weights if one.dtype in LOWER_PRECISION_DTYPES]

    @property
    def has_more_bits(self) -> bool:
        """Whether anything preserves the updates that 16-bit weights drop."""
        return bool(self.masters or self.sums) or self.keeps_bits


@dataclass(frozen=True)
class Risk:
    """A state that loses bits; ``str`` returns two lines.

    Attributes:
        kind: key of :data:`RULES`, for example ``"no masters"``.
        says: description with numbers.
        way_out: advice.
    """

    kind: str
    says: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}\n  way out: {self.way_out}"


def find_risks(evidence: Evidence) -> tuple[Risk, ...]:
    """Return all risks, in the order of :data:`RULES`."""
    found = ((kind, rule(evidence)) for kind, rule in RULES.items())
    return tuple(Risk(kind, *texts) for kind, texts in found if texts is not None)


Texts = tuple[str, str] | None  # `says` and `way_out` of a Risk; None without the risk


def _no_masters(evidence: Evidence) -> Texts:
    """16-bit weights without masters lose updates."""
    narrow = evidence.narrow_weights
    if not narrow or not evidence.is_training or evidence.has_more_bits or _were_fp32(evidence):
        return None
    measured = [(one.elements, one.lost_share) for one in narrow if one.lost_share is not None]
    if measured and mean(measured) < _MIN_LOST_SHARE:
        return None
    share = f"{mean(measured):.0%}" if measured else "an unknown share"
    rate = "" if evidence.learning_rate is None else f" at learning rate {evidence.learning_rate:g}"
    rate += f", {ASSUMED}," if evidence.assumes_learning_rate else ""
    return (
        f"{_elements(narrow):,} of {_elements(evidence.weights):,} weights are {_dtypes(narrow)} without an FP32 "
        f"master, and {share} of their updates{rate} are less than half a unit in the last place: rounding drops them",
        "give them masters: MixedPrecisionCallback('bf16') or hf_mp.prepare(model, optimizer, 'bf16'), or load the "
        "model with dtype=torch.float32" + ("; --keeps-bits for stochastic rounding" if evidence.is_saved else ""),
    )


def _lost_updates(evidence: Evidence) -> Texts:
    """Norm weights, which are near 1, are equal to the base, and others are not."""
    norms = [one for one in evidence.narrow_weights if one.is_norm and one.unchanged_share is not None]
    moved = 1.0 - mean((one.elements, share) for one in evidence.weights if (share := one.unchanged_share) is not None)
    were_only_norms_kept = moved > 0.0 and all(one.unchanged_share == 1.0 for one in norms)
    if not norms or evidence.has_more_bits or not were_only_norms_kept:
        return None
    return (
        f"all {len(norms)} norm weights, in {_dtypes(norms)}, are bit for bit those of the base, and {moved:.2%} of "
        "all weights are not: unless norms were frozen, rounding dropped their updates, which near 1 are less than "
        "half a unit in the last place",
        "these files lack what was lost: train again with masters (MixedPrecisionCallback('bf16'), or "
        "hf_mp.prepare(model, optimizer, 'bf16')), or load the model with dtype=torch.float32",
    )


def _rounded(evidence: Evidence) -> Texts:
    """FP32 weights were saved with 16-bit values."""
    fp32_moments = _fp32_moments(evidence)
    if not (evidence.is_saved and evidence.weights and fp32_moments) or evidence.has_more_bits:
        return None
    if evidence.narrow_weights and not _were_fp32(evidence):
        return None
    unrounded = mean((one.elements, 1.0 - _share_of_16_bits(one.values)) for one in evidence.weights)
    # With adapters, the 16-bit base is expected.
    trained_share = min(1.0, _elements(fp32_moments) / _elements(evidence.weights))
    if unrounded > _MAX_UNROUNDED_SHARE * trained_share:
        return None
    return (
        f"the moments are fp32, and {1.0 - unrounded:.0%} of the weights, stored in {_dtypes(evidence.weights)}, are "
        "16-bit values: FP32 weights were rounded when they were saved, and a run resumed from here lacks their bits",
        "resume from a checkpoint with FP32 weights; save without model.half(), model.to(torch.bfloat16) or a 16-bit "
        "gather (hf_mp's save_dtype leaves checkpoints in FP32)",
    )


def _stuck_seconds(evidence: Evidence) -> Texts:
    """BF16 second moments cannot decay."""
    narrow = [one for one in evidence.seconds if one.dtype is torch.bfloat16]
    decay = 1.0 - evidence.beta2  # relative change by a gradient of 0
    stuck = mean(
        (one.elements, count_lost_updates(one.values, one.values.double() * -decay, one.dtype).share) for one in narrow
    )
    if not narrow or stuck < _MIN_STUCK_SHARE:
        return None
    return (
        f"{_elements(narrow):,} of the second moments are bf16, and with beta2={evidence.beta2:g} a decay of "
        f"{decay:.2g} is less than half a unit in the last place: {stuck:.0%} of them stay where their "
        "largest gradient took them",
        "keep moments in FP32: train FP32 weights, whose moments torch makes FP32, or a beta2 of 0.99 and less",
    )


def _fp16_moments(evidence: Evidence) -> Texts:
    """FP16 moments underflow."""
    narrow = [one for one in (*evidence.firsts, *evidence.seconds) if one.dtype is torch.float16]
    if not narrow:
        return None
    zeros = mean((one.elements, float((one.values == 0).float().mean())) for one in narrow)
    return (
        f"{_elements(narrow):,} of the moments are fp16, where a gradient below 2.4e-4 has a square that is rounded to "
        f"0: {zeros:.0%} of them are 0",
        "keep moments in FP32: train FP32 weights, whose moments torch makes FP32",
    )


def _other_masters(evidence: Evidence) -> Texts:
    """Saved masters do not round to the saved weights."""
    if not evidence.is_saved:
        return None
    nearest = []
    # Optimizers number their masters, so compare each with the nearest weight of its size. DeepSpeed's are flat.
    for master in evidence.masters:
        size = master.elements, len(master.values)
        same_size = [one for one in evidence.narrow_weights if (one.elements, len(one.values)) == size]
        if same_size:
            nearest.append(min((_share_different(master, one), one.name) for one in same_size))
    # Stochastic rounding may differ in a few elements.
    different = [(share, name) for share, name in nearest if share > 1e-3]
    if not different:
        return None
    return (
        f"{len(different)} of {len(nearest)} masters do not round to their 16-bit weights ({different[0][0]:.0%} of "
        f"{different[0][1]}): a resumed training continues from the masters, and an evaluation reads the weights",
        "save both at one step, or write the masters into the weights first (DeepSpeed: zero_to_fp32.py)",
    )


RULES: dict[str, Callable[[Evidence], Texts]] = {
    "no masters": _no_masters,
    "lost updates": _lost_updates,
    "rounded weights": _rounded,
    "stuck second moments": _stuck_seconds,
    "fp16 moments": _fp16_moments,
    "masters disagree": _other_masters,
}


_ROLES = {
    "masters": r"master|fp32_groups|fp32_flat_groups|fp32_from_fp16",
    "sums": r"kahan|compensation|residual|rest$|correction",
    "seconds": r"exp_avg_sq|square_avg|state2$|\bv$",
    "firsts": r"exp_avg|momentum_buffer|state1$|\bm$",
}


def role_of(key: str) -> str | None:
    """Return the field of :class:`Evidence` for optimizer state, or None."""
    last = re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2]  # without indices of lists
    return next((role for role, pattern in _ROLES.items() if re.search(pattern, last)), None)


def learning_rate_of(groups: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the largest current or initial learning rate, or None."""
    rates = (group.get(key) for group in groups for key in ("lr", "initial_lr"))
    return max((float(rate) for rate in rates if rate is not None), default=None)


def beta2_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """Return the smallest beta2; Adam's default if the groups have none."""
    return min((float(group["betas"][1]) for group in groups if len(group.get("betas") or ()) > 1), default=_BETA2)


def _share_of_16_bits(values: Tensor) -> float:
    """Return the larger of the shares of values that BF16 and FP16 represent exactly."""
    return max(float((values.to(dtype).to(values.dtype) == values).float().mean()) for dtype in LOWER_PRECISION_DTYPES)


def _share_different(master: TensorSample, weight: TensorSample) -> float:
    """Return the share of weights that differ from masters by more than a unit in the last place."""
    # eps is that unit at 1; subnormals have the spacing of the smallest normal number.
    limits, exact = torch.finfo(weight.dtype), master.values.double()
    unit = (exact.abs() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    return float(((exact - weight.values.double()).abs() > unit).float().mean())


def _were_fp32(evidence: Evidence) -> bool:
    """Whether saved 16-bit weights were trained in FP32: torch's moments of FP32 weights are FP32."""
    fp32_weights = [one for one in evidence.weights if one.dtype is torch.float32]
    moments_of_others = _elements(_fp32_moments(evidence)) - _elements(fp32_weights)
    # Frozen weights and 8-bit optimizers have none, so half is enough.
    return evidence.is_saved and moments_of_others >= _elements(evidence.narrow_weights) / 2


def _fp32_moments(evidence: Evidence) -> list[TensorSample]:
    return [
        one
        for one in evidence.seconds or evidence.firsts
        if one.dtype is torch.float32 and not re.search(r"state[12]$", one.name)  # bitsandbytes: FP32 for all weights
    ]


def mean(weighted: Iterable[tuple[int, float]]) -> float:
    """Return the mean of (weight, value) pairs; 0 without any."""
    pairs = list(weighted)
    return sum(count * value for count, value in pairs) / max(1, sum(count for count, _ in pairs))


def _elements(samples: Iterable[TensorSample]) -> int:
    return sum(one.elements for one in samples)


def _dtypes(samples: Iterable[TensorSample]) -> str:
    return " and ".join(sorted({spell(one.dtype) for one in samples}))
