""":class:`LossScaler`: base of the loss scalers, which stores a rule.

For an attached model, the scale boundary reads :meth:`LossScaler.scale_and_inverse`, and the guarded optimizer step
calls :meth:`LossScaler.update_scale`. ``scale``, ``unscale_``, ``step`` and ``update`` are for loops written for
``torch.amp.GradScaler``.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.scaling.explicit import unscale_gradients
from hf_mp.scaling.rules import (
    Rule,
    StaticRule,
    StepReport,
    check_scale,
    scale_text,
    to_fp32,
    whole,
)

DEFAULT_ADVICE = (
    "The model or its data makes them, not the scale: look for NaN in the inputs, lower the learning rate, or train in "
    "a precision of wider range"
)


class LossScaleError(RuntimeError):
    """Gradients overflow even at the smallest loss scale allowed, so training cannot continue.

    Raised by ``optimizer.step()``, or by ``update()`` of a scaler, after ``max_consecutive_skips`` skipped steps in a
    row. The message names the first of these steps, the scale, and for an attached model some of the gradients.
    """


class ScaleTensors(NamedTuple):
    """The loss scale and its inverse: FP32 of shape (1,), so that FP16 gradients times them are FP32."""

    scale: Tensor
    inverse: Tensor


@dataclass
class Iteration:
    """The optimizer steps between two backwards, which change the loss scale once."""

    before: Any  # the value of the rule before the first of these steps
    skips_before: int  # skipped iterations in a row
    reports: dict[Hashable, StepReport] = field(default_factory=dict)  # by optimizer


# Backward has a thread for each device: all wait while one reads the overflow status.
_PENDING_STEP_LOCK = threading.RLock()

_TORCH_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class LossScaler(Generic[Rule]):
    """Base of the loss scalers, with the methods of ``torch.amp.GradScaler``. They differ in these cases:

    - Gradients are checked after unscaling and, if sparse, after duplicate coordinates are summed, so an overflow in
      either skips the step too. torch checks before, and the infinity reaches the weights.
    - An optimizer with its own unscaling (``fused=True``) also receives unscaled gradients, and is not called in a
      skipped step. If the scale is a power of two, its weights have the same bits as under torch's scaler. Otherwise
      they differ by rounding: the optimizer divides by the scale, :meth:`unscale_` multiplies by its inverse.
    - :meth:`update` may set the scale before the first call of :meth:`scale`.

    Args:
        rule: the initial rule, which then sets the scale.
        max_consecutive_skips: skipped steps in a row at the smallest scale after which :class:`LossScaleError` is
            raised; default 50.
        enabled: False: losses are returned unchanged, no step is skipped, the saved state is empty; default True.
    """

    def __init__(self, rule: Rule, *, max_consecutive_skips: int = 50, enabled: bool = True) -> None:
        whole(1)(max_consecutive_skips=max_consecutive_skips)
        given: object = enabled
        if isinstance(given, (Tensor, str)):
            raise TypeError(f"enabled must be True or False, not {enabled!r:.100}")
        self._enabled, self._max_consecutive_skips = bool(enabled), max_consecutive_skips
        self.kind, self._state = rule.name, rule.validated()
        self._skips = rule.consecutive_skips  # in a row, also those that leave the rule unchanged
        self._tensors: dict[torch.device, ScaleTensors] = {}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # the MixedPrecision objects with this scaler
        self._pending_step: Callable[[], None] | None = None  # reports a step with its overflow status on a device
        self._is_finishing = False
        self._iteration: Iteration | None = None  # None if no optimizer has stepped since the last backward
        self._reset_reports()
        self._warn_if_inexact(rule, None)

    @property
    def state(self) -> Rule:
        """The rule, frozen. A read finishes a pending step first."""
        self.finish_pending_step()
        return self._state

    @state.setter
    def state(self, state: Rule) -> None:
        self._iteration = None  # a later step of this iteration must not undo it
        self._set_state(state)

    def _set_state(self, state: Rule) -> None:
        changed, self._state = state.scale != self._state.scale, state
        if changed:
            for user in self.users:
                user.freeze_scale_factors()
            # in place, for CUDA graphs
            for tensors in self._tensors.values():
                tensors.scale.fill_(state.scale)
                tensors.inverse.fill_(1.0 / state.scale)

    def get_scale(self) -> float:
        """Return the current loss scale; 1.0 for a disabled scaler."""
        return self.state.scale if self._enabled else 1.0

    def defer_step(self, finish: Callable[[], None]) -> None:
        """Call ``finish``, which reports the last optimizer step and may synchronize, before the state is next read."""
        self._pending_step = finish

    def finish_pending_step(self) -> None:
        """Report the deferred step, if any."""
        if self._pending_step is None:
            return
        with _PENDING_STEP_LOCK:
            # Another thread may have finished it, and the call below may read the state.
            if self._pending_step is None or self._is_finishing:
                return
            self._is_finishing = True
            try:
                self._pending_step()
            finally:
                self._pending_step, self._is_finishing = None, False

    # Iterations

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last backward, without a pending step."""
        return self._iteration is not None

    def end_iteration(self) -> None:
        """Finish a pending step, and let later steps change the scale again. Called when a backward begins."""
        self.finish_pending_step()
        self._iteration = None

    def join_iteration(self, optimizer: Hashable) -> Iteration:
        """Return the iteration in which ``optimizer`` will report a step: a new one if it has reported in this one.

        The rule is reset to its state before the iteration, so that all its reports adjust S once.
        """
        iteration = self._iteration
        if iteration is None or optimizer in iteration.reports:
            iteration = self._iteration = Iteration(self._state, self._skips)
        self._set_state(iteration.before)
        return iteration

    @property
    def smallest_scale(self) -> float:
        """The smallest scale that overflows can set."""
        return self._state.floor

    def scale_and_inverse(self, device: torch.device) -> ScaleTensors:
        """Return the scale and its inverse on ``device``, which later changes of the scale update in place."""
        if (tensors := self._tensors.get(device)) is None:
            with torch.inference_mode(False):  # the first call may be in inference mode
                scale = torch.tensor([self.get_scale()], dtype=torch.float32, device=device)
                tensors = ScaleTensors(scale, 1.0 / scale)
            if type(scale) is Tensor:  # not a fake tensor of a memory estimate
                self._tensors[device] = tensors
        return tensors

    @property
    def is_scaling(self) -> bool:
        """Whether gradients are scaled: False for a constant 1 and a disabled scaler."""
        return self._enabled and (self._state.scale != 1.0 or not isinstance(self._state, StaticRule))

    def copy(self) -> Self:
        """Return an independent scaler with the same state."""
        return copy.deepcopy(self)

    def update_scale(
        self,
        report: StepReport,
        nonfinite: Callable[[], Sequence[str]] = tuple,
        way_out: Callable[[], str] = str,
        *,
        optimizer: Hashable = None,
    ) -> None:
        """Set the next scale from the report of an optimizer step.

        Steps of several ``optimizer`` (any key) in one iteration change the scale once, from all reports. A step
        without a key begins an iteration. For the message of the error, ``nonfinite`` returns names of gradients that
        are inf or NaN, ``way_out`` advice.

        Raises:
            LossScaleError: after ``max_consecutive_skips`` skipped steps in a row, if a smaller scale cannot help.
        """
        if optimizer is None:
            self._iteration = None
        iteration = self.join_iteration(optimizer)
        iteration.reports[optimizer] = report
        if not self._enabled:
            return
        report, before = StepReport.of_all(iteration.reports.values()), iteration.before
        self._set_state(before.adjust(report))
        self._skips = iteration.skips_before + 1 if report.overflow else 0
        can_lower = report.may_be_scale and before.scale > before.floor
        if self._skips >= self._max_consecutive_skips and not can_lower:
            raise LossScaleError(self._skips_message(report.may_be_scale, nonfinite(), way_out() or DEFAULT_ADVICE))

    def _skips_message(self, may_be_scale: bool, nonfinite: Sequence[str], advice: str) -> str:
        where = f" even at loss scale {scale_text(self._state.scale)}, the smallest allowed"
        if not self.is_scaling:
            where = " without loss scaling"
        elif not may_be_scale:
            where = ", as is the loss, which no scale changes"
        return (
            f"{self._skips} optimizer steps in a row were skipped (since step {self._state.steps - self._skips + 1}): "
            f"gradients are inf or NaN{where}{_listed(nonfinite)}. {advice}"
        )

    def back_off(self, scale: float | None = None) -> bool:
        """Lower the scale as an overflow does, or to ``scale``, for a step that is rerun and not counted.

        Returns whether it was lowered. No scale below :attr:`smallest_scale` is set.
        """
        before = self.state
        after = before.adjust(StepReport(overflow=True))
        is_lower = self._enabled and after.scale < before.scale
        if scale is not None and is_lower:
            after = replace(after, scale=max(scale, min(self.smallest_scale, before.scale)))
        skips = max(before.consecutive_skips, int(is_lower))  # at least 1, so that the rerun follows an overflow
        self.state = replace(after, steps=before.steps, skipped_steps=before.skipped_steps, consecutive_skips=skips)
        return is_lower

    def may_raise_on_overflow(self) -> bool:
        """Return whether an overflow in this step may raise a :class:`LossScaleError`."""
        return self._skips + 1 >= self._max_consecutive_skips

    # Saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers for JSON; empty for a disabled scaler."""
        return self.state.to_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict` or a ``torch.amp.GradScaler``. A disabled scaler ignores it.

        Raises:
            TypeError: if the state is not a mapping.
            ValueError: for another kind of scaler, missing or unknown keys, or values out of range.
            RuntimeError: for the empty state of a disabled scaler.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the state of a loss scaler is a mapping, not a {type(state_dict).__name__}")
        if not state_dict:
            raise RuntimeError(
                "the state is empty, as that of a disabled scaler is: resume without it, or disable this one"
            )
        if set(state_dict) == _TORCH_KEYS:
            check_scale(state_dict["scale"])
            self._set_checked(self.state.from_torch(state_dict))
        else:
            self._set_checked(self.state.from_dict(state_dict))

    def _set_checked(self, rule: Rule) -> None:
        before, self.state = self._state, rule.validated()
        self._skips = rule.consecutive_skips
        self._warn_if_inexact(rule, before)

    def _warn_if_inexact(self, rule: Rule, before: Rule | None) -> None:
        """Warn about a new scale or factor that is not a power of two."""
        for name in rule.exact if self._enabled else ():
            value = getattr(rule, name)
            is_new = value != getattr(before, name, None)
            if is_new and value and math.isfinite(value) and math.frexp(value)[0] != 0.5:
                warn_caller(f"{name}={value} is no power of two: scaling and unscaling then round gradients")

    # As in torch's scaler: a pickle does not preserve ids of optimizers, the keys of reports.
    def __getstate__(self) -> dict[str, Any]:
        if self._reports:
            raise RuntimeError("pickle a loss scaler only between update() and the next unscale_() or step()")
        self.finish_pending_step()
        state = {**self.__dict__, "_tensors": {}, "users": None}
        del state["_iteration"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, users=weakref.WeakSet(), _iteration=None)

    # Methods of torch.amp.GradScaler

    def _reset_reports(self) -> None:
        self._reports: dict[int, StepReport | None] = {}  # by id of an optimizer with unscaled gradients
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        """Return whether the scaler is enabled."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` (a tensor, or nested iterables of tensors) multiplied by the loss scale.

        If the scale changes before the backward, autograd raises an error (a variable was modified in place), because
        gradients would be unscaled by another factor.

        Raises:
            ValueError: for any other type.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            # 0-dimensional, to keep the dtype of the outputs, as in torch
            return outputs * self.scale_and_inverse(outputs.device).scale.squeeze()
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, Mapping)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, for clipping or inspection.

        Optional, once between two updates. FP16 gradients of a :class:`MasterWeightOptimizer` become FP32 ones.

        Raises:
            RuntimeError: if called twice, after ``step``, before :meth:`scale`, or for an attached optimizer.
            ValueError: for FP16 gradients of an optimizer without FP32 masters, which would underflow.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() is being called after step(): call it between backward() and step()")
        if id(optimizer) in self._reports:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        if getattr(getattr(optimizer.step, "hf_mp_guard", None), "runtimes", None):
            raise RuntimeError(
                "this optimizer belongs to an attached model, whose gradients are unscaled already: call "
                "loss.backward() and optimizer.step() without a scaler"
            )
        self._reports[id(optimizer)] = unscale_gradients(optimizer, to_fp32(1.0 / self.get_scale()))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` with unscaled gradients, unless one of them is inf or NaN.

        Returns:
            The result of ``optimizer.step``; None if the step was skipped.

        Raises:
            RuntimeError: for a closure, a second call before ``update``, and an optimizer without gradients.
            RuntimeError, ValueError: as :meth:`unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("closures are not supported: a backward in one that overflows cannot be undone")
        self._check_scaled("step")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called since the last update()")
        if id(optimizer) not in self._reports:
            self.unscale_(optimizer)
        if (report := self._reports[id(optimizer)]) is None:
            raise RuntimeError("this optimizer has no gradients: call scaler.scale(loss).backward() before step()")
        result = None if report.overflow else optimizer.step(*args, **kwargs)
        self._stepped.add(id(optimizer))
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the next loss scale from the gradients checked since the last update, or to ``new_scale``.

        Raises:
            RuntimeError: if no optimizer was unscaled or stepped since the last update.
            ValueError: if ``new_scale`` is not one positive, finite number.
            LossScaleError: as :meth:`LossScaler.update_scale`.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_checked(replace(self.state, scale=_one_number(new_scale)))
            self._reset_reports()
            return
        self._check_scaled("update")
        reports = [report for report in self._reports.values() if report is not None]
        if not reports:
            raise RuntimeError("no gradients were checked since the last update(): call step(optimizer) before it")
        self._reset_reports()
        self.update_scale(StepReport.of_all(reports))

    def _check_scaled(self, method: str) -> None:
        if not self._tensors:
            raise RuntimeError(
                f"{method}() before anything was scaled: did this loop call scaler.scale(loss).backward()?"
            )


def _one_number(new_scale: float | Tensor) -> float:
    if not isinstance(new_scale, Tensor):
        return new_scale
    if new_scale.numel() != 1 or new_scale.requires_grad:
        raise ValueError(
            f"new_scale must be a number or a tensor of one element without requires_grad, not one of shape "
            f"{tuple(new_scale.shape)} with requires_grad={new_scale.requires_grad}"
        )
    return new_scale.item()


def _listed(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f" (not finite: {', '.join(names[:limit])}{more})" if names else ""
