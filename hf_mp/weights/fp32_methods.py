"""Methods of a lean model that compute new weights, in FP32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_mp.models.base import ReplacedForward
from hf_mp.weights.split_parameter import SplitParameter

# Of Transformers and PEFT. They create tensors of a weight's dtype, which would round FP32 values to 16 bits.
_METHODS = (
    "resize_token_embeddings", "merge_and_unload", "merge_adapter", "unmerge_adapter", "add_weighted_adapter"
)  # fmt: skip


class _FP32Method(ReplacedForward):
    """Calls the original method while the module has FP32 parameters instead of split ones."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        with fp32_parameters(module):
            return self.original(*args, **kwargs)


def install_fp32_methods(model: nn.Module) -> None:
    for module in model.modules():
        for name in _METHODS:
            if name not in vars(module) and hasattr(type(module), name):
                vars(module)[name] = _FP32Method(module, name)


def remove_fp32_methods(model: nn.Module) -> None:
    for module in model.modules():
        for method in [one for one in vars(module).values() if isinstance(one, _FP32Method)]:
            method.remove()


@contextmanager
def fp32_parameters(model: nn.Module) -> Iterator[None]:
    """Context in which FP32 parameters replace split ones; at exit, the split ones get their values.

    Code inside may move, replace and resize parameters. Gradients are not moved.
    """
    plain_of: dict[SplitParameter, nn.Parameter] = {}
    modules = list(model.modules())
    for module in modules:
        for name, parameter in module._parameters.items():
            if isinstance(parameter, SplitParameter):
                if parameter not in plain_of:
                    plain_of[parameter] = nn.Parameter(parameter.fp32_value(), parameter.requires_grad)
                module._parameters[name] = plain_of[parameter]
    try:
        yield
    finally:
        split_of = {id(plain): parameter for parameter, plain in plain_of.items()}
        # Also in parts that are no longer in the model: they must not keep an FP32 copy.
        for module in dict.fromkeys([*modules, *model.modules()]):
            for name, parameter in module._parameters.items():
                module._parameters[name] = split_of.get(id(parameter), parameter)
        with torch.no_grad():
            for parameter, plain in plain_of.items():
                if plain.shape == parameter.shape:
                    parameter.write_fp32(plain.detach())
                else:
                    parameter.data = plain.detach()
