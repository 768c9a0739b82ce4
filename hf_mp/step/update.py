"""What stands in front of an optimizer's ``step`` while its model is attached."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp.scaling.rules import StepReport
from hf_mp.weights.split_parameter import raw_gradient


class GuardingRuntime(Protocol):
    """What a guard asks of its runtime."""

    def report(self, optimizer: Optimizer) -> StepReport:
        """What the gradients of ``optimizer`` are like."""

    def finish_step(self, report: StepReport) -> None:
        """Take in that a step was applied or skipped."""

    def step_fused(self, optimizer: Optimizer, own_step: Callable[..., Any] | None) -> bool:
        """Take the step of ``optimizer`` and refresh working copies in one kernel; False where there is none."""

    def parameters_changed(self, parameters: Iterable[nn.Parameter]) -> None:
        """An optimizer has written these parameters."""


class StepGuard:
    """Skips the steps of one optimizer that would write inf or NaN into the weights.

    ``optimizer.step_was_skipped`` tells a loop, for its LR scheduler, what became of the last step.
    """

    def __init__(self, runtime: GuardingRuntime, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._previous = optimizer.__dict__.get("step")
        unguarded = optimizer.step
        self.is_active = True
        self._has_stepped = False

        # A plain function bound to the optimizer: torch's LR schedulers look at ``step.__func__``.
        @functools.wraps(getattr(unguarded, "__func__", unguarded))  # an LR scheduler made before leaves a function
        def step(optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if not self.is_active:
                return unguarded(closure, **kwargs) if closure is not None else unguarded(**kwargs)
            self._refuse_other_scaler()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            report = runtime.report(optimizer)
            if not report.overflow and (kwargs or not runtime.step_fused(optimizer, self._previous)):
                everything = [p for group in optimizer.param_groups for p in group["params"]]
                stepping = [p for p in everything if raw_gradient(p) is not None]
                result = unguarded(**kwargs)
                loss = result if closure is None else loss
                runtime.parameters_changed(stepping)
            optimizer.step_was_skipped = report.overflow
            runtime.finish_step(report)
            return loss

        step.hf_mp_guard = self  # type: ignore[attr-defined]  # for scalers, which must not unscale again
        self._step = types.MethodType(step, optimizer)
        self.optimizer.step = self._step
        self.optimizer.step_was_skipped = False

    def _refuse_other_scaler(self) -> None:
        """At the first step, look whether torch's scaler makes it: it has divided true gradients by its scale."""
        if self._has_stepped:
            return
        self._has_stepped = True
        frame: FrameType | None = sys._getframe(2)
        for _ in range(8):  # LR schedulers and accelerate wrap step a few times
            if frame is None:
                return
            if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
                self._has_stepped = False
                raise RuntimeError(
                    "a torch.amp.GradScaler steps the optimizer of an attached model, whose gradients are unscaled "
                    "already: call loss.backward() and optimizer.step() without a scaler"
                )
            frame = frame.f_back

    def remove(self) -> None:
        """Give the optimizer its own ``step`` back; under a wrapper put on later, become transparent."""
        self.is_active = False
        self.optimizer.__dict__.pop("step_was_skipped", None)
        if self.optimizer.__dict__.get("step") is self._step:
            if self._previous is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._previous
