"""The explicit style of loss scaling: ``scale``, ``unscale_``, ``step``, ``update``, as in ``torch.amp.GradScaler``.

For loops written for torch's scaler, and for everything that is not a whole model and its optimizer (several losses,
several optimizers). An attached model needs none of this: there the borders scale, and the guarded optimizer skips.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.scaling.rules import StepReport, to_fp32


class ExplicitScaling:
    """Methods of ``torch.amp.GradScaler`` for a class that has a scale and records steps.

    They do what torch's do, but for this:

    - Gradients are looked at after they were unscaled and, if sparse, summed by coordinate, so an overflow that only
      then arises skips the step too. torch looks before, and lets the infinity into the weights.
    - An optimizer that unscales by itself (``fused=True``) is given unscaled gradients as any other, and is not called
      in a skipped step. For a scale that is a power of two its weights are bit for bit those under torch's scaler;
      for another one they differ by a rounding, because it divides by the scale and :meth:`unscale_` multiplies by its
      inverse.
    - The scale can be set (:meth:`update`) before anything was scaled.
    """

    _enabled: bool
    _was_asked_to_scale: bool
    get_scale: Callable[[], float]
    scale_tensors: Callable[[torch.device], Any]
    record_step: Callable[..., None]
    _skips_once_too_often: Callable[[], bool]
    _set_scale: Callable[[float | Tensor], None]

    def _begin_iteration(self) -> None:
        self._reports: dict[int, StepReport | None] = {}  # of the optimizers that are unscaled, by identity
        self._stepped: set[int] = set()
        self._culprits: list[str] = []

    def is_enabled(self) -> bool:
        """Whether this scaler does anything; a disabled one only passes losses through and steps."""
        return self._enabled

    def scale(self, outputs: Any) -> Any:
        """``outputs`` (a tensor, or nested iterables of tensors) multiplied by the loss scale.

        Of the backward through a result that was made before the scale changed, autograd says that a variable was
        modified: its gradients would be unscaled by another factor.

        Raises:
            ValueError: for anything else.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._was_asked_to_scale = True
            # A scalar tensor, so that outputs of one dimension and more keep their dtype, as with torch.
            return outputs * self.scale_tensors(outputs.device).scale.squeeze()
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, Mapping)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, not {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, so that they can be clipped or looked at.

        Optional, once per optimizer between two updates. FP16 gradients of a :class:`MasterWeightOptimizer` are
        replaced by FP32 ones.

        Raises:
            RuntimeError: when called twice, after ``step``, before anything was scaled, or for an optimizer that is
                guarded by an attached :class:`MixedPrecision` already.
            ValueError: for FP16 gradients of an optimizer without FP32 masters: they cannot hold unscaled gradients.
                No gradient was changed then.
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
        report = self._unscale_gradients(optimizer)
        if report is not None and report.overflow and self._skips_once_too_often():
            self._culprits += _nonfinite_parameters(optimizer)
        self._reports[id(optimizer)] = report

    @torch.no_grad()
    def _unscale_gradients(self, optimizer: Optimizer) -> StepReport | None:
        """What the unscaled gradients of ``optimizer`` look like; None if it has none."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        in_fp16 = [parameter for parameter in parameters if parameter.grad.dtype is torch.float16]
        if in_fp16 and not getattr(optimizer, "keeps_masters", False):
            raise ValueError(
                "Attempting to unscale FP16 gradients: they would underflow. Wrap the optimizer in "
                "hf_mp.MasterWeightOptimizer, or keep the parameters in FP32"
            )
        for parameter in in_fp16:
            parameter.grad_dtype = None
            parameter.grad = parameter.grad.float()
        gradients = [parameter.grad for parameter in parameters]
        scale = self.get_scale()
        if scale != 1.0:
            _multiply(gradients, to_fp32(1.0 / scale))
        if not gradients:
            return None
        largest = largest_magnitude(gradients).item()
        overflow = not largest < float("inf")
        return StepReport(overflow, None if overflow else largest)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` with unscaled gradients, unless one of them is inf or NaN.

        Returns:
            What ``optimizer.step`` returned; None if the step was skipped.

        Raises:
            RuntimeError: for a closure, when called twice before ``update``, for an optimizer that has no gradients,
                and as :meth:`unscale_`.
            ValueError: as :meth:`unscale_`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("closures are not supported: which of the backwards in it overflowed cannot be undone")
        self._check_scaled("step")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called since the last update()")
        if id(optimizer) not in self._reports:
            self.unscale_(optimizer)
        report = self._reports[id(optimizer)]
        if report is None:
            raise RuntimeError("this optimizer has no gradients: call scaler.scale(loss).backward() before step()")
        result = None if report.overflow else optimizer.step(*args, **kwargs)
        self._stepped.add(id(optimizer))
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
        reports = [report for report in self._reports.values() if report is not None]
        if not reports:
            raise RuntimeError("no gradients were checked since the last update(): call step(optimizer) before it")
        culprits = self._culprits
        self._begin_iteration()
        measured = [report.largest_gradient for report in reports if report.largest_gradient is not None]
        report = StepReport(any(report.overflow for report in reports), max(measured, default=None))
        self.record_step(report, nonfinite=lambda: culprits)

    def _check_scaled(self, method: str) -> None:
        if not self._was_asked_to_scale:
            raise RuntimeError(
                f"{method}() before anything was scaled: did this loop call scaler.scale(loss).backward()?"
            )


def _multiply(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply in place: on an accelerator in one multi-tensor call for each device and dtype."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[gradient.device, gradient.dtype].append(gradient._values() if gradient.is_sparse else gradient)
    for (device, _), group in groups.items():
        if device.type == "cpu":
            # There torch's multi-tensor call is a loop too, but rounds the factor to BF16 for BF16 gradients.
            for values in group:
                values.mul_(factor)
        else:
            torch._foreach_mul_(group, factor)


def _nonfinite_parameters(optimizer: Optimizer) -> list[str]:
    found = []
    for number, group in enumerate(optimizer.param_groups):
        names = [f"parameter {index} of group {number}" for index in range(len(group["params"]))]
        for name, parameter in zip(group.get("param_names", names), group["params"], strict=True):
            if parameter.grad is not None and not largest_magnitude([parameter.grad]).item() < float("inf"):
                found.append(f"{name} of {type(optimizer).__name__}, {tuple(parameter.shape)}")
    return found
