"""Runs a recorded micro-batch again without side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.mode import autocast
from hf_mp.diagnostics.ranges import RANGE_DTYPE, OpRange, RangeRecorder
from hf_mp.diagnostics.step_snapshot import (
    RecordedBackward,
    RecordedCall,
    compile_disabled,
    restoring_module_state,
    run_with_masters,
    without_gradients,
)
from hf_mp.diagnostics.values import finiteness
from hf_mp.kernels.gradient_scan import OVERFLOW_LIMIT, largest_magnitude
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.step.forward import ForwardContext
from hf_mp.step.mixed_precision import MixedPrecision


class Rerun(NamedTuple):
    outputs: list[Tensor]  # with a recorded gradient
    gradients: dict[str, Tensor]  # of weights by name, times `scale`; empty without a backward
    ranges: tuple[OpRange, ...] = ()  # empty if not measured

    @property
    def is_finite(self) -> bool:
        return not any(map(finiteness, self.outputs)) and self.largest_gradient < OVERFLOW_LIMIT

    @property
    def largest_gradient(self) -> float:
        """0 without gradients."""
        return largest_magnitude(self.gradients.values()).item()


def run_again(
    runtime: MixedPrecision,
    backward: RecordedBackward,
    context: Callable[[autocast, nn.Module], AbstractContextManager[None]],
    *,
    dtype: torch.dtype,
    rules: Mapping[str, str] | None = None,
    scale: float = 1.0,
    with_gradients: bool = True,
) -> Rerun:
    """Run a micro-batch again in ``dtype``. Weights, buffers, gradients and RNG states are restored.

    Args:
        context: ``context(mode, model)`` returns a context manager for the forward and the backward.
        rules: added to those of ``runtime``; in FP32 there are none.
        scale: factor of the recorded output gradients.
        with_gradients: whether the backward runs, which needs all output gradients.
    """
    model = runtime.model
    assert model is not None  # it was called
    all_rules = None if dtype is torch.float32 else {**runtime.rules, **(rules or {})}
    mode = autocast(dtype, tables=runtime.autocast.tables, rules=all_rules, model=model)

    def make(call: RecordedCall, args: Any, kwargs: Any) -> Any:
        args, kwargs = apply_to_tensors(
            lambda one: one.detach().requires_grad_() if one.requires_grad else one, (args, kwargs)
        )
        # Attached forwards inside the model run as parts of this one.
        with ForwardContext(runtime, None), mode:
            return mode.with_module_rules(call.forward.module(), call.forward.original)(*args, **kwargs)

    def run() -> Rerun:
        # Gradient checkpointing recomputes forwards in the backward.
        with context(mode, model):
            outputs = backward.run_recorded(make)
            if not with_gradients:
                return Rerun(outputs, {})
            output_gradients = [
                scaled_output_gradient(entry.gradient, scale, output)  # type: ignore[arg-type]
                for entry, output in zip(backward.incoming, outputs, strict=True)
            ]
            weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            gradients = dict(zip(weights, _differentiate(outputs, output_gradients, [*weights.values()]), strict=True))
            return Rerun(outputs, {name: gradient for name, gradient in gradients.items() if gradient is not None})

    with restoring_module_state(model), torch.set_grad_enabled(with_gradients), compile_disabled():
        return run_with_masters(model, dtype, run)


def scaled_output_gradient(gradient: Tensor, scale: float, output: Tensor) -> Tensor:
    """Scale the gradient of ``output`` and cast it, as ``cast_to_output`` does."""
    return (gradient * scale).to(output.dtype)


def measure_ranges(
    runtime: MixedPrecision,
    backward: RecordedBackward,
    *,
    dtype: torch.dtype = RANGE_DTYPE,
    rules: Mapping[str, str] | None = None,
    with_gradients: bool = False,
) -> Rerun:
    """Run a micro-batch again in ``dtype``, unscaled, and measure the magnitudes of all ops."""
    recorder = RangeRecorder(backward=with_gradients)
    rerun = run_again(runtime, backward, recorder.recording, dtype=dtype, rules=rules, with_gradients=with_gradients)
    return rerun._replace(ranges=recorder.ranges())


def _differentiate(
    outputs: list[Tensor], gradients: list[Tensor], parameters: list[nn.Parameter]
) -> list[Tensor | None]:
    """Return the gradients of ``parameters``, and leave their ``.grad`` unchanged."""
    try:
        return list(torch.autograd.grad(outputs, parameters, gradients, retain_graph=True, allow_unused=True))
    except RuntimeError as error:
        # autograd.grad does not support reentrant checkpoints, and has no error class for it.
        if "use_reentrant" not in str(error):
            raise
    with without_gradients(parameters):
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        return [parameter.grad for parameter in parameters]
