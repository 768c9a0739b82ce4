"""Callbacks of a step: :class:`StepObserver`, and :class:`StepController`, which may replace an overflow report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, Literal

from torch import Tensor

from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.rules import StepReport


class StepObserver:
    """Callbacks during the training of an attached model, without effect by default: ``MixedPrecision.observers``."""

    def on_attach_optimizer(self, optimizer: Any) -> None:
        """Called when ``optimizer`` is attached. Raises a ValueError for one that cannot be observed."""

    def on_forward_begin(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """Called before an :class:`AttachedForward` runs with grad. May return a function to call with the outputs."""

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        """Called when ``gradient``, scaled, reaches ``node`` of a model output, before other nodes of the model."""

    def on_backward_end(self, largest: Tensor | None) -> None:
        """Called after a backward, with its largest unscaled magnitude, on the device; None if not measured."""

    def on_step_finished(self, report: StepReport) -> None:
        """Called after an optimizer step was applied or skipped, before the scaler counts it."""

    def overflow_advice(self) -> str:
        """Return advice for the message of a :class:`LossScaleError`; default: empty."""
        return ""

    def on_detach(self) -> None:
        """Called after the model was detached."""


class StepController(StepObserver):
    """An observer that may replace the report of a step: ``MixedPrecision.controller``."""

    def report_from_backward(self) -> StepReport | None:
        """Return the report of a step if the backward has used its gradients; None if they are still to be checked."""

    def handle_overflow(self, optimizer: Any) -> StepReport | None:
        """Called before an overflow skips a step; return the report of new gradients, or None to skip it."""


# Controller classes for MixedPrecision(on_overflow=...). Argument: the runtime.
ON_OVERFLOW: dict[str, str | None] = {"skip": None, "heal": "hf_mp.diagnostics.healing:Healer"}

FreeGradients = Literal["step", "backward"]
# Controller classes for MixedPrecision(free_gradients=...). Arguments: the runtime and max_grad_norm.
FREE_GRADIENTS: dict[str, str | None] = {
    "step": None,
    "backward": "hf_mp.step.optimizer_in_backward:OptimizerInBackward",
}


OFFLOAD = ("optimizer", "all")  # values of MixedPrecision(offload=...)


def check_options(
    policy: PrecisionPolicy,
    free_gradients: str,
    on_overflow: str = "skip",
    max_grad_norm: float | None = None,
    offload: str | None = None,
) -> None:
    """Raise a ValueError, with advice, for options of a :class:`MixedPrecision` that ``policy`` does not support."""
    choices = ("free_gradients", free_gradients, FREE_GRADIENTS), ("on_overflow", on_overflow, ON_OVERFLOW)
    for name, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not known: use {' or '.join(map(repr, allowed))}")
    if free_gradients == "backward" and not policy.is_lean:
        raise ValueError(
            f"free_gradients='backward' needs a lean layout, whose optimizer is ours, not precision={str(policy)!r}: "
            "use 'fp16-lean' or 'bf16-lean'"
        )
    if offload is not None:
        _check_offload(policy, offload, free_gradients)
    if max_grad_norm is not None and not max_grad_norm > 0.0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be positive; None for no clipping, inf to measure only")


def _check_offload(policy: PrecisionPolicy, offload: str, free_gradients: str) -> None:
    if offload not in OFFLOAD:
        raise ValueError(f"offload={offload!r} is not known: use {' or '.join(map(repr, OFFLOAD))}, or None")
    if not policy.is_lean:
        raise ValueError(
            f"offload={offload!r} needs a lean layout, whose masters are not in the model, not "
            f"precision={str(policy)!r}: use 'fp16-lean' or 'bf16-lean'"
        )
    if free_gradients == "backward":
        raise ValueError(
            f"free_gradients='backward' updates each parameter as its gradient is complete, and offload={offload!r} "
            "moves the state once a step: leave free_gradients out (offload='all' leaves no gradient on the device)"
        )


def controller_for(classes: Mapping[str, str | None], name: str, *arguments: Any) -> StepController | None:
    """Construct the controller ``classes[name]``; None if there is none."""
    path = classes[name]  # imported only if it is used
    return None if path is None else resolve_name(path)(*arguments)
