"""State of an optimizer by parameter name: tensors to save in shards, other values as JSON.

It is independent of the number of ranks, the weight layout and wrappers. torch's ``get_state_dict`` is not used,
because it takes an optimizer step to create state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_mp.ranks.parallelism import is_dtensor, local_part
from hf_mp.trainer.checkpoints.loaded_state import innermost
from hf_mp.trainer.checkpoints.manifest import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


PREFIX = "optimizer/"


def extract_state(optimizer: Any, names: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of the state by ``optimizer/PARAMETER/KEY``, and the other values for JSON.

    ``names`` are the parameters of the model by name.
    """
    groups = _names_by_group(optimizer, names)
    if optimizer.state_dict().get("masters"):
        raise CheckpointError(
            "the FP32 masters are in a MasterWeightOptimizer and not in the model: use it through hf_mp.prepare or "
            "MixedPrecision(...).attach(model), or save optimizer.state_dict() with torch.save"
        )
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name in chain.from_iterable(groups):
        for key, value in optimizer.state.get(names[name], {}).items():
            if isinstance(value, Tensor):
                tensors[f"{PREFIX}{name}/{key}"] = _to_save(name, names[name], key, value).contiguous()
            else:
                values.setdefault(name, {})[key] = value
    settings = [
        {**{key: _without_tensor(value) for key, value in group.items()}, "params": group_names}
        for group, group_names in zip(optimizer.param_groups, groups, strict=True)
    ]
    return tensors, {"kind": type(innermost(optimizer)).__name__, "groups": settings, "values": values}


def allocate_state(
    optimizer: Any,
    names: Mapping[str, nn.Parameter],
    layout: Mapping[str, TensorStorageMetadata],
    plain: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Return empty tensors to load the state into, on the meshes of this run.

    ``layout`` is the metadata of the saved tensors, ``plain`` the other saved values.
    """
    groups = _names_by_group(optimizer, names)
    _check_same_optimizer(optimizer, groups, plain)
    optimized, offloaded = set(chain.from_iterable(groups)), _offloaded_state(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, stored in layout.items():
        if not name.startswith(PREFIX):
            continue
        parameter, key = _parameter_and_key(name)
        if parameter not in optimized:
            raise CheckpointError(
                f"the checkpoint has {key} of {parameter}, which the optimizer does not have: resume with the "
                "optimizer that was saved"
            )
        # Load offloaded state into its own memory: there may be no room for a second copy.
        room: Any = offloaded.get(names[parameter], {}).get(key)
        is_alike = room is not None and (room.view.dtype, room.view.shape) == (stored.properties.dtype, stored.size)
        tensors[name] = room.view if is_alike else _empty(parameter, names[parameter], stored)
    return tensors


def _check_same_optimizer(optimizer: Any, groups: Sequence[Sequence[str]], plain: Mapping[str, Any]) -> None:
    saved = [group["params"] for group in plain["groups"]]
    if [sorted(group) for group in groups] != [sorted(group) for group in saved]:
        raise CheckpointError(
            f"the optimizer was saved with groups of {[*map(len, saved)]} parameters, and this one has groups of "
            f"{[*map(len, groups)]}, or other parameters: make it from the same parameters in the same groups"
        )
    kind = type(innermost(optimizer)).__name__
    if kind != plain["kind"]:
        raise CheckpointError(
            f"the checkpoint has the state of {plain['kind']}, and the optimizer is {kind}: resume with the optimizer "
            "that was saved"
        )


def _offloaded_state(optimizer: Any) -> Mapping[nn.Parameter, Mapping[str, Any]]:
    while optimizer is not None and "rooms" not in vars(optimizer):
        optimizer = vars(optimizer).get("optimizer")
    return {} if optimizer is None else optimizer.rooms


def load_state(
    optimizer: Any, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain["values"].items()}
    for name, tensor in tensors.items():
        parameter, key = _parameter_and_key(name)
        entries.setdefault(parameter, {})[key] = tensor
    groups = _names_by_group(optimizer, names)
    # Hooks of wrappers and lean layouts expect torch's format, with numbers.
    numbers = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    settings = []
    for group_names, group, saved in zip(groups, optimizer.param_groups, plain["groups"], strict=True):
        values = {key: _with_type_of(group.get(key), value) for key, value in saved.items()}
        settings.append({**values, "params": [numbers[name] for name in group_names]})
    state = {number: entries[name] for name, number in numbers.items() if name in entries}
    optimizer.load_state_dict({"state": state, "param_groups": settings})


def _parameter_and_key(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix(PREFIX).rpartition("/")
    return parameter, key


def _names_by_group(optimizer: Any, names: Mapping[str, nn.Parameter]) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in names.items()}
    for number, group in enumerate(optimizer.param_groups):
        if unknown := [p for p in group["params"] if id(p) not in name_of]:
            raise CheckpointError(
                f"group {number} of the optimizer has a parameter of shape {tuple(unknown[0].shape)} that the model "
                "does not have: pass the model and the optimizer that train together"
            )
    return [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _to_save(name: str, like: Any, key: str, value: Any) -> Tensor:
    """Return ``value`` as a tensor that any number of ranks can load."""
    part = local_part(value)
    if hasattr(part, "__tensor_flatten__"):
        raise CheckpointError(
            f"{key} of {name} is a {type(part).__name__}, which safetensors does not know: use bitsandbytes' 8-bit "
            "optimizers, or save optimizer.state_dict() with torch.save"
        )
    if value.dim() == 0:
        return value.full_tensor() if is_dtensor(value) else value
    # Partial sums and factored moments have other placements than the parameter.
    is_sharded_alike = is_dtensor(value) and value.shape == like.shape and value.placements == like.placements
    if is_sharded_alike or not is_dtensor(like):
        return value
    raise CheckpointError(
        f"{key} of {name} has shape {tuple(value.shape)} on this rank, whose part of the parameter has "
        f"{tuple(local_part(like).shape)}: it cannot be cut for another number of ranks. Use an optimizer "
        "with state of its parameters' shapes (torch.optim.AdamW), or DDP"
    )


def _empty(name: str, like: Any, stored: TensorStorageMetadata) -> Tensor:
    """Return an empty tensor, sharded like the parameter ``like``."""
    dtype = stored.properties.dtype
    if is_dtensor(like) and stored.size:
        if stored.size == like.shape:
            return torch.empty_like(like, dtype=dtype)
        raise CheckpointError(
            f"a state of {name} has shape {tuple(stored.size)}, and the parameter {tuple(like.shape)} is sharded "
            "here: resume with the optimizer that was saved, and without FSDP2 if it was saved without"
        )
    # Optimizers create step counters on the CPU.
    return torch.empty(stored.size, dtype=dtype, device=like.device if stored.size else "cpu")


def _without_tensor(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _with_type_of(current: Any, value: Any) -> Any:
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
