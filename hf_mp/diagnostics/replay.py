"""Replays one micro-batch of a failed step: who made the first inf or NaN, and what would have helped."""

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
from hf_mp.kernels.gradient_scan import SQUARES_BELOW
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
    """``report``, completed by a forward and backward of one micro-batch without side effects.

    Raises:
        RuntimeError: where it would take the other processes.
    """
    model, scale = runtime.model, runtime.scaler.get_scale()
    assert model is not None  # it was called
    _refuse_what_takes_others(model)
    tracker = NonfiniteTracker(backward.calls[0].forward.module(), backward.inputs())
    dtype, is_kept = runtime.policy.compute, backward.has_all_gradients()
    rerun = run_again(runtime, backward, tracker.watching, dtype=dtype, scale=scale, with_gradients=is_kept)
    if difference := _difference(backward, rerun.outputs):
        # Nothing below is valid for another forward than the one that failed.
        return replace(report, notes=(difference,))
    limit = SQUARES_BELOW * scale
    too_large = [name for name, gradient in rerun.gradients.items() if finiteness(gradient, limit)]
    report = replace(report, nonfinite_gradients=tuple(too_large))
    # What comes first in a step is the origin of what comes later.
    origin = _first(map(tracker.of, rerun.outputs)) or _of_entry(backward, rerun.outputs, scale)
    if origin := origin or _first(tracker.of_gradients):
        return _with_origin(runtime, model, backward, report, origin)
    if not is_kept:
        return replace(report, notes=(_NOT_KEPT,))
    return replace(report, notes=(_TOO_LARGE,)) if too_large else report


def _refuse_what_takes_others(model: nn.Module) -> None:
    # A replay happens where a step failed, which the other processes do not know of.
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
    """``report`` with ``origin``, what may cure it, and notes on what a skipped step leaves behind."""
    found = {name: getattr(origin, name) for name in ("phase", "module", "op", "tensor", "inputs", "outputs")}
    report, notes = replace(report, **found, smaller_scale_helps=False), list[str]()
    spoiled = [name for name, buffer in model.named_buffers() if finiteness(buffer) is Finiteness.NOT_FINITE]
    if spoiled and origin.phase != "weight":  # one that is itself the origin needs no note
        notes.append(f"the forward has left inf or NaN in {', '.join(spoiled[:5])}, which a skip does not restore")
    if origin.phase in ("forward", "backward"):
        try:
            report = _with_cure(runtime, backward, report)
        except Exception as error:  # the model may do anything in another dtype, and the rest of the report stands
            notes.append(f"not tried in another precision: {type(error).__name__}: {error}")
    return replace(report, notes=tuple(notes))


def _difference(backward: RecordedBackward, outputs: list[Tensor]) -> str:
    """A note where a loss is finite in one of forward and replay alone; else ``""``."""
    for incoming, again in zip(backward.incoming, outputs, strict=True):
        loss = incoming.call.losses.get(incoming.output)
        if loss is not None and bool(finiteness(loss)) != bool(finiteness(again)):
            return (
                f"the output {incoming.output!r} was {loss.item():g} and came to {again.item():g} in the replay: "
                "the forward depends on more than its inputs, weights and random generators"
            )
    return ""


def _of_entry(backward: RecordedBackward, outputs: list[Tensor], scale: float) -> NonfiniteOrigin | None:
    """Whether a gradient that came in through an output is at fault, by itself or times the loss scale."""
    for incoming, output in zip(backward.incoming, outputs, strict=True):
        gradient, name = incoming.gradient, incoming.output
        # FP32 does not hold the square of a larger one, and the step is skipped for it as for inf.
        if gradient is not None and finiteness(gradient, SQUARES_BELOW):
            ranges = ranges_of([(f"{name}, the output", output)]), ranges_of([("its gradient", gradient)])
            return NonfiniteOrigin("loss outside of the model", 0, "", "", name, *ranges)
        if gradient is not None and finiteness(scaled := scaled_output_gradient(gradient, scale, output)):
            ranges = ranges_of([("input 0", gradient)]), ranges_of([("output 0", scaled)])
            return NonfiniteOrigin("backward", 0, "", "loss scaling", "", *ranges)
    return None


def _with_cure(runtime: MixedPrecision, backward: RecordedBackward, report: OverflowReport) -> OverflowReport:
    """``report``, with what helps."""
    cure = diagnose_overflow(runtime, backward)
    report = replace(report, finite_in_fp32=cure.finite_in_fp32)
    # A run in BF16 has tried it already, and needs no other loss scale.
    if not needs_loss_scale(runtime.policy.compute):
        return report
    # What BF16 does not hold, no rule was tried for: then the module is named.
    rules = merged(one.rules for one in cure.remedies) if cure.finite_in_bf16 or cure.remedies else None
    report = replace(report, finite_in_bf16=cure.finite_in_bf16, rules=rules)
    if cure.fits is None or report.phase != "backward":
        return report
    # Healing leaves a doubling of room.
    return replace(report, smaller_scale_helps=True, largest_finite_scale=2.0 * cure.fits)


def _first(origins: Iterable[NonfiniteOrigin | None]) -> NonfiniteOrigin | None:
    return min((one for one in origins if one is not None and not one.is_mask), key=lambda one: one.order, default=None)
