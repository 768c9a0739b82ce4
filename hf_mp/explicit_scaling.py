"""The explicit style of loss scaling: ``scale``, ``unscale_``, ``step``, ``update``, as in ``torch.amp.GradScaler``.

For loops written for torch's scaler, and for everything that is not a whole model and its optimizer (several losses,
several optimizers). An attached model needs none of this: there the borders scale, and the guarded optimizer skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.loss_scale_rules import StepReport


class _Stage(Enum):
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class ExplicitScaling:
    """Methods of ``torch.amp.GradScaler`` for a class that has a scale and records steps."""

    _enabled: bool
    _stages: dict[int, _Stage]
    _reports: dict[int, StepReport]
    _culprits: list[str]
    _was_asked_to_scale: bool

    get_scale: Callable[[], float]
    scale_tensors: Callable[[torch.device], Any]
    record_step: Callable[..., None]

    def _begin_iteration(self) -> None:
        self._stages = {}
        self._reports = {}
        self._culprits = []

    def is_enabled(self) -> bool:
        """Whether this scaler does anything; a disabled one only passes losses through and steps."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """``outputs`` (a tensor, or nested iterables of tensors) multiplied by the loss scale.

        Raises:
            ValueError: for anything else.
        """
        if not self._enabled:
            return outputs
        self._was_asked_to_scale = True
        if isinstance(outputs, Tensor):
            # of no dimension, so that an FP16 loss stays FP16, as with torch
            return outputs * self.scale_tensors(outputs.device).scale.squeeze()
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, so that they can be clipped or looked at.

        Optional, once per optimizer between two updates. FP16 gradients of a :class:`MasterWeightOptimizer` are
        replaced by FP32 ones.

        Raises:
            RuntimeError: when called twice, after ``step``, or before anything was scaled.
            ValueError: for FP16 gradients of an optimizer without FP32 masters: they cannot hold unscaled gradients.
        """
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        stage = self._stages.get(id(optimizer))
        if stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        if stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step(): call it between backward() and step()")
        gradients = list(self._unscaled_gradients(optimizer))
        largest = largest_magnitude(gradients).item() if gradients else None
        overflow = largest is not None and not largest < float("inf")
        if overflow:
            self._culprits += _nonfinite_parameters(optimizer)
        self._reports[id(optimizer)] = StepReport(overflow, None if overflow else largest)
        self._stages[id(optimizer)] = _Stage.UNSCALED

    @torch.no_grad()
    def _unscaled_gradients(self, optimizer: Optimizer) -> Iterable[Tensor]:
        has_masters = getattr(optimizer, "keeps_masters", False)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                inverse = self.scale_tensors(gradient.device).inverse.squeeze()
                if gradient.dtype is torch.float16:
                    if not has_masters:
                        raise ValueError(
                            "Attempting to unscale FP16 gradients: they would underflow. Wrap the optimizer in "
                            "hf_mp.MasterWeightOptimizer, or keep the parameters in FP32"
                        )
                    parameter.grad_dtype = None
                    parameter.grad = gradient.float() * inverse
                elif gradient.is_sparse:
                    gradient._values().mul_(inverse)
                else:
                    gradient.mul_(inverse)
                yield parameter.grad

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` with unscaled gradients, unless one of them is inf or NaN.

        Returns:
            What ``optimizer.step`` returned; None if the step was skipped.

        Raises:
            RuntimeError: for a closure, when called twice before ``update``, before anything was scaled, or for an
                optimizer that is guarded by an attached :class:`MixedPrecision` already.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("closures are not supported: which of the backwards in it overflowed cannot be undone")
        if getattr(optimizer.step, "guarded_by_hf_mp", False):
            raise RuntimeError(
                "this optimizer belongs to an attached model, whose gradients are unscaled already: call "
                "loss.backward() and optimizer.step() without a scaler"
            )
        self._check_scaled("step")
        if self._stages.get(id(optimizer)) is _Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if id(optimizer) not in self._stages:
            self.unscale_(optimizer)
        report = self._reports[id(optimizer)]
        if report.overflow is False and report.largest_gradient is None:
            raise RuntimeError("this optimizer has no gradients: call scaler.scale(loss).backward() before step()")
        result = None if report.overflow else optimizer.step(*args, **kwargs)
        self._stages[id(optimizer)] = _Stage.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the next loss scale from what the optimizers saw since the last update, or to ``new_scale``.

        Raises:
            RuntimeError: if no optimizer was unscaled or stepped since the last update.
            ValueError: if ``new_scale`` is not one positive, finite number.
            LossScaleError: as :meth:`LossScaler.record_step`.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_scale(new_scale)
            self._begin_iteration()
            return
        self._check_scaled("update")
        reports, culprits = list(self._reports.values()), self._culprits
        if not reports or all(not report.overflow and report.largest_gradient is None for report in reports):
            raise RuntimeError("no gradients were checked since the last update(): call step(optimizer) before it")
        self._begin_iteration()
        measured = [report.largest_gradient for report in reports if report.largest_gradient is not None]
        report = StepReport(any(report.overflow for report in reports), max(measured, default=None))
        self.record_step(report, nonfinite=lambda: culprits)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        raise NotImplementedError

    def _check_scaled(self, method: str) -> None:
        if not self._was_asked_to_scale:
            raise RuntimeError(
                f"{method}() before anything was scaled: did this loop call scaler.scale(loss).backward()?"
            )


def _nonfinite_parameters(optimizer: Optimizer) -> list[str]:
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None and not largest_magnitude([parameter.grad]).item() < float("inf"):
                found.append(f"parameter {index} of group {number} {tuple(parameter.shape)}")
    return found
