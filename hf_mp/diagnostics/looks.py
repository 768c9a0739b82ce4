"""A look at a kept micro-batch: one forward, and a backward, in another precision or by other rules, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.mode import autocast
from hf_mp.casting.nested import apply_to_tensors
from hf_mp.diagnostics.kept_state import (
    KeptBackward,
    KeptCall,
    eagerly,
    gradients_set_aside,
    masters_in_place,
    untouched,
)
from hf_mp.diagnostics.ranges import STAND_IN, OpRange, RangeRecorder
from hf_mp.diagnostics.values import finiteness
from hf_mp.kernels.gradient_scan import SQUARES_BELOW, largest_magnitude
from hf_mp.step.mixed_precision import MixedPrecision


class Look(NamedTuple):
    """What was seen of a micro-batch."""

    ranges: tuple[OpRange, ...]
    is_finite: bool  # the outputs that gradients came in through, and the gradients of weights
    largest_gradient: float  # of a weight, unscaled; 0 without gradients


def look(
    runtime: MixedPrecision,
    backward: KeptBackward,
    *,
    dtype: torch.dtype = STAND_IN,
    rules: Mapping[str, str] | None = None,
    scale: float = 1.0,
    with_gradients: bool = False,
) -> Look:
    """Run a micro-batch in ``dtype``, without side effects.

    Args:
        runtime, backward: of the run.
        dtype: BF16 in FP16's place (the default), FP32, or FP16.
        rules: further rules than the run's; in FP32 there are none.
        scale: what the gradients that the micro-batch was given are multiplied with.
        with_gradients: also differentiate, for which all of these must have been kept.
    """
    model = runtime.model
    assert model is not None  # it was called
    recorder = RangeRecorder(backward=with_gradients)
    # A rule in FP32 would only say again what autocast does there.
    in_force = None if dtype is torch.float32 else {**runtime.rules, **(rules or {})}
    with untouched(model), masters_in_place(model, dtype), torch.set_grad_enabled(with_gradients), eagerly():
        mode = autocast(dtype, tables=runtime.region.tables, rules=in_force, model=model)

        def make(call: KeptCall, args: Any, kwargs: Any) -> Any:
            args, kwargs = apply_to_tensors(entered, (args, kwargs))
            with runtime.region.running(None), mode, recorder.recording(mode, model):
                return call.forward.module()(*args, **kwargs)

        leaving = backward.through(backward.again(make))
        gradients: list[Tensor | None] = []
        if with_gradients:
            pairs = zip(backward.incoming, leaving, strict=True)
            given = [(incoming.gradient * scale).to(one.dtype) for incoming, one in pairs]  # type: ignore[operator, union-attr]
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients = differentiate(leaving, given, parameters).gradients
    made = [gradient for gradient in gradients if gradient is not None]
    largest = largest_magnitude(made).item() if made else 0.0
    is_finite = not any(map(finiteness, leaving)) and largest < SQUARES_BELOW * scale
    return Look(recorder.ranges(), is_finite, largest)


def entered(tensor: Tensor) -> Tensor:
    """An input that a forward is given again."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


class Differentiated(NamedTuple):
    """The gradients of parameters; whether only ``backward()`` gives them, as with reentrant checkpoints."""

    gradients: list[Tensor | None]
    by_backward: bool


def differentiate(
    outputs: list[Tensor],
    gradients: list[Tensor],
    parameters: list[nn.Parameter],
    read: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad,
) -> Differentiated:
    """The gradients of ``parameters``, which accumulate nowhere; ``read`` reads one that ``backward()`` has given."""
    try:
        # Not .backward(): gradients that wait for the step, in FP32 or scaled, are not to be touched.
        found = torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, allow_unused=True)
        return Differentiated(list(found), False)
    except RuntimeError as error:
        # torch refuses autograd.grad with reentrant checkpoints, by this sentence alone.
        if "use_reentrant" not in str(error):
            raise
    with gradients_set_aside(parameters):
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        return Differentiated([read(parameter) for parameter in parameters], True)
