"""Who only looks at a step (:class:`StepObserver`), and who decides about it (:class:`StepController`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, Literal

from torch import Tensor

from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.rules import StepReport


class StepObserver:
    """Looks on while an attached model trains, in ``MixedPrecision.observers``; every method is a no-op here."""

    def on_attach_optimizer(self, optimizer: Any) -> None:
        """``optimizer``, which will be stepped, is attached; raises a ValueError for one that cannot be observed."""

    def on_forward_begin(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Any], None] | None:
        """A forward with grad of ``forward`` (an :class:`AttachedForward`) begins; may return a function of outputs."""

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        """A gradient, scaled, enters through ``node``, an output border's; nothing of the model's backward has run."""

    def on_backward_end(self, largest: Tensor | None) -> None:
        """A backward has ended, with this largest unscaled magnitude (not read yet); None where not measured."""

    def on_step_finished(self, report: StepReport) -> None:
        """An optimizer step was taken or skipped; the scaler has not counted it yet."""

    def overflow_advice(self) -> str:
        """What to do, and why, for the message of a :class:`LossScaleError`."""
        return ""

    def on_detach(self) -> None:
        """The model is an ordinary one again."""


class StepController(StepObserver):
    """Looks on as well, and may replace the report of a step: ``MixedPrecision.controller``."""

    def report_from_backward(self) -> StepReport | None:
        """The report of a step whose gradients were used already; None where there are gradients to look at."""

    def handle_overflow(self, optimizer: Any) -> StepReport | None:
        """A step is about to be skipped; the report on gradients put in the place of those that overflowed, if any."""


# The controller of each MixedPrecision(on_overflow=...), by module and class; its argument is the runtime.
ON_OVERFLOW: dict[str, str | None] = {"skip": None, "heal": "hf_mp.diagnostics.healing:Healer"}

FreeGradients = Literal["step", "backward"]
# The controller of each MixedPrecision(free_gradients=...); its arguments are the runtime and max_grad_norm.
FREE_GRADIENTS: dict[str, str | None] = {
    "step": None,
    "backward": "hf_mp.step.optimizer_in_backward:OptimizerInBackward",
}


OFFLOAD = ("optimizer", "all")  # what MixedPrecision(offload=...) may have in host memory


def check_options(
    policy: PrecisionPolicy,
    free_gradients: str,
    on_overflow: str = "skip",
    max_grad_norm: float | None = None,
    offload: str | None = None,
) -> None:
    """Raise a ValueError, with the way out, for options of a :class:`MixedPrecision` that ``policy`` cannot have."""
    choices = ("free_gradients", free_gradients, FREE_GRADIENTS), ("on_overflow", on_overflow, ON_OVERFLOW)
    for name, value, known in choices:
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known: use {' or '.join(map(repr, known))}")
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


def controller_for(known: Mapping[str, str | None], name: str, *arguments: Any) -> StepController | None:
    """The controller that ``known`` has for ``name``, constructed with ``arguments``."""
    # Imported by name, so that a training without it does not load its module.
    home = known[name]
    return None if home is None else resolve_name(home)(*arguments)
