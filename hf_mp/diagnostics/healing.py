"""``heal_overflows``: keeps in range the values and gradients that left FP16's range, and runs the step again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.utils import logging

from hf_mp.diagnostics.cures import Cure, find_cure
from hf_mp.diagnostics.kept_state import IncomingGradient, KeptBackward, keep_random_states
from hf_mp.diagnostics.overflow import explain_overflows, observing, runtime_of, suspects_of
from hf_mp.diagnostics.remedies import CannotHealError, Remedy, merged
from hf_mp.diagnostics.values import finiteness
from hf_mp.dtypes import needs_loss_scale
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import is_sharded, parallelism_of
from hf_mp.scaling.rules import StepReport
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import StepController

logger = logging.get_logger(__name__)

# A loss of a step that ran again: its micro-batch, from 1; how its gradient came in at first; what it came to.
_Loss = tuple[int, IncomingGradient, Tensor]
NOT_HEALED = "on_overflow='heal': not healed: "
MOST_TRIES = 20  # of one step: for another place that leaves the range, or a smaller loss scale


class Healer(StepController):
    """Puts remedies in place when a step overflows in its forward; returned by :func:`heal_overflows`.

    Attributes:
        healed: each :class:`Remedy` that was put in place, oldest first; those of an earlier run: ``runtime.remedies``.
        clip: what a Trainer does to the gradients before it steps, given an optimizer; None where that is not known.
        take_loss: given the loss of a step that ran again, FP32 of shape (), has a Trainer count it in the place of the
            first one, of inf or NaN, and tells whether it does; None where there is none.
    """

    def __init__(self, runtime: MixedPrecision) -> None:
        check_healing(runtime.policy, in_backward=runtime.uses_up_gradients)
        self._runtime = runtime
        runtime.check.compares_gradients = True
        self._explainer = explain_overflows(runtime)
        self.healed: list[Remedy] = []
        self.clip: Callable[[Optimizer], None] | None = None
        self.take_loss: Callable[[Tensor], bool] | None = None
        self._ddp: Any = None

    def forward_began(self, forward: Any, args: Any, kwargs: Any) -> None:
        self._ddp = parallelism_of(self._runtime.model).ddp

    def overflowed(self, optimizer: Optimizer) -> StepReport | None:
        """Heal a step that overflowed, and run it again.

        Raises:
            CannotHealError: if no remedy helps.
        """
        runtime = self._runtime
        model = runtime.model
        if model is None or is_sharded(model):
            logger.warning_once(f"{NOT_HEALED}the model is sharded, and one forward needs all processes")
            return None
        # Where no try helps, the scaler forgets them: its level comes from steps that were taken.
        report, state, backwards = None, runtime.scaler.state, [*self._explainer.backwards]
        for _ in range(MOST_TRIES):
            if not self._heal():
                break
            losses = self._run_again(optimizer, backwards)
            report = runtime.check.agreed_report(runtime.verdict(optimizer))
            if not report.overflow:
                self._replace(losses)
                return report
        runtime.scaler.state = state  # the step is skipped as any other
        return report

    def _heal(self) -> bool:
        """Put in place what helps, on all ranks alike; whether the step can run again with it."""
        runtime = self._runtime
        # All ranks come here, since they agree on the verdict; each looks at its own batches.
        cures: list[Cure | None] = runtime.ranks.gather(self._find())
        found = [cure for cure in cures if cure is not None]
        if error := next((cure.error for cure in found if cure.error), None):
            raise CannotHealError(error)
        if rules := merged(remedy.rules for cure in found for remedy in cure.remedies):
            runtime.add_rules(rules)
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # what was compiled has no hook for the new rules
        if not self._can_run_again(is_healed=bool(rules)):
            return False
        return self._backs_off(cures, is_healed=bool(rules)) or bool(rules)

    def _backs_off(self, cures: list[Cure | None], *, is_healed: bool) -> bool:
        """Whether the loss scale goes down to what all ranks have found, or by half as a guess."""
        before = self._runtime.scaler.get_scale()
        scale = min([before, *(cure.scale or before for cure in cures if cure is not None)])
        # A rank that found nothing that helps (None) would overflow again. Where the look, in BF16 with 3 bits less
        # than FP16, showed no reason to lower the scale, it is halved as a guess.
        is_lower = None not in cures and (scale < before or not is_healed)
        return is_lower and self._runtime.scaler.back_off(min(scale, before / 2.0))

    def _can_run_again(self, *, is_healed: bool) -> bool:
        """Whether all processes still have what this step needs to run again; warns if not, after a remedy."""
        check = self._runtime.check
        is_as_left = self.clip is not None or check.measured_of(check.gradients(check.parameters())) is not None
        is_known = all(map(_has_known_gradients, self._explainer.backwards))
        if all(self._runtime.ranks.gather(is_as_left and is_known)):
            return True
        if is_healed:
            logger.warning(
                "on_overflow='heal': this step is skipped, because the loop has changed its gradients since the "
                "backward, has read those of a lean layout, has stepped another optimizer, or computes its loss "
                "outside the model; the next step runs with the remedy. If the loop clips, pass max_grad_norm=... to "
                "hf_mp.prepare instead"
            )
        return False

    def _find(self) -> Cure | None:
        """What helps against the overflow of the micro-batches; None where nothing does, or it is not known."""
        for backward in suspects_of(self._explainer.backwards):  # a batch with inf or NaN is named by the explainer
            cure = find_cure(self._runtime, backward)
            if cure.reason:
                logger.warning_once(NOT_HEALED + cure.reason)
                return None
            if cure.error or cure.scale is not None:
                if cure.remedies:
                    self._note(cure)
                return cure
        return None

    def _note(self, cure: Cure) -> None:
        step = self._runtime.stats.steps + 1
        new = [replace(remedy, step=step) for remedy in cure.remedies]
        self.healed += new
        lines = "\n".join(f"  {one}" for one in new)
        logger.warning(f"Step {step} left FP16's range in its forward, and is run again with:\n{lines}")

    # The step again

    def _run_again(self, optimizer: Optimizer, backwards: list[KeptBackward]) -> list[_Loss]:
        """The micro-batches of the step, forward and backward, into fresh gradients; then ``clip``; gives losses."""
        runtime, restore_random_states, losses = self._runtime, keep_random_states(), list[_Loss]()
        parameters = list(runtime.check.parameters())
        for parameter in parameters:
            parameter.grad = None
        # The verdict of the first try was measured when its backward ended.
        runtime.check.forget()
        self._explainer.backwards.clear()
        # DDP's own forward would wait for ranks whose batches are others in number; gradients are averaged below.
        with nullcontext() if self._ddp is None else self._ddp._inside_ddp_forward():
            for number, backward in enumerate(backwards, start=1):
                with torch.enable_grad():
                    leaving = backward.again(lambda call, args, kwargs: call.forward.module()(*args, **kwargs))
                gradients = [incoming.gradient for incoming in backward.incoming]
                torch.autograd.backward(leaving, gradients)
                for entry, output in zip(backward.incoming, leaving, strict=True):
                    losses.append((number, entry, output.detach()))
        # As if it had run once: the next batch draws what it would have drawn.
        restore_random_states()
        if self._ddp is not None:
            runtime.ranks.average([parameter.grad for parameter in parameters if parameter.grad is not None])
            runtime.check.measure(parameters)
        if self.clip is not None:
            self.clip(optimizer)
        return losses

    def _replace(self, losses: list[_Loss]) -> None:
        """Overwrite the losses of inf or NaN that the first forwards returned, and say so."""
        lines = []
        for number, entry, again in losses:
            first = entry.call.losses[entry.output]
            if finiteness(first):
                lines.append(f"  {entry.output!r} of micro-batch {number}: {again.item():g} for {first.item():g}")
                if first._version == 0:  # else it was changed in place since, and is the model's loss no longer
                    first.copy_(again)
        if not lines:
            return
        # What a loop made of a loss, as a share of a mean, is in its gradient.
        parts = [(again * entry.gradient).sum() for _, entry, again in losses if entry.gradient is not None]
        if self.take_loss is None or not self.take_loss(torch.stack(parts).sum()):
            lines.append("  Values computed from it before optimizer.step(), such as loss / 4, are still inf or NaN.")
        text = "\n".join(lines)
        logger.warning(f"Step {self._runtime.stats.steps + 1} is taken with the loss of its second run:\n{text}")


def _has_known_gradients(backward: KeptBackward) -> bool:
    """Whether another forward would get the same incoming gradients: finite ones, of losses alone."""
    are_losses = all(entry.output in entry.call.losses for entry in backward.incoming)
    return are_losses and backward.is_kept() and not backward.is_spoilt()


def check_healing(policy: PrecisionPolicy, *, in_backward: bool) -> None:
    """Raise a ValueError for settings that healing cannot work with."""
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
    """Repeat a step that overflows in FP16, with a remedy, instead of skipping it.

    When a step is about to be skipped, its micro-batches run once in BF16, which has FP32's range. If values of the
    forward exceed 65504, the smallest remedy that keeps them in range becomes a rule of autocast
    (:data:`hf_mp.diagnostics.remedies.REMEDIES`). If the forward is in range, the loss scale is lowered until no
    gradient overflows. Then the step runs again, and its update is taken. Clean steps do no extra work, but
    for a scan of the gradients where there is no loss scale. The rules are in ``state_dict()``, the stats and the log,
    and are the same on all ranks.

    A step is still skipped if the scaler cannot go that low (a constant scale, ``min_scale``), and if the loop changes
    gradients before it steps or computes its loss outside the model. To clip, use ``max_grad_norm`` of :func:`prepare`.

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.

    Returns:
        The healer, with what it has ``healed``; always the same one for the same model.

    Raises:
        TypeError: for anything but a model or its MixedPrecision.
        ValueError: for a model that is not attached, a precision that does not compute in FP16, and
            ``free_gradients="backward"``.
    """
    runtime = runtime_of(model)
    if (healer := observing(runtime, Healer)) is None:
        healer = Healer(runtime)
        runtime.control_by(healer)
    return healer
