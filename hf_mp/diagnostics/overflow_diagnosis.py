"""What helps against the overflow of a micro-batch: rules and a loss scale, each tried, for reports and for healing."""

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

MAX_RANGE_RUNS = 40  # each forward shows what is left after the rules so far


@dataclass(frozen=True)
class OverflowDiagnosis:
    """What helps against an overflow, or why nothing does.

    Attributes:
        finite_in_fp32, finite_in_bf16: whether the micro-batch is, with its backward where that is known.
        remedies: of places that leave FP16's range, the rules that keep it there.
        scale: the loss scale to go to; None where it is not known.
        fits: the largest loss scale at which no gradient leaves FP16's range; None where the forward is at fault.
        reason: why nothing helps.
        error: why nothing will help in the next steps either.
    """

    finite_in_fp32: bool
    finite_in_bf16: bool
    remedies: tuple[Remedy, ...] = ()
    scale: float | None = None
    fits: float | None = None
    reason: str = ""
    error: str = ""


def diagnose_overflow(runtime: MixedPrecision, backward: RecordedBackward) -> OverflowDiagnosis:
    """Look for what keeps a micro-batch in range; nothing is put in place."""
    # A loss outside the model was computed from outputs that may be at fault: then its gradient says nothing.
    with_gradients = backward.has_all_gradients() and not backward.has_nonfinite_gradient()
    seen = measure_ranges(runtime, backward, with_gradients=with_gradients)
    # BF16 has FP32's range: what is finite there is not tried in FP32.
    in_fp32 = (
        seen.is_finite
        or measure_ranges(runtime, backward, dtype=torch.float32, with_gradients=with_gradients).is_finite
    )
    cure = OverflowDiagnosis(in_fp32, seen.is_finite)
    if not in_fp32:
        return replace(cure, reason="it is inf or NaN in FP32, too: the cause is the model or its data")
    if not needs_loss_scale(runtime.policy.compute):
        return cure
    scale = runtime.scaler.get_scale()
    try:
        placed = find_rules(runtime, seen.ranges, lambda rules: measure_ranges(runtime, backward, rules=rules).ranges)
    except CannotHealError as error:
        return replace(cure, error=str(error))
    if placed:
        return replace(cure, remedies=tuple(placed), scale=scale)
    if not seen.is_finite:
        reason = "it is finite in FP32 and not in BF16 (a mask of finfo(float32).min is -inf there): train in FP32"
        return replace(cure, reason=reason)
    return _with_scale(runtime, cure, seen, scale) if with_gradients else cure


def _with_scale(runtime: MixedPrecision, cure: OverflowDiagnosis, seen: Rerun, scale: float) -> OverflowDiagnosis:
    fits = fitting_scale(seen.ranges, scale)
    if runtime.policy.is_lean:  # the weights' gradients themselves are in 16 bits
        fits = min(fits, scale_with_headroom(seen.largest_gradient or 1.0, 1.0))
    return replace(cure, fits=fits, scale=min(scale, max(fits, runtime.scaler.smallest_scale)))


def find_rules(
    runtime: MixedPrecision,
    ops: Sequence[OpRange],
    measure: Callable[[dict[str, str]], Sequence[OpRange]],
) -> list[Remedy]:
    """The remedies with which ``measure``, given their rules besides those of ``runtime``, finds all in range.

    Raises:
        CannotHealError: where no rules help.
    """
    placed: list[Remedy] = []
    rules: dict[str, str] = {}
    # What a place feeds was out of range with it: each look shows what is left by itself.
    for _ in range(MAX_RANGE_RUNS):
        if not (planned := [next_remedy(found, {**runtime.remedies, **rules}) for found in first_out_of_range(ops)]):
            return [one for one in placed if one.rules.items() <= rules.items()]  # the others did not help
        for remedy in planned:
            rules.update(remedy.rules)
        placed += planned
        ops = measure(rules)
    raise CannotHealError(
        f"after {MAX_RANGE_RUNS} forwards with ever more rules, values still leave FP16's range: use precision='bf16'"
    )
