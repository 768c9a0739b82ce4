""":class:`LossScaler`: base of the loss scalers. It stores a rule and has the methods of ``torch.amp.GradScaler``.

The rules are in :mod:`hf_mp.scaling.rules`. For an attached model, the scale boundary reads
:meth:`LossScaler.scale_and_inverse`, and the guarded optimizer step calls :meth:`LossScaler.update_scale`. ``scale``,
``unscale_``, ``step`` and ``update`` are for loops written for ``torch.amp.GradScaler``, with several losses or
optimizers too.
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

# default advice of the error
DEFAULT_ADVICE = (
    "The model or its data makes them, not the scale: look for NaN in the inputs, lower the learning rate, or train in "
    "a precision of wider range"
)


class LossScaleError(RuntimeError):
    """Gradients overflow even at the smallest loss scale allowed, so training cannot continue.

    Raised by ``optimizer.step()``, or by ``update()`` of a scaler, after ``max_consecutive_skips`` skipped steps in a
    row. The message names the first of these steps and the scale; for an attached model also some of the gradients that
    are inf or NaN.
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


# Backward has a thread for each device, and each reads S: all wait while one reads the overflow status.
_PENDING_STEP_LOCK = threading.RLock()

# keys of torch.amp.GradScaler.state_dict()
_TORCH_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class LossScaler(Generic[Rule]):
    """Base of the loss scalers: the methods of ``torch.amp.GradScaler``, and a saved state of plain numbers.

    The methods behave as those of ``GradScaler``, except:

    - Gradients are checked after unscaling and, if sparse, after duplicate coordinates are summed, so an overflow in
      either skips the step too. torch checks before, and the infinity reaches the weights.
    - An optimizer with its own unscaling (``fused=True``) also receives unscaled gradients, and is not called in a
      skipped step. If the scale is a power of two, its weights equal those under torch's scaler bit for bit. Otherwise
      they differ by rounding: the optimizer divides by the scale, :meth:`unscale_` multiplies by its inverse.
    - The scale can be set (:meth:`update`) before the first call of :meth:`scale`.

    A disabled scaler (``enabled=False``) returns losses unchanged, never skips, and saves an empty state.

    Args:
        rule: the initial rule, which then sets the scale.
        max_consecutive_skips: skipped steps in a row at the smallest scale after which :class:`LossScaleError` is
            raised; default 50.
        enabled: False disables scaling and skipping; default True.
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
        self._pending_step: Callable[[], None] | None = None  # reports a step with an overflow status on a device
        self._is_finishing = False
        self._iteration: Iteration | None = None  # None if no optimizer has stepped since the last backward
        self._reset_reports()
        self._warn_if_inexact(rule, None)

    @property
    def state(self) -> Rule:
        """The rule: settings and recorded values, frozen. Reading it finishes a pending step first."""
        self.finish_pending_step()
        return self._state

    @state.setter
    def state(self, state: Rule) -> None:
        self._iteration = None  # a later step of this iteration must not undo what was set
        self._set_state(state)

    def _set_state(self, state: Rule) -> None:
        changed, self._state = state.scale != self._state.scale, state
        if changed:
            for user in self.users:
                user.freeze_scale_factors()
            # In place: CUDA graphs and kernels refer to these tensors.
            for tensors in self._tensors.values():
                tensors.scale.fill_(state.scale)
                tensors.inverse.fill_(1.0 / state.scale)

    def get_scale(self) -> float:
        """Return the current loss scale; 1.0 for a disabled scaler."""
        return self.state.scale if self._enabled else 1.0

    def defer_step(self, finish: Callable[[], None]) -> None:
        """Register ``finish`` to be called before the state is next read.

        ``finish()`` reports the last optimizer step and may wait for the device.
        """
        self._pending_step = finish

    def finish_pending_step(self) -> None:
        """Report the step that was registered with :meth:`defer_step`, if any."""
        if self._pending_step is None:
            return
        with _PENDING_STEP_LOCK:
            # Another thread may have finished it while this one waited, and the call below may read the state.
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
        """Whether an optimizer has stepped since the last backward; a pending step counts once it was finished."""
        return self._iteration is not None

    def end_iteration(self) -> None:
        """Finish a pending step, and let steps after the backward that begins change the scale again."""
        self.finish_pending_step()
        self._iteration = None

    def join_iteration(self, optimizer: Hashable) -> Iteration:
        """Return the running iteration for a step that ``optimizer`` is about to report.

        Begin one if none has begun since the last backward, or if ``optimizer`` has reported a step in it already.
        Reset the rule to its state before the iteration, so that all reports of the iteration adjust S once.
        """
        iteration = self._iteration
        if iteration is None or optimizer in iteration.reports:
            iteration = self._iteration = Iteration(self._state, self._skips)
        self._set_state(iteration.before)
        return iteration

    @property
    def smallest_scale(self) -> float:
        """The smallest scale that overflows can lower this one to."""
        return self._state.floor

    def scale_and_inverse(self, device: torch.device) -> ScaleTensors:
        """Return the scale and its inverse on ``device``. The tensors are updated in place when the scale changes."""
        if (tensors := self._tensors.get(device)) is None:
            with torch.inference_mode(False):  # the first call may be in inference mode
                scale = torch.tensor([self.get_scale()], dtype=torch.float32, device=device)
                tensors = ScaleTensors(scale, 1.0 / scale)
            if type(scale) is Tensor:  # not a fake tensor of a memory estimate
                self._tensors[device] = tensors
        return tensors

    @property
    def is_scaling(self) -> bool:
        """Whether gradients are scaled: False for a constant scale of 1 and for a disabled scaler."""
        return self._enabled and (self._state.scale != 1.0 or not isinstance(self._state, StaticRule))

    def copy(self) -> Self:
        """Return an independent scaler with the same settings and state."""
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

        Between two calls of :meth:`end_iteration`, steps of several ``optimizer`` (any key) change the scale once, from
        their reports together (:meth:`StepReport.of_all`). A step without a key, or of the same optimizer again, is an
        iteration of its own.

        ``nonfinite`` returns the names of gradients that are inf or NaN, ``way_out`` advice or ``""``. Both are called
        only for the message of the error.

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
        if self._skips >= self._max_consecutive_skips and not (report.may_be_scale and before.scale > before.floor):
            raise LossScaleError(self._skips_message(report.may_be_scale, nonfinite(), way_out() or DEFAULT_ADVICE))

    def _skips_message(self, may_be_scale: bool, nonfinite: Sequence[str], advice: str) -> str:
        """Return the message of the error after too many skipped steps in a row."""
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
        """Lower the scale as an overflow does, for a step that is rerun and not counted; return whether it was lowered.

        ``scale`` is set instead, if given, but no scale below :attr:`smallest_scale`. The rule treats the rerun as the
        first step after an overflow.
        """
        before, after = self.state, self._state.adjust(StepReport(overflow=True))
        is_lower = self._enabled and after.scale < before.scale
        if scale is not None and is_lower:
            lowest = min(self.smallest_scale, before.scale)
            after = replace(after, scale=max(scale, lowest))
        # at least one skip: the rerun then counts as following an overflow
        skips = max(before.consecutive_skips, int(is_lower))
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
        """Load a state of :meth:`state_dict` or of a ``torch.amp.GradScaler``. A disabled scaler ignores it.

        Raises:
            TypeError: if the state is not a mapping.
            ValueError: for the state of another kind of scaler, missing or unknown keys, or values out of range.
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
        """Set the state to ``rule``; a ValueError for a field out of range changes nothing."""
        before, self.state = self._state, rule.validated()
        self._skips = rule.consecutive_skips
        self._warn_if_inexact(rule, before)

    def _warn_if_inexact(self, rule: Rule, before: Rule | None) -> None:
        """Warn, at the user's line, about a new scale or factor that is not a power of two."""
        for name in rule.exact if self._enabled else ():
            value = getattr(rule, name)
            is_new = value != getattr(before, name, None)
            if is_new and value and math.isfinite(value) and math.frexp(value)[0] != 0.5:
                warn_caller(f"{name}={value} is no power of two: scaling and unscaling then round gradients")

    # As in torch's scaler: reports are keyed by the id of an optimizer, which a pickle does not preserve.
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
        """Return whether scaling and skipping are enabled."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` (a tensor, or nested iterables of tensors) multiplied by the loss scale.

        If the scale changes before the backward of the result, autograd raises an error (a variable was modified in
        place): the gradients would be unscaled by another factor.

        Raises:
            ValueError: for any other type.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            # A 0-dimensional factor leaves the dtype of outputs with dimensions unchanged, as in torch.
            return outputs * self.scale_and_inverse(outputs.device).scale.squeeze()
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, Mapping)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, for clipping or inspection.

        Optional, once per optimizer between two updates. FP16 gradients of a :class:`MasterWeightOptimizer` are
        replaced by FP32 ones.

        Raises:
            RuntimeError: if called twice, after ``step``, before :meth:`scale`, or for an optimizer with a step guarded
                by an attached :class:`MixedPrecision`.
            ValueError: for FP16 gradients of an optimizer without FP32 masters, where unscaled gradients underflow. No
                gradient is changed.
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
            RuntimeError: for a closure, for a second call before ``update``, for an optimizer without gradients, and as
                :meth:`unscale_`.
            ValueError: as :meth:`unscale_`.
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
    """Return ``new_scale`` as a number; a ValueError for a tensor of several elements, or one that requires grad."""
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
