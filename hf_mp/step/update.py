"""``StepGuard``: what stands in front of an optimizer's ``step`` while its model is attached."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_mp.integrations.accelerated import as_accelerated, patch_accelerate_skip_flag
from hf_mp.model_walk import optimizer_parameters
from hf_mp.ranks.parallelism import parallelism_of
from hf_mp.scaling.rules import StepReport
from hf_mp.step.gradients import OverflowStatus
from hf_mp.step.profiling import profiled
from hf_mp.step.runtime import StepRuntime
from hf_mp.weights.attachable import check_optimizer
from hf_mp.weights.fused_adamw import UpdateCache, can_skip_on_device, with_found_inf

if TYPE_CHECKING:
    # Of Any as well: the result replaces a variable of the user's own class, such as AdamW.
    class AttachedOptimizer(Optimizer, Any):
        """An optimizer that is attached to a model: of its own class, or a :class:`MasterWeightOptimizer`."""

        step_was_skipped: bool  # whether the last step was skipped
else:
    AttachedOptimizer = Optimizer

_SUPPORTS_SCALING = "_step_supports_amp_scaling"


class _StepWasSkipped:
    """``Optimizer.step_was_skipped`` after a step that its device decides: waits for the check when it is asked.

    A descriptor without ``__set__``, so that the guard's attribute of the optimizer itself wins. It lies on torch's
    class while one of its users is attached.
    """

    _users = 0

    def __get__(self, optimizer: Any, kind: type) -> Any:
        if (guard := getattr(getattr(optimizer, "step", None), "hf_mp_guard", None)) is not None and guard.runtimes:
            guard.runtimes[0].scaler.finish_pending_step()
            return vars(optimizer)["step_was_skipped"]
        raise AttributeError(f"{kind.__name__!r} object has no attribute 'step_was_skipped'")

    def count(self, more: int) -> None:
        """Answer for ``more`` optimizers than before, 1 or -1; for none, leave torch's class."""
        self._users += more
        if self._users:
            Optimizer.step_was_skipped = self  # type: ignore[attr-defined]
        else:
            del Optimizer.step_was_skipped  # type: ignore[attr-defined]


_STEP_WAS_SKIPPED = _StepWasSkipped()


class StepGuard:
    """Skips the steps of one optimizer that would write inf or NaN into the weights of its models.

    ``optimizer.step_was_skipped`` tells a loop, for its LR scheduler, what became of the last step.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.runtimes: list[StepRuntime] = []  # of the models whose parameters it has
        self._before = {name: vars(optimizer)[name] for name in ("step", _SUPPORTS_SCALING) if name in vars(optimizer)}
        self._original_step, self._replaced_step = optimizer.step, self._before.get("step")
        self._updates = UpdateCache()

        # A plain function bound to the optimizer: torch's LR schedulers look at ``step.__func__``.
        @functools.wraps(
            getattr(self._original_step, "__func__", self._original_step)
        )  # a scheduler made before: a function
        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        if getattr(optimizer, "keeps_masters", False):
            # torch.compile reads the gradients of all parameters, and torch gives its fake ones no FP32 gradient.
            step = torch.compiler.disable(step)
        step.hf_mp_guard = self  # type: ignore[attr-defined]
        self._guarded = types.MethodType(step, optimizer)
        optimizer.step = self._guarded
        optimizer.step_was_skipped = False
        self._accelerate_patch = patch_accelerate_skip_flag(optimizer)
        self._skip_flag_finalizer: weakref.finalize[..., Any] | None = None
        # torch.amp.GradScaler leaves unscaling to such an optimizer, and tells it by attributes: so it is noticed.
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Check, update, next loss scale; returns the loss of ``closure``."""
        optimizer, runtimes = self.optimizer, list(self.runtimes)
        if not runtimes:
            return self._original_step() if closure is None else self._original_step(closure)
        _check_step(optimizer, runtimes)
        self._accelerate_patch = self._accelerate_patch or patch_accelerate_skip_flag(
            optimizer
        )  # it may have been imported since
        loss = None if closure is None else torch.enable_grad()(closure)()
        with profiled("gradient check"):
            results = [runtime.clip_and_check(optimizer) for runtime in runtimes]
        only = results[0] if len(runtimes) == 1 else None
        if (
            isinstance(only, OverflowStatus)
            and only.may_stay_on_device
            and can_skip_on_device(optimizer, self._replaced_step)
        ):
            self._step_with_found_inf(only, runtimes[0])  # the device decides, so that the host need not wait
        else:
            self._finish_step(runtimes, results)
        return loss

    def _step_with_found_inf(self, status: OverflowStatus, runtime: StepRuntime) -> None:
        """Queue an update that the device skips; the host reads ``found_inf`` when somebody asks what became of it.

        That is at the latest when the next backward begins, which needs the next S.
        """
        sent = status.to_host()
        optimizer = self.optimizer
        self._update([runtime], status.found_inf())
        take_in = functools.partial(self._finish_step, [runtime], [sent], is_queued=True)
        if runtime.observers or runtime.scaler.skips_once_too_often():  # both must hear of an overflow at once
            take_in()
        else:
            if self._skip_flag_finalizer is None:
                _STEP_WAS_SKIPPED.count(1)
                self._skip_flag_finalizer = weakref.finalize(optimizer, _STEP_WAS_SKIPPED.count, -1)
            # The descriptor at torch's class answers only where the optimizer itself has no such attribute.
            vars(optimizer).pop("step_was_skipped", None)
            runtime.scaler.defer_step(take_in)
        # Lean gradients are read by the kernels that were queued, and nobody else needs them.
        if hasattr(optimizer, "release_gradients") and not vars(optimizer).get("step_was_skipped"):
            optimizer.release_gradients()

    def _finish_step(
        self, runtimes: list[StepRuntime], results: Sequence[OverflowStatus | StepReport], *, is_queued: bool = False
    ) -> None:
        """Read the results of the check, skip the update or make it unless that was done, set the next loss scale."""
        optimizer = self.optimizer
        with profiled("found_inf to host"):
            reports = [one.check.all_ranks_report(result) for one, result in zip(runtimes, results, strict=True)]
        if len(runtimes) == 1 and reports[0].overflow and (controller := runtimes[0].controller) is not None:
            again = controller.handle_overflow(optimizer)  # which may run the forwards of one model again
            if again is not None:
                reports, is_queued = [again], False
        optimizer.step_was_skipped = was_skipped = any([report.overflow for report in reports])
        if not is_queued and not was_skipped:
            self._update(runtimes, None)
        for runtime, report in zip(runtimes, reports, strict=True):
            runtime.finish_step(optimizer, report, was_skipped=was_skipped)

    def _update(self, runtimes: list[StepRuntime], found_inf: Tensor | None) -> None:
        """Write masters and working copies; nothing where ``found_inf``, FP32 of shape (), is there and not 0."""
        given = self._replaced_step, self._updates, runtimes[0].check.clipping, found_inf
        with profiled("update"):
            if len(runtimes) == 1 and runtimes[0].weights.try_fused_update(self.optimizer, *given):
                return
            checks = [runtime.check for runtime in runtimes if runtime.check.clipping is not None]
            for check in checks[:1]:  # each of several models has the norm of all gradients of the optimizer: one clips
                check.apply_clipping()
            with nullcontext() if found_inf is None else with_found_inf(self.optimizer, found_inf):
                self._original_step()
            for runtime in runtimes:
                runtime.weights.layout.refresh_working_copies(self.optimizer)

    def remove(self, runtime: StepRuntime) -> None:
        """Stop guarding for one model; after the last one, give the optimizer its own ``step`` back."""
        self.runtimes.remove(runtime)
        if self.runtimes:
            return
        for end in filter(None, (self._accelerate_patch, self._skip_flag_finalizer)):
            end()
        state = vars(self.optimizer)
        state.pop("step_was_skipped", None)
        state.pop(_SUPPORTS_SCALING, None)
        if state.get("step") is self._guarded:
            del state["step"]
        else:  # a wrapper that was put on later goes on calling this one
            self._before.pop("step", None)
        state.update(self._before)


def guard_steps(optimizer: Any, runtime: StepRuntime) -> AttachedOptimizer:
    """Guard the steps of ``optimizer`` for the model of ``runtime``; returns the optimizer to step from now on.

    If accelerate has wrapped it, the one inside is guarded. Raises as :meth:`MixedPrecision.attach_optimizer`.
    """
    if (accelerated := as_accelerated(optimizer)) is not None:
        accelerated.optimizer = guard_steps(accelerated.optimizer, runtime)
        return optimizer
    check_optimizer(optimizer, runtime.model)
    runtime.adopt_sharding(optimizer_parameters(optimizer), parallelism_of(runtime.model))
    optimizer = runtime.weights.wrap_optimizer(optimizer)
    for observer in runtime.observers:
        observer.on_attach_optimizer(optimizer)
    # A copied optimizer has the guard of the one that it was copied from.
    guard = getattr(optimizer.step, "hf_mp_guard", None)
    if guard is None or not guard.runtimes or guard.optimizer is not optimizer:
        guard = StepGuard(optimizer)
    if guard not in runtime.guards:
        guard.runtimes.append(runtime)
        runtime.guards.append(guard)
    return optimizer


def _check_step(optimizer: Any, runtimes: list[StepRuntime]) -> None:
    """Raise a RuntimeError for a step by a ``torch.amp.GradScaler``, or inside of a backward."""
    if any([runtime.check.backwards.open and runtime.check.is_scaled for runtime in runtimes]):
        raise RuntimeError(
            "optimizer.step() was called during a backward, whose remaining gradients would be divided by the next "
            "loss scale: use free_gradients='backward' in a lean layout, or a precision that scales nothing (bf16)"
        )
    # torch.amp.GradScaler leaves found_inf on the guarded optimizer, and calls its step in any case.
    if vars(optimizer).get("found_inf") is not None:
        optimizer.found_inf = optimizer.grad_scale = None
        raise RuntimeError(
            "a torch.amp.GradScaler steps the optimizer of an attached model, whose gradients are unscaled already: "
            "call loss.backward() and optimizer.step() without a scaler"
        )
