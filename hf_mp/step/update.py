"""``StepGuard``: replaces the ``step`` of an optimizer while its model is attached."""

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
from hf_mp.model_index import optimizer_parameters
from hf_mp.ranks.parallelism import detect_parallelism
from hf_mp.scaling.rules import StepReport
from hf_mp.step.gradients import OverflowStatus
from hf_mp.step.profiling import profiled
from hf_mp.step.runtime import StepRuntime
from hf_mp.weights.attach_checks import check_optimizer
from hf_mp.weights.fused_adamw import UpdateCache, can_skip_on_device, with_found_inf

if TYPE_CHECKING:
    # Also a subclass of Any, so that it can be assigned to a variable of the user's class.
    class AttachedOptimizer(Optimizer, Any):
        """An optimizer that is attached to a model: of the user's class, or a :class:`MasterWeightOptimizer`."""

        step_was_skipped: bool  # whether the last step was skipped
else:
    AttachedOptimizer = Optimizer

_SUPPORTS_SCALING = "_step_supports_amp_scaling"


class _StepWasSkipped:
    """Descriptor for ``Optimizer.step_was_skipped`` after a step that the device skips by ``found_inf``.

    A read waits until ``found_inf`` is on the host. An attribute of the optimizer instance has priority, because the
    descriptor has no ``__set__``.
    """

    _users = 0

    def __get__(self, optimizer: Any, kind: type) -> Any:
        guard = getattr(getattr(optimizer, "step", None), "hf_mp_guard", None)
        if guard is not None and guard.runtimes:
            guard.runtimes[0].scaler.finish_pending_step()
            return vars(optimizer)["step_was_skipped"]
        raise AttributeError(f"{kind.__name__!r} object has no attribute 'step_was_skipped'")

    def count(self, more: int) -> None:
        """Add ``more`` (1 or -1) to the optimizers that need the descriptor; torch's class has it if there are any."""
        self._users += more
        if self._users:
            Optimizer.step_was_skipped = self  # type: ignore[attr-defined]
        else:
            del Optimizer.step_was_skipped  # type: ignore[attr-defined]


_STEP_WAS_SKIPPED = _StepWasSkipped()


class StepGuard:
    """Skips steps of one optimizer that would write inf or NaN to weights; sets ``optimizer.step_was_skipped``."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.runtimes: list[StepRuntime] = []  # of the models with its parameters
        attributes = vars(optimizer)
        self._attributes_before = {name: attributes[name] for name in ("step", _SUPPORTS_SCALING) if name in attributes}
        self._original_step = optimizer.step
        self._wrapped_step = self._attributes_before.get("step")  # set by a wrapper such as an LR scheduler
        self._updates = UpdateCache()

        # Bound to the optimizer, because torch's LR schedulers read ``step.__func__``. Their own may have none.
        @functools.wraps(getattr(self._original_step, "__func__", self._original_step))
        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        if getattr(optimizer, "keeps_masters", False):
            # torch.compile reads all gradients, and its fake 16-bit parameters allow no FP32 gradient.
            step = torch.compiler.disable(step)
        step.hf_mp_guard = self  # type: ignore[attr-defined]
        self._guarded = types.MethodType(step, optimizer)
        optimizer.step = self._guarded
        optimizer.step_was_skipped = False
        self._accelerate_patch = patch_accelerate_skip_flag(optimizer)
        self._skip_flag_finalizer: weakref.finalize[..., Any] | None = None
        # So torch.amp.GradScaler sets `optimizer.found_inf`, which _check_step() detects.
        setattr(optimizer, _SUPPORTS_SCALING, True)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Check gradients, update weights, set the next loss scale; return the loss of ``closure``."""
        optimizer, runtimes = self.optimizer, list(self.runtimes)
        if not runtimes:
            return self._original_step() if closure is None else self._original_step(closure)
        _check_step(optimizer, runtimes)
        if not self._accelerate_patch:  # accelerate may have been imported since
            self._accelerate_patch = patch_accelerate_skip_flag(optimizer)
        loss = None if closure is None else torch.enable_grad()(closure)()
        with profiled("gradient check"):
            results = [runtime.clip_and_check(optimizer) for runtime in runtimes]
        status = results[0] if len(runtimes) == 1 else None
        if (
            isinstance(status, OverflowStatus)
            and status.may_stay_on_device
            and can_skip_on_device(optimizer, self._wrapped_step)
        ):
            self._step_with_found_inf(status, runtimes[0])
        else:
            self._finish_step(runtimes, results)
        return loss

    def _step_with_found_inf(self, status: OverflowStatus, runtime: StepRuntime) -> None:
        """Launch the update with ``found_inf``; the device skips it on an overflow.

        The host reads ``found_inf`` for ``optimizer.step_was_skipped`` or ``stats``, at the latest for S in the next
        backward.
        """
        optimizer, on_host = self.optimizer, status.to_host()
        self._update([runtime], status.found_inf())
        finish = functools.partial(self._finish_step, [runtime], [on_host], was_launched=True)
        if runtime.observers or runtime.scaler.may_raise_on_overflow():
            finish()
        else:
            self._use_descriptor()
            runtime.scaler.defer_step(finish)
        # Only launched kernels read the gradients of a lean layout. They are kept if the step is known to be skipped.
        if hasattr(optimizer, "release_gradients") and not vars(optimizer).get("step_was_skipped"):
            optimizer.release_gradients()

    def _use_descriptor(self) -> None:
        """Have ``optimizer.step_was_skipped`` read by :class:`_StepWasSkipped`."""
        if self._skip_flag_finalizer is None:
            _STEP_WAS_SKIPPED.count(1)
            self._skip_flag_finalizer = weakref.finalize(self.optimizer, _STEP_WAS_SKIPPED.count, -1)
        vars(self.optimizer).pop("step_was_skipped", None)

    def _finish_step(
        self, runtimes: list[StepRuntime], results: Sequence[OverflowStatus | StepReport], *, was_launched: bool = False
    ) -> None:
        """Read the results of the check, update unless there is an overflow, and set the next loss scale.

        ``was_launched``: whether the update was launched with ``found_inf``.
        """
        optimizer = self.optimizer
        with profiled("found_inf to host"):
            reports = [one.check.all_ranks_report(result) for one, result in zip(runtimes, results, strict=True)]
        controller = runtimes[0].controller if len(runtimes) == 1 else None  # it can rerun one model only
        if controller is not None and reports[0].overflow:
            new_report = controller.handle_overflow(optimizer)
            if new_report is not None:
                reports, was_launched = [new_report], False
        optimizer.step_was_skipped = was_skipped = any([report.overflow for report in reports])
        if not was_launched and not was_skipped:
            self._update(runtimes, None)
        for runtime, report in zip(runtimes, reports, strict=True):
            runtime.report_step(optimizer, report, was_skipped=was_skipped)

    def _update(self, runtimes: list[StepRuntime], found_inf: Tensor | None) -> None:
        """Write masters and working copies, unless ``found_inf`` (FP32 of shape (), or None) is 1."""
        with profiled("update"):
            if len(runtimes) == 1 and runtimes[0].weights.try_fused_update(
                self.optimizer,
                replaced_step=self._wrapped_step,
                updates=self._updates,
                clipping=runtimes[0].check.clipping,
                found_inf=found_inf,
            ):
                return
            checks = [runtime.check for runtime in runtimes if runtime.check.clipping is not None]
            if checks:  # each of several models has the norm of all gradients of the optimizer
                checks[0].apply_clipping()
            with nullcontext() if found_inf is None else with_found_inf(self.optimizer, found_inf):
                self._original_step()
            for runtime in runtimes:
                runtime.weights.layout.refresh_working_copies(self.optimizer)

    def remove(self, runtime: StepRuntime) -> None:
        """Stop guarding for one model; after the last one, restore ``optimizer.step``."""
        self.runtimes.remove(runtime)
        if self.runtimes:
            return
        for undo in filter(None, (self._accelerate_patch, self._skip_flag_finalizer)):
            undo()
        attributes = vars(self.optimizer)
        attributes.pop("step_was_skipped", None)
        attributes.pop(_SUPPORTS_SCALING, None)
        if attributes.get("step") is self._guarded:
            del attributes["step"]
        else:  # a later wrapper stays
            self._attributes_before.pop("step", None)
        attributes.update(self._attributes_before)


def guard_steps(optimizer: Any, runtime: StepRuntime) -> AttachedOptimizer:
    """Guard ``optimizer``, or the one in accelerate's wrapper, for the model of ``runtime``.

    Returns the optimizer to step from now on. Raises as :meth:`MixedPrecision.attach_optimizer`.
    """
    if (accelerated := as_accelerated(optimizer)) is not None:
        accelerated.optimizer = guard_steps(accelerated.optimizer, runtime)
        return optimizer
    check_optimizer(optimizer, runtime.model)
    runtime.adopt_sharding(optimizer_parameters(optimizer), detect_parallelism(runtime.model))
    optimizer = runtime.weights.wrap_optimizer(optimizer)
    for observer in runtime.observers:
        observer.on_attach_optimizer(optimizer)
    # The step of a copied optimizer has the guard of its original.
    guard = getattr(optimizer.step, "hf_mp_guard", None)
    if guard is None or not guard.runtimes or guard.optimizer is not optimizer:
        guard = StepGuard(optimizer)
    if guard not in runtime.guards:
        guard.runtimes.append(runtime)
        runtime.guards.append(guard)
    return optimizer


def _check_step(optimizer: Any, runtimes: list[StepRuntime]) -> None:
    """Raise a RuntimeError for a step by a ``torch.amp.GradScaler``, or during a backward."""
    if any([runtime.check.backwards.through_output and runtime.check.is_scaled for runtime in runtimes]):
        raise RuntimeError(
            "optimizer.step() was called during a backward, whose remaining gradients would be divided by the next "
            "loss scale: use free_gradients='backward' in a lean layout, or a precision that scales nothing (bf16)"
        )
    if vars(optimizer).get("found_inf") is not None:
        optimizer.found_inf = optimizer.grad_scale = None
        raise RuntimeError(
            "a torch.amp.GradScaler steps the optimizer of an attached model, whose gradients are unscaled already: "
            "call loss.backward() and optimizer.step() without a scaler"
        )
