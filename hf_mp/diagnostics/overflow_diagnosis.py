"""``diagnose_overflow``: rules or a loss scale that prevent an overflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_mp.diagnostics.micro_batch_rerun import Rerun, measure_ranges
from hf_mp.diagnostics.ranges import OpRange
from hf_mp.diagnostics.remedies import CannotHealError, Remedy, first_out_of_range, fitting_scale, next_remedy
from hf_mp.diagnostics.step_snapshot import RecordedBackward
from hf_mp.dtypes import needs_loss_scale
from hf_mp.scaling.rules import scale_with_headroom
from hf_mp.step.mixed_precision import MixedPrecision

MAX_RANGE_RUNS = 40


@dataclass(frozen=True)
class OverflowDiagnosis:
    """Result of :func:`diagnose_overflow` for one micro-batch.

    Attributes:
        finite_in_fp32, finite_in_bf16: whether forward and, if it ran, backward are finite there.
        remedies: they keep the forward in FP16's range.
        scale: loss scale to use next; None if unknown.
        fits: largest loss scale with all gradients in FP16's range; None if not measured.
        reason: why no rule and no scale helps, or "".
        error: message of a :class:`CannotHealError`, or "".
    """

    finite_in_fp32: bool
    finite_in_bf16: bool
    remedies: tuple[Remedy, ...] = ()
    scale: float | None = None
    fits: float | None = None
    reason: str = ""
    error: str = ""


def diagnose_overflow(runtime: MixedPrecision, backward: RecordedBackward) -> OverflowDiagnosis:
    """Find, by trial, the rules or the loss scale that keep a micro-batch in FP16's range."""
    # A loss outside the model may have such a gradient because of the overflow.
    with_gradients = backward.has_all_gradients() and not backward.has_nonfinite_gradient()
    in_bf16 = measure_ranges(runtime, backward, with_gradients=with_gradients)
    finite_in_fp32 = in_bf16.is_finite
    if not finite_in_fp32:
        finite_in_fp32 = measure_ranges(runtime, backward, dtype=torch.float32, with_gradients=with_gradients).is_finite
    diagnosis = OverflowDiagnosis(finite_in_fp32, in_bf16.is_finite)
    if not finite_in_fp32:
        return replace(diagnosis, reason="it is inf or NaN in FP32, too: the cause is the model or its data")
    if not needs_loss_scale(runtime.policy.compute):
        return diagnosis
    try:
        remedies = find_rules(
            runtime, in_bf16.ranges, lambda rules: measure_ranges(runtime, backward, rules=rules).ranges
        )
    except CannotHealError as error:
        return replace(diagnosis, error=str(error))
    scale = runtime.scaler.get_scale()
    if remedies:
        return replace(diagnosis, remedies=tuple(remedies), scale=scale)
    if not in_bf16.is_finite:
        reason = "it is finite in FP32 and not in BF16 (a mask of finfo(float32).min is -inf there): train in FP32"
        return replace(diagnosis, reason=reason)
    if not with_gradients:
        return diagnosis
    fits = _fitting_scale(runtime, in_bf16, scale)
    return replace(diagnosis, fits=fits, scale=min(scale, max(fits, runtime.scaler.smallest_scale)))


def _fitting_scale(runtime: MixedPrecision, in_bf16: Rerun, scale: float) -> float:
    fits = fitting_scale(in_bf16.ranges, scale)
    if runtime.policy.is_lean:  # weight gradients are 16-bit too
        fits = min(fits, scale_with_headroom(in_bf16.largest_gradient or 1.0, 1.0))
    return fits


def find_rules(
    runtime: MixedPrecision,
    ops: Sequence[OpRange],
    measure: Callable[[dict[str, str]], Sequence[OpRange]],
) -> list[Remedy]:
    """Return the remedies, in addition to those of ``runtime``, with which all ops are in range.

    Args:
        runtime: has the active remedies.
        ops: the ranges with them.
        measure: ``measure(rules)`` returns the ranges with further rules.

    Raises:
        CannotHealError: if no rules help.
    """
    remedies: list[Remedy] = []
    rules: dict[str, str] = {}  # a larger remedy replaces those of one that did not help
    # A remedy may bring later ops into range too.
    for _ in range(MAX_RANGE_RUNS):
        added = [next_remedy(found, {**runtime.remedies, **rules}) for found in first_out_of_range(ops)]
        if not added:
            return [remedy for remedy in remedies if remedy.rules.items() <= rules.items()]
        for remedy in added:
            rules.update(remedy.rules)
        remedies += added
        ops = measure(rules)
    raise CannotHealError(
        f"after {MAX_RANGE_RUNS} forwards with ever more rules, values still leave FP16's range: use precision='bf16'"
    )
