"""Simulates one rank of many in torch's fake process group, and counts the bytes of its collectives."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_mp.kernels.nested import tensors_in
from hf_mp.memory.settings import TrainingSettings
from hf_mp.ranks.parallelism import check_heads, has_dtensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Collective:
    name: str  # all-gather, reduce-scatter, all-reduce, ...
    ranks: int
    dtype: str  # of the sent tensors
    within_node: bool  # whether all ranks of the group are on one machine
    sent_bytes: int = 0  # in a ring algorithm; received bytes are equal


class CommunicationRecorder(TorchDispatchMode):
    """Counts the traffic of collectives."""

    def __init__(self, node_size: int) -> None:
        super().__init__()
        self._node_size = node_size
        # Missing in builds of torch without distributed.
        from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

        self._ops, self._collectives = CollectiveOp, collective_ops - sync_ops
        self._sent: Counter[Collective] = Counter()  # bytes; the keys have none

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor's dispatch calls this mode again with local tensors.
        if has_dtensors(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func in self._collectives:
            self._count(func, result, args, kwargs or {})
        return result

    def _count(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        group = self._ops.get_process_group(func, args)
        ranks = group.size()
        nodes = {rank // self._node_size for rank in torch.distributed.get_process_group_ranks(group)}
        name, passes = _kind(func)
        tensor_bytes = self._ops.get_comm_tensor_size(func, result, args, kwargs)
        dtype = next((tensor.dtype for tensor in tensors_in(args)), None)
        one = Collective(name, ranks, str(dtype).removeprefix("torch."), within_node=len(nodes) == 1)
        # In a ring, each rank sends all parts except one.
        self._sent[one] += passes * tensor_bytes * (ranks - 1) // ranks

    def start(self) -> None:
        self._sent.clear()

    def collectives(self) -> tuple[Collective, ...]:
        """Return the traffic since :meth:`start`, most bytes first, without groups of one rank."""
        return tuple(replace(one, sent_bytes=sent) for one, sent in self._sent.most_common() if one.ranks > 1)


def _kind(func: Any) -> tuple[str, int]:
    """Return the name of a collective, and how often a ring algorithm sends its largest tensor."""
    name = func._schema.name.partition("::")[2]
    for key, kind in _KINDS.items():
        if key in name.replace("_", ""):
            return kind
    return name.strip("_"), 1


_KINDS = {
    "allgather": ("all-gather", 1),
    "reducescatter": ("reduce-scatter", 1),
    "alltoall": ("all-to-all", 1),
    "allreduce": ("all-reduce", 2),  # a reduce-scatter and an all-gather
}


def shard(model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """Apply FSDP2 to each block and to ``model``, as accelerate does; without a mesh do nothing."""
    if mesh is None:
        return model
    from torch.distributed.fsdp import fully_shard

    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh)
    return model


def under_ddp(forward: Any, *, layout_has_hook: bool) -> Any:
    """Wrap ``forward`` in DDP, with an all-reduce hook unless the weight layout has one."""
    ddp = DistributedDataParallel(forward, init_sync=False)
    if not layout_has_hook:
        ddp.register_comm_hook(None, lambda state, bucket: _all_reduce(bucket.buffer()))
    return ddp


def make_tensor_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Shard a model of fake tensors by its ``tp_plan``."""
    if not model.tp_plan:
        raise ValueError(
            f"parallel='tp' needs a model with a tp_plan in Transformers, and {type(model).__name__} has none: use "
            "'fsdp2', 'hsdp' or 'ddp'"
        )
    check_heads(model, ranks)
    with unset_fake_temporarily():  # a mesh needs real tensors
        config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=ranks))
    model.maybe_distribute_model(model, config, mesh)
    model.tie_weights()  # sharding replaced both names of a tied weight


def _all_reduce(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket as DDP does by default, which fails in a fake process group."""
    torch.distributed.all_reduce(gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


@contextlib.contextmanager
def one_rank_of(settings: TrainingSettings, device: torch.device) -> Iterator[DeviceMesh | None]:
    """Run as rank 0 of ``settings.ranks`` in a fake process group; yield FSDP2's mesh, or None."""
    if settings.ranks == 1:
        yield None
        return
    import torch.distributed as distributed

    if distributed.is_initialized():
        raise RuntimeError("this process is one of several already: plan other ranks in a process outside torchrun")
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # torch sets its own, which names the rank
        distributed.init_process_group("fake", rank=0, world_size=settings.ranks, store=distributed.HashStore())
        stack.callback(distributed.destroy_process_group)
        _patch_torch(device, lambda *args, **kwargs: stack.enter_context(mock.patch.object(*args, **kwargs)))
        yield make_mesh(settings)


def make_mesh(settings: TrainingSettings) -> DeviceMesh | None:
    """Create FSDP2's mesh, outside of a FakeTensorMode, or None."""
    from torch.distributed.device_mesh import init_device_mesh

    shapes = {"fsdp2": (settings.ranks,), "hsdp": (settings.ranks // settings.node_size, settings.node_size)}
    if (shape := shapes.get(settings.parallel)) is None:
        return None
    # FSDP2 shards over the last dimension.
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _patch_torch(device: torch.device, patch: Callable[..., object]) -> None:
    """Patch FSDP2 and DDP to run on fake tensors, which have no values."""
    from torch.distributed import Reducer, _functional_collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    # A fake process group supports only CPU meshes.
    patch(torch._C, "_get_accelerator", lambda check=None: torch.device("cpu"))
    patch(_fully_shard, "_get_device_from_mesh", lambda mesh: device)
    patch(_fsdp_param, "_chunk_with_empty", _chunk_of_first_rank)
    for name in ("wait_tensor", "_maybe_wrap_tensor"):  # each would allocate another tensor
        patch(_functional_collectives, name, lambda tensor: tensor)
    patch(Reducer, "_rebuild_buckets", lambda reducer: False)
    if device.type == "meta":  # in place of a GPU's streams and events, use the CPU's, which do nothing
        patch(torch, "meta", torch.cpu, create=True)
        patch(torch.cpu.Stream, "record_event", lambda stream, event=None: torch.cpu.Event())
        for name in ("stream_id", "device_index", "device_type"):  # read by FSDP2 since torch 2.15
            patch(torch.cpu.Stream, name, 0, create=True)
        patch(FSDPParamGroup, "_validate_no_meta_params", lambda group: None)


def _chunk_of_first_rank(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """Return the first of ``torch.chunk``: views for 1,024 ranks would take minutes."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // ranks))]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that Transformers does not split over devices, if declared."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
