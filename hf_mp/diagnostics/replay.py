"""Replays one micro-batch of a failed step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from hf_mp.diagnostics.micro_batch_rerun import run_again, scaled_output_gradient
from hf_mp.diagnostics.nonfinite_tracker import NonfiniteOrigin, NonfiniteTracker
from hf_mp.diagnostics.overflow_diagnosis import diagnose_overflow
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.remedies import merged
from hf_mp.diagnostics.step_snapshot import RecordedBackward
from hf_mp.diagnostics.values import Finiteness, finiteness, ranges_of
from hf_mp.dtypes import needs_loss_scale
from hf_mp.kernels.gradient_scan import OVERFLOW_LIMIT
from hf_mp.ranks.parallelism import is_distributed, is_dtensor, is_sharded
from hf_mp.step.mixed_precision import MixedPrecision

_NOT_KEPT = (
    "a gradient that came into an output was too large to keep, so this backward could not be replayed; from now on it "
    "is kept, for the next failure"
)
_TOO_LARGE = (
    "a gradient is finite and its square is not (2**64 or more), so the step is skipped, as for inf: scale "
    "the loss down, or look for what multiplies it"
)


def replay(runtime: MixedPrecision, backward: RecordedBackward, report: OverflowReport) -> OverflowReport:
    """Run a micro-batch again, and return ``report`` with its origin and notes.

    Raises:
        RuntimeError: if that needs other ranks.
    """
    model, scale = runtime.model, runtime.scaler.get_scale()
    assert model is not None  # it was called
    _check_needs_no_other_rank(model)
    tracker = NonfiniteTracker(backward.calls[0].forward.module(), backward.inputs())
    dtype, has_all_gradients = runtime.policy.compute, backward.has_all_gradients()
    rerun = run_again(runtime, backward, tracker.tracking, dtype=dtype, scale=scale, with_gradients=has_all_gradients)
    if difference := _describe_difference(backward, rerun.outputs):
        return replace(report, notes=(difference,))
    too_large = [name for name, gradient in rerun.gradients.items() if finiteness(gradient, OVERFLOW_LIMIT * scale)]
    report = replace(report, nonfinite_gradients=tuple(too_large))
    # In the order of a step: an earlier non-finite value is the origin of later ones.
    origin = (
        _first_origin(map(tracker.get, rerun.outputs))
        or _origin_in_output_gradient(backward, rerun.outputs, scale)
        or _first_origin(tracker.of_gradients)
    )
    if origin is not None:
        return _with_origin(runtime, model, backward, report, origin)
    if has_all_gradients and not too_large:
        return report
    return replace(report, notes=(_TOO_LARGE if has_all_gradients else _NOT_KEPT,))


def _check_needs_no_other_rank(model: nn.Module) -> None:
    """Raise a RuntimeError if a forward makes collective calls: not every rank replays."""
    if is_distributed() and any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise RuntimeError("SyncBatchNorm communicates with the other processes, which do not replay")
    if is_sharded(model) or any(map(is_dtensor, model.parameters())):
        raise RuntimeError("its weights are sharded, and gathering them needs the other processes")


def _with_origin(
    runtime: MixedPrecision,
    model: nn.Module,
    backward: RecordedBackward,
    report: OverflowReport,
    origin: NonfiniteOrigin,
) -> OverflowReport:
    found = {name: getattr(origin, name) for name in ("phase", "module", "op", "tensor", "inputs", "outputs")}
    report, notes = replace(report, **found, smaller_scale_helps=False), list[str]()
    nonfinite = [name for name, buffer in model.named_buffers() if finiteness(buffer) is Finiteness.NOT_FINITE]
    if nonfinite and origin.phase != "weight":
        notes.append(f"the forward has left inf or NaN in {', '.join(nonfinite[:5])}, which a skip does not restore")
    if origin.phase in ("forward", "backward"):
        try:
            report = _with_diagnosis(runtime, backward, report)
        except Exception as error:  # of the model in another dtype; the origin stays valid
            notes.append(f"not tried in another precision: {type(error).__name__}: {error}")
    return replace(report, notes=tuple(notes))


def _describe_difference(backward: RecordedBackward, outputs: list[Tensor]) -> str:
    """Return a note if a loss is finite in only one of both runs, else ``""``."""
    for incoming, output in zip(backward.incoming, outputs, strict=True):
        loss = incoming.call.losses.get(incoming.output)
        if loss is not None and bool(finiteness(loss)) != bool(finiteness(output)):
            return (
                f"the output {incoming.output!r} was {loss.item():g} and came to {output.item():g} in the replay: "
                "the forward depends on more than its inputs, weights and random generators"
            )
    return ""


def _origin_in_output_gradient(
    backward: RecordedBackward, outputs: list[Tensor], scale: float
) -> NonfiniteOrigin | None:
    """Return the origin if the gradient of an output is not finite, unscaled or scaled."""
    for incoming, output in zip(backward.incoming, outputs, strict=True):
        gradient, name = incoming.gradient, incoming.output
        if gradient is None:
            continue
        if finiteness(gradient, OVERFLOW_LIMIT):
            ranges = ranges_of([(f"{name}, the output", output)]), ranges_of([("its gradient", gradient)])
            return NonfiniteOrigin("loss outside of the model", 0, "", "", name, *ranges)
        scaled = scaled_output_gradient(gradient, scale, output)
        if finiteness(scaled):
            ranges = ranges_of([("input 0", gradient)]), ranges_of([("output 0", scaled)])
            return NonfiniteOrigin("backward", 0, "", "loss scaling", "", *ranges)
    return None


def _with_diagnosis(runtime: MixedPrecision, backward: RecordedBackward, report: OverflowReport) -> OverflowReport:
    diagnosis = diagnose_overflow(runtime, backward)
    report = replace(report, finite_in_fp32=diagnosis.finite_in_fp32)
    if not needs_loss_scale(runtime.policy.compute):
        return report
    # Without rules (None), the report proposes the module in FP32.
    were_rules_tried = diagnosis.finite_in_bf16 or diagnosis.remedies
    rules = merged(remedy.rules for remedy in diagnosis.remedies) if were_rules_tried else None
    report = replace(report, finite_in_bf16=diagnosis.finite_in_bf16, rules=rules)
    if diagnosis.fits is None or report.phase != "backward":
        return report
    # `fits` leaves one doubling.
    return replace(report, smaller_scale_helps=True, largest_finite_scale=2.0 * diagnosis.fits)


def _first_origin(origins: Iterable[NonfiniteOrigin | None]) -> NonfiniteOrigin | None:
    found = [origin for origin in origins if origin is not None and not origin.is_mask]
    return min(found, key=lambda origin: origin.order, default=None)
