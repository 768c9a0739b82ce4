"""Patch of ``clip_grad_value_``: gradients of an attached model are not clipped if any of them is inf or NaN.

Clipping would turn inf into a finite value, and the overflowed step would be taken.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_mp.casting.data_tracking import DataTrackedParameter
from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.kernels.gradient_scan import all_finite
from hf_mp.ranks.parallelism import local_parts
from hf_mp.weights.attach_checks import RUNTIMES
from hf_mp.weights.split_parameter import SplitParameter


@around
def _clip_value(original: Any, parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # the classes of attached parameters
    if any(type(parameter) in (DataTrackedParameter, SplitParameter) for parameter in parameters):
        parameters = _without_overflows(parameters)
        if not parameters:  # torch's function raises for an empty list
            return
    original(parameters, clip_value, *args, **kwargs)


def _without_overflows(parameters: list[Tensor]) -> list[Tensor]:
    """Remove the parameters of attached models if any of their gradients is inf or NaN."""
    models = [runtime.model for runtime in RUNTIMES if runtime.model is not None]
    attached = {id(parameter) for model in models for parameter in model.parameters()}
    gradients = [one.grad for one in parameters if one.grad is not None and id(one) in attached]
    if all_finite(local_parts(gradients)):
        return parameters
    return [one for one in parameters if one.grad is not None and id(one) not in attached]


VALUE_PATCHES = Patches(
    (
        Patch(
            # torch.nn.utils imports the function by name, and callers use that one.
            ("torch.nn.utils.clip_grad:clip_grad_value_", "torch.nn.utils:clip_grad_value_"),
            _clip_value,
            "clip_grad_value_ hides an overflow from the step",
        ),
    )
)
