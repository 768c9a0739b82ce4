"""Whether a skipped step is a loss scaler's ordinary search for its level, and how long it searches."""

from __future__ import annotations

from typing import Any

from hf_mp.scaling.rules import ScalerState, StepReport
from hf_mp.scaling.scalers import LossScaleError, LossScaler

MOST_SKIPS = 10_000  # beyond that, training does not stop in any practical sense


def is_finding_its_level(state: ScalerState, smallest_scale: float, clean_scale: float | None) -> bool:
    """Whether an overflow in this state is expected, since nothing is known yet about the scale in force.

    None at the smallest scale; above it the state of each rule says so.
    """
    return state.scale > smallest_scale and state.is_finding_its_level(clean_scale)


def skips_until_error(scaler: LossScaler[Any]) -> int | None:
    """Skipped steps in a row from now until :class:`LossScaleError`; None if it is not raised in practice."""
    probe = object.__new__(type(scaler))
    probe.__dict__.update(scaler.__dict__, _tensors={})
    for skips in range(1, MOST_SKIPS):
        try:
            probe.record_step(StepReport(overflow=True))
        except LossScaleError:
            return skips
    return None
