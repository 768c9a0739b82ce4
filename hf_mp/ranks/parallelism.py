"""Detection and checks of DDP, FSDP2 and tensor parallelism of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.model_index import model_parameters, modules_of, optimizer_parameters


def is_distributed() -> bool:
    """Whether the process group has several processes."""
    return has_process_group() and torch.distributed.get_world_size() > 1


def get_world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return torch.distributed.get_world_size() if has_process_group() else 1


def get_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return torch.distributed.get_rank() if has_process_group() else 0


def has_process_group() -> bool:
    """Whether there is a process group, even of one process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_updates(optimizer: Any, model: nn.Module) -> None:
    """Raise a ValueError if ``optimizer`` has neither a parameter of ``model`` nor a DTensor (FSDP2)."""
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own or is_dtensor(parameter) for parameter in optimizer_parameters(optimizer)):
        raise ValueError(
            f"no parameter of this {type(optimizer).__name__} belongs to the attached {type(model).__name__}: make "
            "the optimizer from its parameters() (with FSDP2, after fully_shard, which puts shards in their places)"
        )


def mesh_groups(parameters: Iterable[Tensor]) -> list[torch.distributed.ProcessGroup]:
    """Return the process groups of all dimensions of the meshes of ``parameters``."""
    meshes: dict[int, Any] = {id(p.device_mesh): p.device_mesh for p in parameters if is_dtensor(p)}  # type: ignore[attr-defined]
    return list(dict.fromkeys(group for mesh in meshes.values() for group in mesh.get_all_groups()))


def is_dtensor(tensor: Tensor) -> bool:
    dtensors = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there are no DTensors
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def has_dtensors(types: Iterable[type]) -> bool:
    """Whether an op has DTensors: a dispatch mode that returns NotImplemented then receives the ops on shards."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and any(issubclass(one, dtensors.DTensor) for one in types)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor if type(tensor) is Tensor else local_part(tensor) for tensor in tensors]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 (``torch.distributed.fsdp.fully_shard``) shards a module of ``model``."""
    return next(fsdp_modules(model), None) is not None


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """Return the modules of ``model`` that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (module for module in modules_of(model) if fsdp is not None and isinstance(module, fsdp.FSDPModule))


@dataclass(frozen=True, eq=False)
class Parallelism:
    """Parallelism of one model, detected by :func:`detect_parallelism`."""

    ddp: DistributedDataParallel | None = None  # wrapper of the running forward
    fsdp: tuple[Any, ...] = ()  # modules sharded by FSDP2
    dtensors: tuple[Any, ...] = ()  # parameters that are DTensors
    is_fsdp1: bool = False
    is_tensor_parallel: bool = False  # matmuls read DTensors, which FSDP2 does not all-gather


NOT_DISTRIBUTED = Parallelism()


def detect_parallelism(model: nn.Module | None) -> Parallelism:
    """Detect the current parallelism of ``model``, which may change between calls; :data:`NOT_DISTRIBUTED` if none."""
    if model is None or not has_process_group():
        return NOT_DISTRIBUTED
    modules, parameters, fsdp = modules_of(model), model_parameters(model), tuple(fsdp_modules(model))
    # torch has no public API for the DDP wrapper of a module, a private one only in its forward.
    ddp: Any = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel._get_active_ddp_module()
    # FSDP1 marks parameters. During its forward the parameter slots hold plain views.
    is_fsdp1 = any(hasattr(p, "_fsdp_flattened") or not isinstance(p, nn.Parameter) for p in parameters)
    dtensors = tuple(filter(is_dtensor, parameters))
    return Parallelism(ddp, fsdp, dtensors, is_fsdp1, _is_tensor_parallel(modules, fsdp))


def _is_tensor_parallel(modules: Iterable[nn.Module], fsdp: Iterable[nn.Module]) -> bool:
    """Whether one of ``modules`` has DTensors and is not in a module that FSDP2 shards."""
    sharded = {
        module
        for module in modules
        if not vars(module).get("_is_fsdp_managed_module")  # set by fully_shard in all submodules
        and any(is_dtensor(parameter) for parameter in module._parameters.values() if parameter is not None)
    }
    # torch's composable replicate() makes FSDPModules too, but sets no mark.
    return bool(sharded) and not sharded <= {inner for module in fsdp for inner in module.modules()}


def check_parallelism(model: nn.Module, parallelism: Parallelism) -> None:
    """Raise a ValueError if mixed precision does not support the parallelism of ``model``."""
    if parallelism.is_fsdp1:
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
    # FSDP2 places parameters as (Shard,) or, hybrid, as (Replicate, Shard). Others are tensor parallel.
    is_fsdp = len(placements) == 1 or (len(placements) == 2 and placements[0].is_replicate())
    # DDP of a tensor parallel model raises in torch.
    is_tp_alone = not parallelism.fsdp and len(placements) == 1
    if not (is_tp_alone if parallelism.is_tensor_parallel else is_fsdp):
        raise ValueError(
            f"{_name_of(parameter, model)} is placed as {tuple(placements)}: tensor and expert parallelism work "
            "alone, over a mesh of one dimension; leave FSDP2 and other dimensions out, or use FSDP2 alone"
        )


def _check_masters(model: nn.Module, parallelism: Parallelism) -> None:
    """Raise a ValueError if DDP or FSDP2 has trained 16-bit parameters of ``model`` without masters."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if not is_ddp and not parallelism.fsdp:
        return
    wrapper = "DistributedDataParallel" if is_ddp else "fully_shard"
    for parameter in model_parameters(model):
        # A split parameter is its own master.
        has_no_master = parameter.dtype in LOWER_PRECISION_DTYPES and not hasattr(parameter, "remainder_bits")
        if has_no_master and parameter.requires_grad:
            raise ValueError(
                f"{_name_of(parameter, model)} is {parameter.dtype} and {wrapper} holds it already, so it cannot be "
                f"given an FP32 master: attach mixed precision to the model before {wrapper}, or load it in FP32 "
                "(dtype=torch.float32)"
            )


def check_heads(model: Any, ranks: int) -> None:
    """Raise a ValueError if the number of tensor parallel ranks does not divide the heads of a Transformers model."""
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
