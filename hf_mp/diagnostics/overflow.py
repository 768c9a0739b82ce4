"""``explain_overflows``: finds the origin of the overflow of a skipped step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.replay import replay
from hf_mp.diagnostics.step_snapshot import IncomingGradient, RecordedBackward, RecordedCall, save_rng_states
from hf_mp.kernels.gradient_scan import OVERFLOW_LIMIT, largest_magnitude
from hf_mp.kernels.nested import named_tensors
from hf_mp.model_index import model_parameters
from hf_mp.ranks.parallelism import get_rank, is_distributed, local_parts
from hf_mp.scaling.loss_scaler import DEFAULT_ADVICE
from hf_mp.scaling.rules import StepReport
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import StepObserver
from hf_mp.weights.attach_checks import runtimes_of
from hf_mp.weights.fp32_reads import on_stored_values

_Observer = TypeVar("_Observer", bound=StepObserver)
logger = logging.get_logger(__name__)

KEPT_ELEMENTS = 2**16  # in a stored gradient of an output: 256 KiB in FP32


class OverflowExplainer(StepObserver):
    """Replays skipped steps; returned by :func:`explain_overflows`.

    Attributes:
        reports: an :class:`OverflowReport` for each explained step, oldest first.
        backwards: the micro-batches since the last step; with several optimizers, also those used.
    """

    def __init__(self, runtime: MixedPrecision) -> None:
        self._runtime = runtime
        self.backwards: list[RecordedBackward] = []
        self._clean_scale: float | None = None  # largest loss scale of an applied step
        self._unclean_steps = 0  # consecutive skips, without those of the search for the scale
        self._unclean_before = 0  # the same before the current step, which several optimizers may share
        self._has_stepped = False
        self._keeps_all = False  # whether gradients of any size are stored
        self._at_first: list[Tensor] | None = None  # largest magnitude of each matrix at the first forward
        self.reports: list[OverflowReport] = []

    def on_forward_begin(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call; return a callback that hooks its outputs."""
        self._drop_used()
        if self._at_first is None and self._runtime.model is not None:
            self._at_first = _matrix_magnitudes(self._runtime.model)
        call = RecordedCall(forward, args, kwargs, forward.module().training, save_rng_states())

        # Only the graph references the call until a backward runs.
        return functools.partial(self._hook_outputs, call)

    def _hook_outputs(self, call: RecordedCall, outputs: Any) -> None:
        trained = [(name, output) for name, output in named_tensors(outputs) if output.requires_grad]
        for name, output in trained:
            if output.numel() == 1:
                call.losses[name] = output.detach()
            is_kept = output.numel() <= KEPT_ELEMENTS or self._keeps_all
            output.register_hook(functools.partial(self._record_output_gradient, call, name, is_kept))

    def _record_output_gradient(self, call: RecordedCall, name: str, is_kept: bool, gradient: Tensor | None) -> None:
        """Record the gradient of an output, with its values if ``is_kept``."""
        # check_gradients removes observers. DDP passes None for outputs without a gradient.
        if gradient is None or self not in self._runtime.observers:
            return
        self._drop_used()
        # Private API: outputs of one forward may receive gradients in several backwards, and the reverse.
        task = torch._C._current_graph_task_id()
        if not self.backwards or self.backwards[-1].task != task:
            self.backwards.append(RecordedBackward(task))
        self.backwards[-1].incoming.append(IncomingGradient(call, name, gradient if is_kept else None))

    def on_backward_end(self, largest: Tensor | None) -> None:
        if self.backwards and largest is not None:
            self.backwards[-1].largest = largest

    def _drop_used(self) -> None:
        if self._has_stepped:
            self.backwards, self._has_stepped = [], False

    def on_step_finished(self, report: StepReport) -> None:
        """Explain the step if it was skipped unexpectedly."""
        backwards = self.backwards
        if not self._runtime.is_joint_step:
            self._unclean_before = self._unclean_steps
        another_optimizer_skipped = self._unclean_steps > self._unclean_before
        # First, so that inputs are freed in any case. After an applied step, another optimizer may use them.
        self._has_stepped = True
        if report.overflow or len(self._runtime.guards) < 2:
            self._drop_used()
        if another_optimizer_skipped:
            return
        if not report.overflow:
            self._clean_scale = max(self._clean_scale or 0.0, self._runtime.scaler.get_scale())
            self._unclean_steps, self._keeps_all = 0, False
            return
        failed = failed_backwards(backwards)
        if self._is_searching_scale() and not any(backward.has_nonfinite_loss() for backward in failed):
            return  # expected
        self._unclean_steps = self._unclean_before + 1
        is_power_of_two = self._unclean_steps & (self._unclean_steps - 1) == 0
        if failed and is_power_of_two:
            self._publish(self._explain(failed, backwards))

    def _is_searching_scale(self) -> bool:
        scaler = self._runtime.scaler
        return scaler.get_scale() > scaler.smallest_scale and scaler.state.is_searching_scale(self._clean_scale)

    def on_detach(self) -> None:
        self.backwards.clear()

    def overflow_advice(self) -> str:
        """Return advice and findings of the last report; ``""`` after a clean step."""
        if not self.reports or not self._unclean_steps:
            return ""
        last = self.reports[-1]
        return f"{last.advice or DEFAULT_ADVICE}\nThe last one that was replayed:\n{last.findings}"

    def _explain(self, failed: list[RecordedBackward], backwards: list[RecordedBackward]) -> OverflowReport:
        """Replay micro-batches until an origin is found; return the last report."""
        scaler, growth = self._runtime.scaler, self._weight_growth()
        for backward in failed:
            report = OverflowReport(
                step=self._runtime.stats.steps + 1,
                micro_batch=backwards.index(backward) + 1,
                micro_batches=len(backwards),
                rank=get_rank(),
                phase="not found",
                loss_scale=scaler.get_scale(),
                smallest_scale=scaler.smallest_scale,
                weight_growth=growth,
            )
            try:
                report = replay(self._runtime, backward, report)
                # A missing gradient may be the reason.
                self._keeps_all = self._keeps_all or report.phase == "not found"
            except Exception as error:  # a replay must not end the training
                report = replace(report, notes=(f"the replay failed: {type(error).__name__}: {error}",))
            if report.phase != "not found":
                break
        return report

    def _weight_growth(self) -> float | None:
        """Return the median growth factor of trained matrices since the first forward, or None."""
        model, before = self._runtime.model, self._at_first
        now = [] if model is None else _matrix_magnitudes(model)
        if not before or len(now) != len(before):  # parameters were frozen or unfrozen
            return None
        growth = torch.stack([new.cpu() / old.cpu() for new, old in zip(now, before, strict=True)])
        growth = growth[growth.isfinite()]
        return growth.median().item() if growth.numel() else None

    def _publish(self, report: OverflowReport) -> None:
        # An inf of another rank is explained there.
        if is_distributed() and report.phase == "not found" and not report.notes:
            return
        logged = {earlier.culprit for earlier in self.reports}
        self.reports.append(report)
        if report.culprit not in logged:
            logger.warning(str(report))


@on_stored_values
def _matrix_magnitudes(model: nn.Module) -> list[Tensor]:
    """Return the largest magnitude of each trained matrix, FP32 of shape ()."""
    matrices = [
        one for one in model_parameters(model) if one.requires_grad and one.is_floating_point() and one.ndim > 1
    ]
    return [largest_magnitude(local_parts([one.detach()])) for one in matrices]


def explain_overflows(model: nn.Module | MixedPrecision) -> OverflowExplainer:
    """Explain every skipped step, except those of the loss scaler's search for its scale.

    A step stores references to its inputs and copies of the RNG states. If it is skipped, its micro-batch is replayed,
    and each new origin is logged as a warning. Of consecutive skipped steps the 1st, 2nd, 4th, 8th, ... are replayed.

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.

    Returns:
        The explainer; the same one for each call with a model.

    Raises:
        TypeError: if ``model`` is neither.
        ValueError: for a model that is not attached, and an FP32 policy.
    """
    runtime = runtime_of(model)
    if not runtime.policy.is_mixed:
        raise ValueError(f"precision={str(runtime.policy)!r} skips no steps: there is nothing to explain")
    if (explainer := find_observer(runtime, OverflowExplainer)) is None:
        explainer = OverflowExplainer(runtime)
        runtime.observers.insert(0, explainer)  # before a PrecisionRecorder, which writes its reports
    return explainer


def find_observer(runtime: MixedPrecision, kind: type[_Observer]) -> _Observer | None:
    return next((observer for observer in runtime.observers if isinstance(observer, kind)), None)


def runtime_of(model: Any) -> MixedPrecision:
    """Return the runtime of ``model``, which may be one; raise a ValueError if there is none."""
    runtime = model if isinstance(model, MixedPrecision) else attached_runtime(model)
    if runtime is None:
        raise ValueError(
            f"no mixed precision is attached to this {type(model).__name__}: call hf_mp.prepare(...) first"
        )
    return runtime


def attached_runtime(model: nn.Module) -> MixedPrecision | None:
    """Return the runtime attached to ``model`` or a model inside it, or None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is of type {type(model).__name__}: pass the nn.Module that is trained")
    return next(iter(runtimes_of(model)), None)


def failed_backwards(backwards: list[RecordedBackward]) -> list[RecordedBackward]:
    """Return the first micro-batch after which the gradients overflow; if they were not measured, all."""
    if all(backward.largest is not None for backward in backwards):
        failed = [b for b in backwards if b.largest is not None and not b.largest.item() < OVERFLOW_LIMIT]
        return failed[:1] or backwards
    return sorted(backwards, key=RecordedBackward.has_nonfinite_loss, reverse=True)
