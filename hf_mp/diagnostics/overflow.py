"""``explain_overflows``: finds the origin of the overflow in skipped steps."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_mp.diagnostics.kept_state import IncomingGradient, KeptBackward, KeptCall, keep_random_states
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.diagnostics.replay import replay
from hf_mp.kernels.gradient_scan import SQUARES_BELOW, largest_magnitude
from hf_mp.kernels.nested import named_tensors
from hf_mp.model_walk import model_parameters
from hf_mp.ranks.parallelism import get_rank, is_distributed, local_parts
from hf_mp.scaling.loss_scaler import WAY_OUT
from hf_mp.scaling.rules import StepReport
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import StepObserver
from hf_mp.weights.attachable import runtimes_of
from hf_mp.weights.outside_reads import on_stored_values

_Observer = TypeVar("_Observer", bound=StepObserver)
logger = logging.get_logger(__name__)

KEPT_ELEMENTS = 2**16  # incoming gradients up to this size are kept: 256 KiB in FP32


class OverflowExplainer(StepObserver):
    """Replays the micro-batch of a skipped step and reports the origin of the first inf or NaN; returned by
    :func:`explain_overflows`.

    Attributes:
        reports: one :class:`OverflowReport` for each explained step, oldest first.
        backwards: the micro-batches since the last step; with several optimizers, those that their steps have used.
    """

    def __init__(self, runtime: MixedPrecision) -> None:
        self._runtime = runtime
        self.backwards: list[KeptBackward] = []
        self._clean_scale: float | None = None  # the largest one of a step that was applied
        self._unclean_steps = 0  # in a row that called for an explanation
        self._unclean_before = 0  # before the current step, which several optimizers may share
        self._has_stepped = False  # whether an optimizer has used `backwards`
        self._keeps_all = False
        self._at_first: list[Tensor] | None = None  # the largest magnitude of each matrix at the first forward
        self.reports: list[OverflowReport] = []

    def forward_began(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the call; returns a callback for its outputs."""
        self._forget_used()
        if self._at_first is None and self._runtime.model is not None:
            self._at_first = _matrix_magnitudes(self._runtime.model)
        call = KeptCall(forward, args, kwargs, forward.module().training, keep_random_states())

        def forward_ended(outputs: Any) -> None:
            for name, output in named_tensors(outputs):
                if output.requires_grad:
                    if output.numel() == 1:
                        call.losses[name] = output.detach()
                    is_kept = output.numel() <= KEPT_ELEMENTS or self._keeps_all
                    # Until a backward comes through it, the graph alone holds the call.
                    output.register_hook(functools.partial(self._gradient_arrives, call, name, is_kept))

        return forward_ended

    def _gradient_arrives(self, call: KeptCall, name: str, is_kept: bool, gradient: Tensor | None) -> None:
        """Note the gradient of an output of ``call``, with its backward; its values only if ``is_kept``."""
        # check_gradients runs backwards of its own, with the run's observers taken away. DDP looking for unused
        # parameters hands on a None for each output without a gradient.
        if gradient is None or self not in self._runtime.observers:
            return
        self._forget_used()
        # of torch, private: outputs of one forward may get their gradients in several backwards, and the reverse
        task = torch._C._current_graph_task_id()
        if not self.backwards or self.backwards[-1].task != task:
            self.backwards.append(KeptBackward(task))
        self.backwards[-1].incoming.append(IncomingGradient(call, name, gradient if is_kept else None))

    def backward_ended(self, largest: Tensor | None) -> None:
        if self.backwards and largest is not None:
            self.backwards[-1].largest = largest

    def _forget_used(self) -> None:
        """Drop the micro-batches that an optimizer has used."""
        if self._has_stepped:
            self.backwards, self._has_stepped = [], False

    def stepped(self, report: StepReport) -> None:
        """Explain the step if it was skipped unexpectedly, and drop what was kept."""
        backwards, scaler = self.backwards, self._runtime.scaler
        if not self._runtime.is_joint_step:
            self._unclean_before = self._unclean_steps
        was_unclean = self._unclean_steps > self._unclean_before
        # Dropped first: inputs are not kept beyond their step, even if the code below raises. Another optimizer may
        # find an overflow in this step.
        self._has_stepped = True
        if report.overflow or len(self._runtime.guards) < 2:
            self._forget_used()
        if was_unclean:
            return
        if not report.overflow:
            self._clean_scale = max(self._clean_scale or 0.0, scaler.get_scale())
            self._unclean_steps, self._keeps_all = 0, False
            return
        suspects = suspects_of(backwards)
        # An ordinary search for the level asks for no explanation.
        is_search = scaler.get_scale() > scaler.smallest_scale and scaler.state.is_finding_its_level(self._clean_scale)
        if is_search and not any(backward.has_bad_loss() for backward in suspects):
            return
        self._unclean_steps = self._unclean_before + 1
        # A run that fails at every step is not to spend its time on replays.
        if suspects and self._unclean_steps & (self._unclean_steps - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... in a row
            self._publish(self._explain(suspects, backwards))

    def detached(self) -> None:
        self.backwards.clear()

    def last_words(self) -> str:
        """The way out of the last report, and the report."""
        if not self.reports or not self._unclean_steps:
            return ""
        last = self.reports[-1]  # the last steps may not have been replayed
        return f"{last.advice or WAY_OUT}\nThe last one that was replayed:\n{last.findings}"

    def _explain(self, suspects: list[KeptBackward], backwards: list[KeptBackward]) -> OverflowReport:
        """The first report that has found an origin, else the last one."""
        scaler, growth = self._runtime.scaler, self._weight_growth()
        for backward in suspects:
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
                # What was not kept may be why: it is, for the next failure.
                self._keeps_all = self._keeps_all or report.phase == "not found"
            except Exception as error:  # training goes on whatever the replay meets, and the report tells
                report = replace(report, notes=(f"the replay failed: {type(error).__name__}: {error}",))
            if report.phase != "not found":
                break
        return report

    def _weight_growth(self) -> float | None:
        """The factor by which trained matrices have grown since the first forward, in the median; None if not known."""
        model, before = self._runtime.model, self._at_first
        now = [] if model is None else _matrix_magnitudes(model)
        if not before or len(now) != len(before):  # parameters were frozen or unfrozen
            return None
        growth = torch.stack([new.cpu() / old.cpu() for new, old in zip(now, before, strict=True)])
        growth = growth[growth.isfinite()]
        return growth.median().item() if growth.numel() else None

    def _publish(self, report: OverflowReport) -> None:
        """Keep ``report``, and log it if its culprit is new."""
        # An inf that came from another process is explained there: all replay at the same time.
        if is_distributed() and report.phase == "not found" and not report.notes:
            return
        known = {earlier.culprit for earlier in self.reports}
        self.reports.append(report)
        # The same place overflows at many steps: it is one message.
        if report.culprit not in known:
            logger.warning(str(report))


@on_stored_values
def _matrix_magnitudes(model: nn.Module) -> list[Tensor]:
    """The largest magnitude of each trained matrix of ``model``: FP32 of shape (), on its device; 0 for no element."""
    matrices = [
        one for one in model_parameters(model) if one.requires_grad and one.is_floating_point() and one.ndim > 1
    ]
    return [largest_magnitude(local_parts([one.detach()])) for one in matrices]


def explain_overflows(model: nn.Module | MixedPrecision) -> OverflowExplainer:
    """Explain every skipped step, except the loss scaler's ordinary search for its level.

    Until ``optimizer.step()``, a step keeps references to its inputs and copies of the random generators' states. If
    the step is skipped, its micro-batch is replayed in forward and backward, without side effects. Each new culprit is
    logged as a warning; of consecutive skipped steps the 1st, 2nd, 4th, 8th, ... are replayed.

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.

    Returns:
        The explainer, with its ``reports``; always the same one for the same model.

    Raises:
        TypeError: if ``model`` is neither.
        ValueError: for a model that is not attached, and an FP32 policy.
    """
    runtime = runtime_of(model)
    if not runtime.policy.is_mixed:
        raise ValueError(f"precision={str(runtime.policy)!r} skips no steps: there is nothing to explain")
    if (explainer := observing(runtime, OverflowExplainer)) is None:
        explainer = OverflowExplainer(runtime)
        runtime.observers.insert(0, explainer)  # before a recorder, which writes down what is found of the same step
    return explainer


def observing(runtime: MixedPrecision, kind: type[_Observer]) -> _Observer | None:
    """The observer of this kind that a runtime has."""
    return next((observer for observer in runtime.observers if isinstance(observer, kind)), None)


def runtime_of(model: Any) -> MixedPrecision:
    """The runtime attached to ``model``, or ``model`` if it is one."""
    runtime = model if isinstance(model, MixedPrecision) else attached_runtime(model)
    if runtime is None:
        raise ValueError(
            f"no mixed precision is attached to this {type(model).__name__}: call hf_mp.prepare(...) first"
        )
    return runtime


def attached_runtime(model: nn.Module) -> MixedPrecision | None:
    """The runtime attached to ``model`` or to a model inside; None without, a TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is of type {type(model).__name__}: pass the nn.Module that is trained")
    return next(iter(runtimes_of(model)), None)


def suspects_of(backwards: list[KeptBackward]) -> list[KeptBackward]:
    """The micro-batches that may have failed: the first with a bad accumulated gradient; all if not measured, those
    with a non-finite loss first."""
    if all(backward.largest is not None for backward in backwards):
        bad = [b for b in backwards if b.largest is not None and not b.largest.item() < SQUARES_BELOW]
        return bad[:1] or backwards
    # Where nothing has measured them, as at a loss scale of 1 without healing: a bad loss is the likeliest.
    return sorted(backwards, key=KeptBackward.has_bad_loss, reverse=True)
