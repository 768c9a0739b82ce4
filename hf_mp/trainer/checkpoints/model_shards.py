"""FP32 weights and buffers of a model, to save in shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.model_index import plain_name
from hf_mp.trainer.checkpoints.manifest import CheckpointError

_PREFIX = "model/"


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name without prefixes of wrappers; tied ones once."""
    return {plain_name(name): parameter for name, parameter in _unwrapped(model).named_parameters()}


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by ``model/NAME``, tied ones once, and this name for each key of the state dict."""
    inner = _unwrapped(model)
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    # state_dict() returns new tensors, so tied ones are found among the parameters and buffers.
    identities: dict[str, Any] = {name: id(tensor) for name, tensor in named}
    tensors: dict[str, Tensor] = {}
    saved_names: dict[str, str] = {}
    first_names: dict[Any, str] = {}  # by identity
    for key, value in inner.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{key} of the model's state is a {type(value).__name__}: only tensors are saved")
        identity = identities.get(key, key)
        name = first_names.setdefault(identity, _PREFIX + plain_name(key))
        saved_names[key] = name
        if name not in tensors:
            tensors[name] = value.detach().contiguous()
    return tensors, saved_names


def check_same_weights(tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> None:
    saved = {name for name in layout if name.startswith(_PREFIX)}
    if saved != tensors.keys():
        missing, unknown = sorted(tensors.keys() - saved)[:3], sorted(saved - tensors.keys())[:3]
        raise CheckpointError(
            f"these are weights of another model: missing {missing}, unexpected {unknown}; load them into the model "
            "that was saved"
        )
    for name, tensor in tensors.items():
        stored = layout[name]
        if stored.size != tensor.shape or stored.properties.dtype.is_floating_point != tensor.is_floating_point():
            raise CheckpointError(
                f"{name} was saved as {stored.properties.dtype} of shape {tuple(stored.size)}, and is {tensor.dtype} "
                f"of shape {tuple(tensor.shape)} here: load it into a model of the config that was saved"
            )


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], saved_names: Mapping[str, str]) -> None:
    _unwrapped(model).load_state_dict({key: tensors[name] for key, name in saved_names.items()})


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
