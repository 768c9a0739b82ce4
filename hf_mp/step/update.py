"""``StepGuard``: what stands in front of an optimizer's ``step`` while its model is attached."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hf_mp.weights.accelerated import tell_accelerate
from hf_mp.weights.attachable import check_step

if TYPE_CHECKING:
    from hf_mp.step.mixed_precision import MixedPrecision

_SUPPORTS_SCALING = "_step_supports_amp_scaling"


class StepGuard:
    """Skips the steps of one optimizer that would write inf or NaN into the weights of its models.

    ``optimizer.step_was_skipped`` tells a loop, for its LR scheduler, what became of the last step.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.runtimes: list[MixedPrecision] = []  # of the models whose parameters it has
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
        self._told = tell_accelerate(optimizer)
        # torch.amp.GradScaler leaves unscaling to such an optimizer, and tells it by attributes: so it is noticed.
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        optimizer, runtimes = self.optimizer, list(self.runtimes)
        if not runtimes:
            return self._unguarded(closure, **kwargs) if closure is not None else self._unguarded(**kwargs)
        check_step(optimizer, in_scaled_backward=any(r.check.is_scaled and r.check.runs for r in runtimes))
        self._told = self._told or tell_accelerate(optimizer)  # it may have been imported since
        loss = None if closure is None else torch.enable_grad()(closure)()
        reports = [runtime.report(optimizer) for runtime in runtimes]
        was_skipped = any(report.overflow for report in reports)
        if not was_skipped:
            own_step = self._before.get("step")
            is_done = len(runtimes) == 1 and not kwargs and runtimes[0].layout.step(optimizer, own_step)
            if not is_done:
                result = self._unguarded(**kwargs)
                loss = result if closure is None else loss
                for runtime in runtimes:
                    runtime.layout.updated(optimizer)
        optimizer.step_was_skipped = was_skipped
        for runtime, report in zip(runtimes, reports, strict=True):
            runtime.finish_step(report, was_skipped=was_skipped)
        return loss

    def remove(self, runtime: MixedPrecision) -> None:
        """Guard for one model less; with the last, give the optimizer its own ``step`` back."""
        self.runtimes.remove(runtime)
        if self.runtimes:
            return
        if self._told is not None:
            self._told()
        state = vars(self.optimizer)
        state.pop("step_was_skipped", None)
        state.pop(_SUPPORTS_SCALING, None)
        if state.get("step") is self._guarded:  # else a wrapper was put on later, under which this is transparent
            del state["step"]
            state.update(self._before)
        elif _SUPPORTS_SCALING in self._before:
            state[_SUPPORTS_SCALING] = self._before[_SUPPORTS_SCALING]


def guard_of(optimizer: Optimizer) -> StepGuard | None:
    """The guard in front of ``optimizer.step``, if it is guarded."""
    guard: StepGuard | None = getattr(optimizer.step, "hf_mp_guard", None)
    return guard if guard is not None and guard.runtimes and guard.optimizer is optimizer else None
