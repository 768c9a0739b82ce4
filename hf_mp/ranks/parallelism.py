"""How a model is spread over processes: looked up in one walk, for all who decide by it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.model_walk import model_parameters, modules_of, optimizer_parameters


def is_distributed() -> bool:
    """Whether this process is one of several."""
    return has_process_group() and torch.distributed.get_world_size() > 1


def get_world_size() -> int:
    """The number of processes; 1 without a process group."""
    return torch.distributed.get_world_size() if has_process_group() else 1


def get_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return torch.distributed.get_rank() if has_process_group() else 0


def has_process_group() -> bool:
    """Whether there is a process group, also of one process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_updates(optimizer: Any, model: nn.Module) -> None:
    """Raise a ValueError if ``optimizer`` holds neither a parameter of ``model`` nor a DTensor, such as FSDP2's."""
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own or is_dtensor(parameter) for parameter in optimizer_parameters(optimizer)):
        raise ValueError(
            f"no parameter of this {type(optimizer).__name__} belongs to the attached {type(model).__name__}: make "
            "the optimizer from its parameters() (with FSDP2, after fully_shard, which puts shards in their places)"
        )


def mesh_groups(parameters: Iterable[Tensor]) -> list[torch.distributed.ProcessGroup]:
    """The process groups of the dimensions of the meshes over which ``parameters`` are spread."""
    groups: list[torch.distributed.ProcessGroup] = []
    for mesh in {id(p.device_mesh): p.device_mesh for p in parameters if is_dtensor(p)}.values():  # type: ignore[attr-defined]
        groups += [group for group in mesh.get_all_groups() if group not in groups]
    return groups


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is spread over processes."""
    dtensors = sys.modules.get("torch.distributed.tensor")  # not imported: there is none
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def has_dtensors(types: Iterable[type]) -> bool:
    """Whether an op takes DTensors: a dispatch mode that leaves it to them sees the ops on shards, and collectives."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and any(issubclass(one, dtensors.DTensor) for one in types)


def local_part(tensor: Tensor) -> Tensor:
    """The shard of ``tensor`` that this process holds; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """:func:`local_part` of each."""
    return [tensor if type(tensor) is Tensor else local_part(tensor) for tensor in tensors]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 (``torch.distributed.fsdp.fully_shard``) shards ``model`` or a part of it."""
    return next(fsdp_modules(model), None) is not None


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """The parts of ``model`` that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (module for module in modules_of(model) if fsdp is not None and isinstance(module, fsdp.FSDPModule))


@dataclass(frozen=True, eq=False)
class Parallelism:
    """How one model is spread over processes, as :func:`parallelism_of` finds it."""

    ddp: DistributedDataParallel | None = None  # in which a forward runs now
    fsdp: tuple[Any, ...] = ()  # the modules that FSDP2 shards
    dtensors: tuple[Any, ...] = ()  # the parameters that are DTensors
    # Whether FSDP1 holds the model, also while a forward runs, when it shows views in the places of parameters.
    is_flattened: bool = False
    # Whether products compute with DTensors: the model has some that FSDP2 does not make whole before.
    is_tensor_parallel: bool = False


ALONE = Parallelism()


def parallelism_of(model: nn.Module | None) -> Parallelism:
    """How ``model`` is spread now: DDP and FSDP may come at any time. :data:`ALONE` without a process group."""
    if model is None or not has_process_group():
        return ALONE
    modules, parameters, fsdp = modules_of(model), model_parameters(model), tuple(fsdp_modules(model))
    # The DDP around a model is known to nobody but torch, and only while its forward runs.
    ddp: Any = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel._get_active_ddp_module()
    # FSDP1's own mark. While its forward runs, plain views lie in the places of parameters.
    is_flattened = any(hasattr(p, "_fsdp_flattened") or not isinstance(p, nn.Parameter) for p in parameters)
    dtensors = tuple(filter(is_dtensor, parameters))
    return Parallelism(ddp, fsdp, dtensors, is_flattened, _is_tensor_parallel(modules, fsdp))


def _is_tensor_parallel(modules: Iterable[nn.Module], fsdp: Iterable[nn.Module]) -> bool:
    """Whether one of ``modules`` has DTensors, and is not inside of those that FSDP2 shards."""
    spread = {
        module
        for module in modules
        if not vars(module).get("_is_fsdp_managed_module")  # fully_shard's mark, also where it wraps from outside
        and any(is_dtensor(parameter) for parameter in module._parameters.values() if parameter is not None)
    }
    # torch's composable replicate(), an FSDPModule too, leaves no mark.
    return bool(spread) and not spread <= {inner for module in fsdp for inner in module.modules()}


def check_parallelism(model: nn.Module, parallelism: Parallelism) -> None:
    """Raise a ValueError where ``model`` is spread over processes in a way that mixed precision cannot follow."""
    if parallelism.is_flattened:
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) joins weights into flat parameters, which hf_mp cannot give 16-bit "
            "copies: use FSDP2 (fsdp_version 2, torch.distributed.fsdp.fully_shard)"
        )
    for module in parallelism.fsdp:
        policy = module._get_fsdp_state()._mp_policy
        if not {policy.param_dtype, policy.reduce_dtype} <= {None, torch.float32}:
            raise ValueError(
                f"fully_shard(mp_policy={policy}) is a mixed precision of FSDP's own: leave mp_policy "
                "out (DistributedConfig: fsdp_mixed_precision), so that FP32 masters are gathered and FP32 gradients "
                "reduced"
            )
    if parallelism.is_tensor_parallel:
        check_heads(model, parallelism.dtensors[0].device_mesh.size())
    for parameter in parallelism.dtensors:
        _check_dtensor(parameter, parallelism, model)
    _check_masters(model, parallelism)


def _check_dtensor(parameter: Any, parallelism: Parallelism, model: nn.Module) -> None:
    """Raise a ValueError for tensor parallelism together with FSDP2, or over a mesh of several dimensions."""
    placements = parameter.placements
    # (Shard,) is FSDP, (Replicate, Shard) its hybrid form; anything else is (also) tensor parallelism.
    is_hybrid = len(placements) == 2 and placements[0].is_replicate()
    # torch refuses DistributedDataParallel around a tensor parallel model itself.
    is_tp_with_fsdp = parallelism.is_tensor_parallel and bool(parallelism.fsdp)
    if is_tp_with_fsdp or (len(placements) > 1 and (parallelism.is_tensor_parallel or not is_hybrid)):
        raise ValueError(
            f"{_name_of(parameter, model)} is placed as {tuple(placements)}: tensor and expert parallelism work "
            "alone, over a mesh of one dimension; leave FSDP2 and other dimensions out, or use FSDP2 alone"
        )


def _check_masters(model: nn.Module, parallelism: Parallelism) -> None:
    """Raise a ValueError where DDP or FSDP2 holds trained parameters of ``model`` in 16 bits, and nobody the rest."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if not is_ddp and not parallelism.fsdp:
        return
    wrapper = "DistributedDataParallel" if is_ddp else "fully_shard"
    for parameter in model_parameters(model):
        # A split parameter has its own master.
        is_narrow = parameter.dtype in LOWER_PRECISION_DTYPES and not hasattr(parameter, "remainder_bits")
        if is_narrow and parameter.requires_grad:
            raise ValueError(
                f"{_name_of(parameter, model)} is {parameter.dtype} and {wrapper} holds it already, so it cannot be "
                f"given an FP32 master: attach mixed precision to the model before {wrapper}, or load it in FP32 "
                "(dtype=torch.float32)"
            )


def check_heads(model: Any, ranks: int) -> None:
    """Raise a ValueError if so many tensor parallel ranks cannot share the heads of a model of Transformers."""
    config = getattr(model, "config", None)
    read_text_config = getattr(config, "get_text_config", None)
    heads = 0 if read_text_config is None else getattr(read_text_config(), "num_key_value_heads", None) or 0
    if heads % ranks:
        raise ValueError(
            f"ranks={ranks} cannot share the {heads} key and value heads of {type(model).__name__} evenly: use a "
            f"number of ranks that divides {heads}"
        )


def _name_of(parameter: Tensor, model: nn.Module) -> str:
    return next(name for name, one in model.named_parameters() if one is parameter)
