"""``heal_overflows``: runs a step that overflowed again, with remedies or a lower loss scale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.utils import logging

from hf_mp.diagnostics.overflow import explain_overflows, failed_backwards, find_observer, runtime_of
from hf_mp.diagnostics.overflow_diagnosis import OverflowDiagnosis, diagnose_overflow
from hf_mp.diagnostics.remedies import CannotHealError, Remedy, merged
from hf_mp.diagnostics.step_snapshot import IncomingGradient, RecordedBackward, save_rng_states
from hf_mp.diagnostics.values import finiteness
from hf_mp.dtypes import needs_loss_scale
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import detect_parallelism, is_sharded
from hf_mp.scaling.rules import StepReport
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import StepController

logger = logging.get_logger(__name__)

NOT_HEALED = "on_overflow='heal': not healed: "
MOST_TRIES = 20  # reruns of one step


class _RerunLoss(NamedTuple):
    micro_batch: int  # from 1
    incoming: IncomingGradient  # of the first run
    value: Tensor  # of the rerun


class Healer(StepController):
    """Adds remedies when a step overflows, and runs the step again; returned by :func:`heal_overflows`.

    Attributes:
        healed: each :class:`Remedy` of this run, oldest first.
        clip: ``clip(optimizer)`` clips the gradients as the Trainer does; None if unknown.
        replace_logged_loss: ``replace_logged_loss(loss)``, FP32 of shape (), replaces this step's inf or NaN in the
            Trainer's loss sum; returns whether it did. None without a Trainer.
    """

    def __init__(self, runtime: MixedPrecision) -> None:
        check_healing(runtime.policy, in_backward=runtime.updates_in_backward)
        self._runtime = runtime
        runtime.check.compares_gradients = True
        self._explainer = explain_overflows(runtime)
        self.healed: list[Remedy] = []
        self.clip: Callable[[Optimizer], None] | None = None
        self.replace_logged_loss: Callable[[Tensor], bool] | None = None
        self._ddp: Any = None

    def on_forward_begin(self, forward: Any, args: Any, kwargs: Any) -> None:
        self._ddp = detect_parallelism(self._runtime.model).ddp

    def handle_overflow(self, optimizer: Optimizer) -> StepReport | None:
        """Run a step that overflowed again; return its last report, or None if it did not run.

        Raises:
            CannotHealError: if no remedy helps.
        """
        runtime = self._runtime
        model = runtime.model
        if model is None or is_sharded(model):
            logger.warning_once(f"{NOT_HEALED}the model is sharded, and one forward needs all processes")
            return None
        report, state_before, first_run = None, runtime.scaler.state, [*self._explainer.backwards]
        for _ in range(MOST_TRIES):
            if not self._apply_remedies():
                break
            losses = self._rerun_step(optimizer, first_run)
            report = runtime.check.all_ranks_report(runtime.clip_and_check(optimizer))
            if not report.overflow:
                self._replace_losses(losses)
                return report
        if runtime.scaler.state is not state_before:  # setting it would end the iteration of several optimizers
            runtime.scaler.state = state_before  # failed reruns do not count
        return report

    def _apply_remedies(self) -> bool:
        """Add the rules, or lower the loss scale, that any rank found; return whether to rerun the step.

        A collective call.
        """
        by_rank: list[OverflowDiagnosis | None] = self._runtime.ranks.gather(self._diagnose())
        found = [diagnosis for diagnosis in by_rank if diagnosis is not None]
        for diagnosis in found:
            if diagnosis.error:
                raise CannotHealError(diagnosis.error)
        rules = merged(remedy.rules for diagnosis in found for remedy in diagnosis.remedies)
        if rules:
            self._runtime.add_rules(rules)
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # compiled code lacks the hooks of new rules
        if not self._agree_to_rerun(has_rules=bool(rules)):
            return False
        return self._lower_scale(by_rank, has_rules=bool(rules)) or bool(rules)

    def _lower_scale(self, by_rank: list[OverflowDiagnosis | None], *, has_rules: bool) -> bool:
        """Lower the loss scale to the smallest one found, at most half of the current one; return whether it changed.

        It stays if a rank has no diagnosis, or if rules were added and none found a smaller scale.
        """
        before = self._runtime.scaler.get_scale()
        scale = min([before, *(diagnosis.scale or before for diagnosis in by_rank if diagnosis is not None)])
        # A rank without a diagnosis would overflow again.
        if None in by_rank or (has_rules and scale == before):
            return False
        # BF16 has 3 mantissa bits less than FP16: if its ranges show no overflow, the half is a guess.
        return self._runtime.scaler.back_off(min(scale, before / 2.0))

    def _agree_to_rerun(self, *, has_rules: bool) -> bool:
        """Return whether all ranks can run this step again. Warns if not and ``has_rules``. A collective call."""
        check = self._runtime.check
        # None if the loop has changed (clipped) the gradients.
        measured = check.measurement_if_unchanged(check.gradients(check.parameters()))
        can_repeat_clipping = self.clip is not None or measured is not None
        has_gradients = all(map(_has_known_gradients, self._explainer.backwards))
        if all(self._runtime.ranks.gather(can_repeat_clipping and has_gradients)):
            return True
        if has_rules:
            logger.warning(
                "on_overflow='heal': this step is skipped, because the loop has changed its gradients since the "
                "backward, has read those of a lean layout, has stepped another optimizer, or computes its loss "
                "outside the model; the next step runs with the remedy. If the loop clips, pass max_grad_norm=... to "
                "hf_mp.prepare instead"
            )
        return False

    def _diagnose(self) -> OverflowDiagnosis | None:
        for backward in failed_backwards(self._explainer.backwards):
            diagnosis = diagnose_overflow(self._runtime, backward)
            if diagnosis.reason:
                logger.warning_once(NOT_HEALED + diagnosis.reason)
                return None
            if diagnosis.error or diagnosis.scale is not None:
                if diagnosis.remedies:
                    self._record_remedies(diagnosis)
                return diagnosis
        return None

    def _record_remedies(self, diagnosis: OverflowDiagnosis) -> None:
        step = self._runtime.stats.steps + 1
        new = [replace(remedy, step=step) for remedy in diagnosis.remedies]
        self.healed += new
        lines = "\n".join(f"  {one}" for one in new)
        logger.warning(f"Step {step} left FP16's range in its forward, and is run again with:\n{lines}")

    def _rerun_step(self, optimizer: Optimizer, backwards: list[RecordedBackward]) -> list[_RerunLoss]:
        """Run all micro-batches again into new gradients, and clip."""
        runtime, restore_rng_states = self._runtime, save_rng_states()
        parameters = list(runtime.check.parameters())
        for parameter in parameters:
            parameter.grad = None
        runtime.check.reset_step()
        self._explainer.backwards.clear()
        # DDP's own forward would wait for ranks with fewer micro-batches.
        with nullcontext() if self._ddp is None else self._ddp._inside_ddp_forward():
            losses = [loss for number, backward in enumerate(backwards, 1) for loss in _run_again(backward, number)]
        restore_rng_states()  # later batches draw as without a rerun
        if self._ddp is not None:
            runtime.ranks.average([parameter.grad for parameter in parameters if parameter.grad is not None])
            runtime.check.measure(parameters)
        if self.clip is not None:
            self.clip(optimizer)
        return losses

    def _replace_losses(self, losses: list[_RerunLoss]) -> None:
        """Overwrite losses of inf or NaN of the first run."""
        lines = []
        for micro_batch, incoming, value in losses:
            first_value = incoming.call.losses[incoming.output]
            if finiteness(first_value):
                lines.append(
                    f"  {incoming.output!r} of micro-batch {micro_batch}: {value.item():g} for {first_value.item():g}"
                )
                if first_value._version == 0:  # not changed in place by the loop
                    first_value.copy_(value)
        if not lines:
            return
        # The gradient of a loss is its weight in the sum of the loop.
        parts = [(one.value * one.incoming.gradient).sum() for one in losses if one.incoming.gradient is not None]
        if self.replace_logged_loss is None or not self.replace_logged_loss(torch.stack(parts).sum()):
            lines.append("  Values computed from it before optimizer.step(), such as loss / 4, are still inf or NaN.")
        text = "\n".join(lines)
        logger.warning(f"Step {self._runtime.stats.steps + 1} is taken with the loss of its second run:\n{text}")


def _run_again(backward: RecordedBackward, number: int) -> list[_RerunLoss]:
    with torch.enable_grad():
        outputs = backward.run_recorded(lambda call, args, kwargs: call.forward.module()(*args, **kwargs))
    torch.autograd.backward(outputs, [incoming.gradient for incoming in backward.incoming])
    return [
        _RerunLoss(number, incoming, output.detach())
        for incoming, output in zip(backward.incoming, outputs, strict=True)
    ]


def _has_known_gradients(backward: RecordedBackward) -> bool:
    """Whether all gradients are stored, finite, and those of losses."""
    are_losses = all(entry.output in entry.call.losses for entry in backward.incoming)
    return are_losses and backward.has_all_gradients() and not backward.has_nonfinite_gradient()


def check_healing(policy: PrecisionPolicy, *, in_backward: bool) -> None:
    """Raise a ValueError if healing does not support these settings."""
    if not needs_loss_scale(policy.compute):
        raise ValueError(
            f"on_overflow='heal' is for FP16, and precision={str(policy)!r} has FP32's range: leave it out"
        )
    if in_backward:
        raise ValueError(
            "free_gradients='backward' has updated weights before an overflow is known, and the step cannot run again: "
            "use free_gradients='step' with on_overflow='heal'"
        )


def heal_overflows(model: nn.Module | MixedPrecision) -> Healer:
    """Run a step that overflows in FP16 again, with a remedy, instead of skipping it.

    First its micro-batches run in BF16, which has FP32's range. If values of the forward exceed 65504, the smallest
    remedy that keeps them in range (:data:`hf_mp.diagnostics.remedies.REMEDIES`) becomes a rule of autocast; otherwise
    the loss scale is lowered. Steps without overflow do no extra work, except a scan of the gradients if there is no
    loss scale. The rules are in ``state_dict()``, the stats and the log, and are the same on all ranks.

    A step is still skipped if the scale cannot be lowered enough, or if the loop changes gradients before it steps or
    computes its loss outside the model. To clip, use ``max_grad_norm`` of :func:`prepare`.

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.

    Returns:
        The healer; the same one for each call with a model.

    Raises:
        TypeError: for anything but a model or its MixedPrecision.
        ValueError: for a model that is not attached, a precision other than FP16, and ``free_gradients="backward"``.
    """
    runtime = runtime_of(model)
    if (healer := find_observer(runtime, Healer)) is None:
        healer = Healer(runtime)
        runtime.set_controller(healer)
    return healer
