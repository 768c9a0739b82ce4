"""Runs a kept micro-batch again, without side effects: in another precision, by other rules, or to find an origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.mode import autocast
from hf_mp.diagnostics.kept_state import (
    KeptBackward,
    KeptCall,
    eagerly,
    gradients_set_aside,
    untouched,
    with_masters,
)
from hf_mp.diagnostics.ranges import STAND_IN, OpRange, RangeRecorder
from hf_mp.diagnostics.values import finiteness
from hf_mp.kernels.gradient_scan import SQUARES_BELOW, largest_magnitude
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.step.forward import ForwardContext
from hf_mp.step.mixed_precision import MixedPrecision


class Rerun(NamedTuple):
    """What a micro-batch gave when it ran again."""

    outputs: list[Tensor]  # those that gradients came in through
    gradients: dict[str, Tensor]  # of weights by name, times the scale; empty without a backward
    ranges: tuple[OpRange, ...] = ()  # of all ops, where these were looked at

    @property
    def is_finite(self) -> bool:
        """Whether a step could be taken with it."""
        return not any(map(finiteness, self.outputs)) and self.largest_gradient < SQUARES_BELOW

    @property
    def largest_gradient(self) -> float:
        """The largest magnitude of a weight's gradient; 0 without any."""
        return largest_magnitude(self.gradients.values()).item()


def run_again(
    runtime: MixedPrecision,
    backward: KeptBackward,
    watching: Callable[[autocast, nn.Module], AbstractContextManager[None]],
    *,
    dtype: torch.dtype,
    rules: Mapping[str, str] | None = None,
    scale: float = 1.0,
    with_gradients: bool = True,
) -> Rerun:
    """Run a micro-batch in ``dtype``, without side effects; arguments as of :func:`look`.

    ``watching`` gives what is entered around the forward and the backward, for the autocast that these run under and
    the model; ``scale`` is what the gradients that came in are multiplied with.
    """
    model = runtime.model
    assert model is not None  # it was called
    # A rule in FP32 would only say again what autocast does there.
    in_force = None if dtype is torch.float32 else {**runtime.rules, **(rules or {})}
    mode = autocast(dtype, tables=runtime.autocast.tables, rules=in_force, model=model)

    def make(call: KeptCall, args: Any, kwargs: Any) -> Any:
        args, kwargs = apply_to_tensors(_entered, (args, kwargs))
        # In a forward of the run, attached forwards inside of the model are parts of it.
        with ForwardContext(runtime, None), mode:
            return mode.under_rules(call.forward.module(), call.forward.original)(*args, **kwargs)

    def run() -> Rerun:
        # Around the backward too, in which checkpoints run forwards again.
        with watching(mode, model):
            outputs = backward.again(make)
            if not with_gradients:
                return Rerun(outputs, {})
            given = [
                scaled_entry(entry.gradient, scale, output)  # type: ignore[arg-type]
                for entry, output in zip(backward.incoming, outputs, strict=True)
            ]
            weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            found = zip(weights, _differentiate(outputs, given, [*weights.values()]), strict=True)
            return Rerun(outputs, {name: one for name, one in found if one is not None})

    with untouched(model), torch.set_grad_enabled(with_gradients), eagerly():
        return with_masters(model, dtype, run)


def scaled_entry(gradient: Tensor, scale: float, output: Tensor) -> Tensor:
    """The gradient that goes into the model's backward through ``output``: scaled, as inside of the borders."""
    return (gradient * scale).to(output.dtype)


def look(
    runtime: MixedPrecision,
    backward: KeptBackward,
    *,
    dtype: torch.dtype = STAND_IN,
    rules: Mapping[str, str] | None = None,
    with_gradients: bool = False,
) -> Rerun:
    """Run a micro-batch in ``dtype``, unscaled and without side effects, and take down the magnitudes of all ops.

    Args:
        runtime, backward: of the run.
        dtype: BF16 in FP16's place (the default), or FP32.
        rules: further rules than the run's; in FP32 there are none.
        with_gradients: also differentiate, for which the gradients that came in must have been kept.
    """
    recorder = RangeRecorder(backward=with_gradients)
    rerun = run_again(runtime, backward, recorder.recording, dtype=dtype, rules=rules, with_gradients=with_gradients)
    return rerun._replace(ranges=recorder.ranges())


def _entered(tensor: Tensor) -> Tensor:
    """An input that a forward is given again."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _differentiate(
    outputs: list[Tensor], gradients: list[Tensor], parameters: list[nn.Parameter]
) -> list[Tensor | None]:
    """The gradients of ``parameters``, which accumulate nowhere."""
    try:
        # Not .backward(): gradients that wait for the step, in FP32 or scaled, are not to be touched.
        return list(torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        # torch refuses autograd.grad with reentrant checkpoints, by this sentence alone.
        if "use_reentrant" not in str(error):
            raise
    with gradients_set_aside(parameters):
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        return [parameter.grad for parameter in parameters]
