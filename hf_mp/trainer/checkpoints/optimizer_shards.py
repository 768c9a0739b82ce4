"""The state of an optimizer by the names of its parameters: tensors for shards, plain values for JSON.

What is saved does not depend on the number of ranks, the memory layout or the wrapper that the optimizer ran with:
moments are saved as whole FP32 tensors, as the weights are, and sharded by the mesh that loads them.
torch's ``get_state_dict`` is not used: it takes a step to make the state that it loads into.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The tensors of an optimizer's state by ``optimizer/PARAMETER/KEY``, and all other values, for JSON.

    Args:
        optimizer: of one model's parameters.
        names: the model's parameters.

    Raises:
        CheckpointError: for state that cannot be split over other ranks, FP32 masters that a bare
            :class:`hf_mp.MasterWeightOptimizer` holds, and parameters of another model.
    """
    groups = _by_group(optimizer, names)
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
                tensors[f"{PREFIX}{name}/{key}"] = _whole(name, names[name], key, value).contiguous()
            else:
                values.setdefault(name, {})[key] = value
    settings = []
    for group, owned in zip(optimizer.param_groups, groups, strict=True):
        settings.append({**{key: _plain(value) for key, value in group.items()}, "params": owned})
    return tensors, {"kind": type(innermost(optimizer)).__name__, "groups": settings, "values": values}


def allocate_state(
    optimizer: Any,
    names: Mapping[str, nn.Parameter],
    layout: Mapping[str, TensorStorageMetadata],
    plain: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Empty tensors for a state of :func:`extract_state`, on the meshes of this run, by the same names.

    Raises:
        CheckpointError: if the state is of other parameters, or the parameters were in other groups.
    """
    here, saved = _by_group(optimizer, names), [group["params"] for group in plain["groups"]]
    if [sorted(group) for group in here] != [sorted(group) for group in saved]:
        raise CheckpointError(
            f"the optimizer was saved with groups of {[*map(len, saved)]} parameters, and this one has groups of "
            f"{[*map(len, here)]}, or other parameters: make it from the same parameters in the same groups"
        )
    if (kind := type(innermost(optimizer)).__name__) != plain["kind"]:
        raise CheckpointError(
            f"the checkpoint has the state of {plain['kind']}, and the optimizer is {kind}: resume with the optimizer "
            "that was saved"
        )
    owned, found, rooms = set(chain.from_iterable(here)), dict[str, Tensor](), _rooms_of(optimizer)
    for name, stored in layout.items():
        if not name.startswith(PREFIX):
            continue
        parameter, key = _parameter_and_key(name)
        if parameter not in owned:
            raise CheckpointError(
                f"the checkpoint has {key} of {parameter}, which the optimizer does not have: resume with the "
                "optimizer that was saved"
            )
        # With offload, the state is read where it stays: memory for a second one may not be there.
        view = getattr(rooms.get(names[parameter], {}).get(key), "view", None)
        if view is None or (stored.properties.dtype, stored.size) != (view.dtype, view.shape):
            view = _empty(parameter, names[parameter], stored)
        found[name] = view
    return found


def _rooms_of(optimizer: Any) -> Mapping[nn.Parameter, Mapping[str, Any]]:
    """The places in host memory of the state of an optimizer with offload, by parameter and key; empty without."""
    while optimizer is not None and "rooms" not in vars(optimizer):
        optimizer = vars(optimizer).get("optimizer")
    return {} if optimizer is None else optimizer.rooms


def load_state(
    optimizer: Any, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    """Load into ``optimizer`` the results of :func:`allocate_state`, which a checkpoint has filled, and ``plain``."""
    entries: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain["values"].items()}
    for name, tensor in tensors.items():
        parameter, key = _parameter_and_key(name)
        entries.setdefault(parameter, {})[key] = tensor
    groups = _by_group(optimizer, names)
    # By numbers, which is torch's own format: hooks of wrappers and of lean layouts then see what they know.
    numbers = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    settings = []
    for owned, group, saved in zip(groups, optimizer.param_groups, plain["groups"], strict=True):
        kept = {key: _like(group.get(key), value) for key, value in saved.items()}
        settings.append({**kept, "params": [numbers[name] for name in owned]})
    state = {number: entries[name] for name, number in numbers.items() if name in entries}
    optimizer.load_state_dict({"state": state, "param_groups": settings})


def _parameter_and_key(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix(PREFIX).rpartition("/")
    return parameter, key


def _by_group(optimizer: Any, names: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """The names of the parameters in each group of an optimizer; they are the model's own."""
    known = {id(parameter): name for name, parameter in names.items()}
    for number, group in enumerate(optimizer.param_groups):
        if unknown := [p for p in group["params"] if id(p) not in known]:
            raise CheckpointError(
                f"group {number} of the optimizer has a parameter of shape {tuple(unknown[0].shape)} that the model "
                "does not have: pass the model and the optimizer that train together"
            )
    return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _whole(name: str, like: Any, key: str, value: Any) -> Tensor:
    """``value`` as it is saved: on a mesh, if the parameter is."""
    if hasattr(part := local_part(value), "__tensor_flatten__"):
        raise CheckpointError(
            f"{key} of {name} is a {type(part).__name__}, which safetensors does not know: use bitsandbytes' 8-bit "
            "optimizers, or save optimizer.state_dict() with torch.save"
        )
    if not value.dim():
        return value.full_tensor() if is_dtensor(value) else value
    # A partial sum, or one that is sharded otherwise (factored moments), would be split wrongly.
    is_cut_alike = is_dtensor(value) and value.shape == like.shape and value.placements == like.placements
    if is_cut_alike or not is_dtensor(like):
        return value
    raise CheckpointError(
        f"{key} of {name} has shape {tuple(value.shape)} on this rank, whose part of the parameter has "
        f"{tuple(local_part(like).shape)}: it cannot be cut for another number of ranks. Use an optimizer "
        "with state of its parameters' shapes (torch.optim.AdamW), or DDP"
    )


def _empty(name: str, like: Any, stored: TensorStorageMetadata) -> Tensor:
    """A tensor to load a state of ``name`` into, sharded as its parameter; a CheckpointError for another shape."""
    dtype = stored.properties.dtype
    if is_dtensor(like) and stored.size:
        if stored.size == like.shape:
            return torch.empty_like(like, dtype=dtype)
        raise CheckpointError(
            f"a state of {name} has shape {tuple(stored.size)}, and the parameter {tuple(like.shape)} is sharded "
            "here: resume with the optimizer that was saved, and without FSDP2 if it was saved without"
        )
    # A counter stays on the CPU, as optimizers make it, until they move it themselves.
    return torch.empty(stored.size, dtype=dtype, device=like.device if stored.size else "cpu")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _like(current: Any, value: Any) -> Any:
    """``value`` from JSON, as the type that ``current`` has."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
