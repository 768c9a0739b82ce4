"""``StepGuard``: what stands in front of an optimizer's ``step`` while its model is attached."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from hf_mp.scaling.rules import StepReport


class Guarding(Protocol):
    """What a guard asks of a :class:`hf_mp.MixedPrecision`."""

    def report(self, optimizer: Optimizer) -> StepReport:
        """What the gradients of ``optimizer`` are like."""

    def update(self, optimizer: Optimizer, own_step: Callable[..., Any] | None) -> bool:
        """Take the step and refresh working copies in one kernel; False where there is none."""

    def updated(self, optimizer: Optimizer) -> None:
        """The optimizer has written its parameters: refresh working copies."""

    def finish_step(self, report: StepReport, *, was_skipped: bool) -> None:
        """Set the next loss scale."""


class StepGuard:
    """Skips the steps of one optimizer that would write inf or NaN into the weights of its models.

    ``optimizer.step_was_skipped`` tells a loop, for its LR scheduler, what became of the last step.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._runtimes: list[Guarding] = []
        self._before = {name: vars(optimizer)[name] for name in ("step", _SUPPORTS_SCALING) if name in vars(optimizer)}
        self._unguarded = optimizer.step

        # A plain function bound to the optimizer: torch's LR schedulers look at ``step.__func__``.
        @functools.wraps(getattr(self._unguarded, "__func__", self._unguarded))  # a scheduler made before: a function
        def step(optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self._step(closure, kwargs)

        step.hf_mp_guard = self  # type: ignore[attr-defined]
        self._guarded = types.MethodType(step, optimizer)
        optimizer.step = self._guarded
        optimizer.step_was_skipped = False
        # torch.amp.GradScaler leaves unscaling to such an optimizer, and tells it by attributes: so it is noticed.
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def watch(self, runtime: Guarding) -> None:
        """Guard the optimizer for one more model."""
        if runtime not in self._runtimes:
            self._runtimes.append(runtime)

    @property
    def is_active(self) -> bool:
        """Whether the optimizer is still guarded."""
        return bool(self._runtimes)

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        optimizer, runtimes = self.optimizer, list(self._runtimes)
        if not runtimes:
            return self._unguarded(closure, **kwargs) if closure is not None else self._unguarded(**kwargs)
        _refuse_torchs_scaler(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reports = [runtime.report(optimizer) for runtime in runtimes]
        was_skipped = any(report.overflow for report in reports)
        if not was_skipped:
            is_done = len(runtimes) == 1 and not kwargs and runtimes[0].update(optimizer, self._before.get("step"))
            if not is_done:
                result = self._unguarded(**kwargs)
                loss = result if closure is None else loss
                for runtime in runtimes:
                    runtime.updated(optimizer)
        optimizer.step_was_skipped = was_skipped
        for runtime, report in zip(runtimes, reports, strict=True):
            runtime.finish_step(report, was_skipped=was_skipped)
        return loss

    def remove(self, runtime: Guarding) -> None:
        """Guard for one model less; with the last, give the optimizer its own ``step`` back."""
        self._runtimes.remove(runtime)
        if self._runtimes:
            return
        state = vars(self.optimizer)
        state.pop("step_was_skipped", None)
        state.pop(_SUPPORTS_SCALING, None)
        if state.get("step") is self._guarded:  # else a wrapper was put on later, under which this is transparent
            del state["step"]
            state.update(self._before)
        elif _SUPPORTS_SCALING in self._before:
            state[_SUPPORTS_SCALING] = self._before[_SUPPORTS_SCALING]


_SUPPORTS_SCALING = "_step_supports_amp_scaling"


def guard_of(optimizer: Optimizer) -> StepGuard | None:
    """The guard in front of ``optimizer.step``, if it is guarded."""
    guard: StepGuard | None = getattr(optimizer.step, "hf_mp_guard", None)
    return guard if guard is not None and guard.is_active and guard.optimizer is optimizer else None


def _refuse_torchs_scaler(optimizer: Any) -> None:
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        optimizer.found_inf = optimizer.grad_scale = None
        raise RuntimeError(
            "a torch.amp.GradScaler steps the optimizer of an attached model, whose gradients are unscaled already: "
            "call loss.backward() and optimizer.step() without a scaler"
        )
