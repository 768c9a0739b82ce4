"""``PrecisionComparison``: a table and data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_mp.casting.text_table import format_columns
from hf_mp.diagnostics.as_json import for_json


@dataclass(frozen=True)
class PrecisionError:
    """Differences of one precision from FP32: inf or NaN if an output of the precision is.

    Attributes:
        precision: the policy.
        rules: the rules of autocast.
        logits_rms, logits_maximum: root mean square and largest magnitude of the differences of logits.
        log_probability_rms, log_probability_maximum: the same for natural log-probabilities of the tokens (or classes)
            that are most likely in FP32.
        kl: mean Kullback-Leibler divergence of this precision's distribution from FP32's, in nats. This and the two
            above are None if the output is no distribution.
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
    """Result of :func:`hf_mp.compare_precisions`; prints as a table.

    Attributes:
        model: name of the model's class.
        batches: number of batches.
        positions: number of compared tokens (or samples).
        errors: for each precision and its rules.
        notes: further observations.
    """

    model: str
    batches: int
    positions: int
    errors: tuple[PrecisionError, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for JSON; inf and NaN are None."""
        return for_json(self)

    def __str__(self) -> str:
        title = f"{self.model}: how far from FP32 ({self.batches} batches, {self.positions:,} positions)"
        likeliest = ("log-p RMS", "largest", "KL") if any(one.kl is not None for one in self.errors) else ()
        header = ("precision", "rules", "logits RMS", "largest", *likeliest)
        rows = []
        for one in self.errors:
            rules = ", ".join(f"{key}: {value}" for key, value in one.rules.items())
            numbers = one.logits_rms, one.logits_maximum, one.log_probability_rms, one.log_probability_maximum, one.kl
            rows.append((one.precision, rules, *(_short(number) for number in numbers if number is not None)))
        return "\n".join((title, format_columns([header, *rows], range(2, len(header))), *self.notes))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "inf/NaN"
    return f"{value:.1e}" if value else "0"
