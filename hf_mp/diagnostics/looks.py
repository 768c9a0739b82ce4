"""A look at a kept micro-batch: one forward, and a backward, with BF16 in FP16's place, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.mode import autocast
from hf_mp.casting.nested import apply_to_tensors, named_tensors
from hf_mp.diagnostics.kept_state import KeptBackward, eagerly, gradients_set_aside, masters_in_place, untouched
from hf_mp.diagnostics.ranges import STAND_IN, OpRange, RangeRecorder
from hf_mp.diagnostics.values import finiteness
from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.step.mixed_precision import MixedPrecision


class Look(NamedTuple):
    """What was seen of a micro-batch."""

    ranges: tuple[OpRange, ...]
    is_finite: bool  # the outputs that gradients came in through, and the gradients of weights
    largest_gradient: float  # of a weight, unscaled; 0 without gradients


def look(
    runtime: MixedPrecision, backward: KeptBackward, *, dtype: torch.dtype = STAND_IN, with_gradients: bool = False
) -> Look:
    """Run a micro-batch in ``dtype`` (BF16 in FP16's place, or FP32), without side effects.

    Gradients are those that the micro-batch was given, unscaled; ``with_gradients`` needs that all were kept.
    """
    model = runtime.model
    assert model is not None  # it was called
    recorder, outputs = RangeRecorder(backward=with_gradients), dict[tuple[int, str], Tensor]()
    with untouched(model), masters_in_place(model, dtype), torch.set_grad_enabled(with_gradients), eagerly():
        rules = runtime.rules if dtype is STAND_IN else None
        mode = autocast(dtype, tables=runtime.region.tables, rules=rules, model=model)
        for call in backward.calls:
            module = call.forward.module()
            module.train(call.is_training)
            call.random_states.restore()
            args, kwargs = apply_to_tensors(entered, (call.args, call.kwargs))
            with runtime.region.running(None), mode, recorder.recording(mode, model):
                found = module(*args, **kwargs)
            outputs.update({(id(call), name): tensor for name, tensor in named_tensors(found)})
        leaving = [outputs[id(incoming.call), incoming.output] for incoming in backward.incoming]
        gradients: list[Tensor | None] = []
        if with_gradients:
            given = [incoming.gradient.to(one.dtype) for incoming, one in zip(backward.incoming, leaving, strict=True)]  # type: ignore[union-attr]
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients = differentiate(leaving, given, parameters).gradients
    made = [gradient for gradient in gradients if gradient is not None]
    is_finite = not any(map(finiteness, [*leaving, *made]))
    return Look(recorder.ranges(), is_finite, largest_magnitude(made).item() if made else 0.0)


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
        found = torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, allow_unused=True)
        return Differentiated(list(found), False)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    with gradients_set_aside(parameters):
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        return Differentiated([read(parameter) for parameter in parameters], True)
