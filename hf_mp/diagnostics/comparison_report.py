"""``PrecisionComparison``: how far the precisions of a model are from FP32, as a table and data."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from hf_mp.casting.columns import aligned
from hf_mp.diagnostics.as_json import for_json


@dataclass(frozen=True)
class PrecisionError:
    """How far one precision is from FP32.

    Attributes:
        precision: the policy.
        rules: of autocast.
        logits_rms, logits_maximum: of the differences of all logits: root of their mean square, and largest magnitude.
            Inf or NaN where the precision gives such, as everything below.
        log_probability_rms, log_probability_maximum: of the differences of the log-probabilities, natural, of the
            tokens (or classes) that FP32 finds most likely; None for what is no distribution.
        kl: the mean over them of the Kullback-Leibler divergence of this precision's distribution from FP32's, in nats.
    """

    precision: str
    rules: dict[str, str]
    logits_rms: float
    logits_maximum: float
    log_probability_rms: float | None = None
    log_probability_maximum: float | None = None
    kl: float | None = None


@dataclass(frozen=True)
class PrecisionComparison:
    """What :func:`hf_mp.compare_precisions` found; prints as a table.

    Attributes:
        model: name of the model's class.
        batches: number of batches that were run.
        positions: number of tokens (or samples) whose logits were compared.
        errors: one for each precision and its rules.
        notes: further observations.
    """

    model: str
    batches: int
    positions: int
    errors: tuple[PrecisionError, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON; inf and NaN are None."""
        return for_json(self)

    def __str__(self) -> str:
        title = f"{self.model}: how far from FP32 ({self.batches} batches, {self.positions:,} positions)"
        likeliest = ("log-p RMS", "largest", "KL") if any(one.kl is not None for one in self.errors) else ()
        header = ("precision", "rules", "logits RMS", "largest", *likeliest)
        rows = []
        for one in self.errors:
            rules = ", ".join(f"{key}: {value}" for key, value in one.rules.items())
            rows.append((one.precision, rules, *(_short(number) for number in astuple(one)[2:] if number is not None)))
        return "\n".join((title, aligned([header, *rows], range(2, len(header))), *self.notes))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "inf/NaN"
    return f"{value:.1e}" if value else "0"
