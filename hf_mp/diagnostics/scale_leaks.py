"""``check_gradients``: one backward at several loss scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.diagnostics.batches import call_model, find_loss
from hf_mp.diagnostics.magnitudes import sample
from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.diagnostics.step_snapshot import restoring_module_state, save_rng_states, without_gradients
from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.scaling.rules import scale_with_headroom
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.split_parameter import gradient_and_factor

# Without unscaling, a gradient is a + b * S; without scaling, a + b / S. FP16 underflow only reduces a.
HEADROOM = 6.0  # doublings from the larger scale to an overflow
SCALE_RATIO = 2.0**4
TINY_SCALES = (2.0**-8, 2.0**-9)  # show b / S; two, because underflowed gradients differ in direction
LEAST_SHARE = 0.05  # of b in a gradient
_ROUNDING = 2.0**-8  # error of sums of FP16 values, relative to the largest gradient
_SAMPLED = 4096  # elements of each gradient
_TRIES = 3  # at scales 2**8 apart, if gradients overflow at the current one


class ScaleLeakError(RuntimeError):
    """Gradients change with the loss scale, so they are wrong. The message names the parameters, with advice."""


def check_gradients(model: nn.Module | MixedPrecision, batch: Any, loss: Callable[[Any], Tensor] | None = None) -> None:
    """Check that the gradients of one batch are equal at several loss scales.

    Forward and backward run five to eight times. The model, gradients, RNG states and the loss scale are restored.
    Up to 4,096 elements of each gradient are compared. Without a loss scale nothing runs.

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.
        batch: a mapping of keyword arguments, a tuple or list of arguments, or a single argument.
        loss: computes the loss from the model's outputs; default: the outputs' own ``loss``.

    Raises:
        TypeError: if ``model`` is neither.
        ValueError: if the model is not attached, or returns no loss and ``loss`` is not given.
        ScaleLeakError: if gradients differ; names the parameters by cause.
    """
    runtime = runtime_of(model)
    attached = runtime.model
    if attached is None or not runtime.check.is_scaled:
        return

    def backward() -> None:
        outputs = call_model(attached, batch)
        computed = find_loss(outputs) if loss is None else loss(outputs)
        if computed is None:
            raise ValueError(
                f"{type(attached).__name__} returned no loss: put labels into batch, or give loss, which computes one "
                "from what the model returns"
            )
        computed.backward()

    with without_gradients(attached.parameters()), torch.enable_grad():
        raise_on_leaks(runtime, backward)


def raise_on_leaks(runtime: MixedPrecision, backward: Callable[[], None]) -> None:
    """Run ``backward`` at several scales; raise a :class:`ScaleLeakError` if the gradients differ.

    Buffers, RNG states and the scale are restored; gradients are None afterwards.
    """
    model = runtime.model
    assert model is not None
    with restoring_module_state(model), _without_observers(runtime):
        at = functools.partial(_gradients_at, runtime, model, backward, save_rng_states())
        present = runtime.scaler.get_scale()
        tried = (at(present * 2.0 ** (-8 * number))[1] for number in range(_TRIES + 1))
        largest = next((found for found in tried if found < math.inf), math.inf)
        if not 0.0 < largest < math.inf:
            return
        larger = scale_with_headroom(largest, HEADROOM)
        scales = (larger, larger / SCALE_RATIO, *TINY_SCALES)
        samples = [at(scale)[0] for scale in scales]
    if leaks := _leaks(samples):
        numbers = ", ".join(f"{one:g}" for one in scales[:3])
        causes = " ".join(f"{_listed(named)}. {_CAUSES[cause]}." for cause, named in leaks.items())
        raise ScaleLeakError(
            "gradients change with the loss scale, so they are wrong. Their root mean squares at loss scales "
            f"{numbers}: {causes} A precision without loss scaling (bf16) does not need that"
        )


# By the factor of a gradient: cause and way out.
_CAUSES = {
    "1/S": "The loss is computed from a tensor that forward() does not return (a hook, an attribute): return it",
    "S": (
        "These are multiplied by the loss scale: code that runs inside of the backward (a hook, a custom autograd "
        "function) writes gradients of weights itself. Call backward() there, in a torch.autograd.Function that is "
        "applied in forward(), or decorate that code with hf_mp.unscaled_gradients"
    ),
    "not linear": (
        "A function that is not linear in the gradient, such as a clamp, receives scaled gradients inside of the "
        "model, in a hook or a custom autograd function: decorate it with hf_mp.unscaled_gradients"
    ),
}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _leaks(samples: list[dict[str, Tensor]]) -> dict[str, list[str]]:
    """Return parameters with gradients that depend on S, and sizes of these, by key of ``_CAUSES``."""
    typical = max(_size(sample) for sample in samples[0].values())
    found: dict[str, list[str]] = {}
    for name in samples[0]:
        at_scales = [sample[name] for sample in samples]
        cause = _cause(typical, *at_scales)
        if cause is not None:
            sizes = ", ".join(f"{_size(one):.3g}" for one in at_scales[:3])
            found.setdefault(cause, []).append(f"{name} ({sizes})")
    return found


def _cause(typical: float, larger: Tensor, smaller: Tensor, tiny: Tensor, tinier: Tensor) -> str | None:
    """Return the key of ``_CAUSES`` for a gradient at four scales, or None."""
    if _contains_inverse_scale(larger, tiny, tinier):
        # 1/S doubles at half the scale; a clamp acts only at larger ones.
        return "1/S" if _size(tinier) > 1.5 * _size(tiny) else "not linear"
    if _contains_scale(larger, smaller, typical):
        in_larger, in_smaller = larger - tiny, smaller - tiny  # without the part that does not depend on S
        is_proportional = (in_larger - SCALE_RATIO * in_smaller).norm() < 0.25 * in_larger.norm()
        return "S" if is_proportional else "not linear"
    return None


def _size(sample: Tensor) -> float:
    return sample.square().mean().sqrt().item() if sample.numel() else 0.0


def _contains_scale(larger: Tensor, smaller: Tensor, typical: float) -> bool:
    if (larger - smaller).norm() <= LEAST_SHARE * larger.norm():
        return False
    # A gradient that cancels out (a bias before a batch norm) has only rounding errors.
    ratio = _size(larger) / (_size(smaller) or math.inf)
    return _size(larger) > _ROUNDING * typical or 0.9 * SCALE_RATIO < ratio < 1.1 * SCALE_RATIO


def _contains_inverse_scale(larger: Tensor, tiny: Tensor, tinier: Tensor) -> bool:
    if (tiny - larger).norm() <= (1.0 + LEAST_SHARE / TINY_SCALES[0]) * larger.norm():
        return False
    # Rounding errors of a gradient that cancels out (a bias of keys) differ at both scales.
    return bool(torch.cosine_similarity(tiny, tinier, dim=0) > 0.9)


@contextmanager
def _without_observers(runtime: MixedPrecision) -> Iterator[None]:
    """Remove the observers; restore them and the scale on exit."""
    state, observers, runtime.observers = runtime.scaler.state, runtime.observers, []
    try:
        yield
    finally:
        runtime.scaler.state, runtime.observers = state, observers


def _gradients_at(
    runtime: MixedPrecision,
    model: nn.Module,
    backward: Callable[[], None],
    restore_rng_states: Callable[[], None],
    scale: float,
) -> tuple[dict[str, Tensor], float]:
    """Return FP32 samples of the gradients, and their largest magnitude."""
    runtime.scaler.state = replace(runtime.scaler.state, scale=scale)
    restore_rng_states()  # forward, recomputation and autograd functions may draw
    try:
        backward()
        samples, largest = dict[str, Tensor](), list[Tensor]()
        for name, parameter in model.named_parameters():
            # Not `.grad`: a lean layout would make FP32 gradients, all at once.
            gradient, factor = gradient_and_factor(parameter)
            if gradient is not None:
                inverse = 1.0 if factor is None else factor.squeeze()
                samples[name] = sample(gradient, _SAMPLED).float() * inverse
                largest.append(largest_magnitude([gradient]) * inverse)
        return samples, largest_magnitude(largest).item()
    finally:
        runtime.check.reset_step()
        for parameter in model.parameters():
            parameter.grad = None
