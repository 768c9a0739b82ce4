"""One rank of many, on one machine: a model spread as over real ranks, and the bytes that its collectives move.

torch's fake process group answers every collective at once, so that the code of one rank runs as it is.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """What one rank moves in one step by one kind of collective."""

    name: str  # all-gather, reduce-scatter, all-reduce, ...
    ranks: int  # that take part
    dtype: str  # of what travels
    within_node: bool  # whether all of these ranks are on one machine
    sent_bytes: int  # by a ring, which receives as much as it sends


class CommunicationRecorder(TorchDispatchMode):
    """Counts what the collectives of this rank move while it is active, on a real process group or a fake one."""

    def __init__(self, node_size: int) -> None:
        super().__init__()
        self._node_size = node_size
        # Imported here: not in every build of torch.
        from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

        self._ops, self._collectives = CollectiveOp, collective_ops - sync_ops
        self._found: Counter[tuple[str, int, str, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor's own dispatch comes first, and calls the ops of its local part, which are counted.
        if has_dtensors(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func in self._collectives:
            group = self._ops.get_process_group(func, args)
            ranks = group.size()
            nodes = {rank // self._node_size for rank in torch.distributed.get_process_group_ranks(group)}
            name, passes = _kind(func)
            tensor_bytes = self._ops.get_comm_tensor_size(func, result, args, kwargs or {})
            dtype = next((tensor.dtype for tensor in tensors_in(args)), None)
            key = name, ranks, str(dtype).removeprefix("torch."), len(nodes) == 1
            # A ring passes on all parts but its own.
            self._found[key] += passes * tensor_bytes * (ranks - 1) // ranks
        return result

    def start(self) -> None:
        """Count anew."""
        self._found.clear()

    def collectives(self) -> tuple[Collective, ...]:
        """What was counted since :meth:`start`, most bytes first."""
        # A group of one sends nothing.
        return tuple(Collective(*key, sent) for key, sent in self._found.most_common() if key[1] > 1)


def _kind(func: Any) -> tuple[str, int]:
    """The name of a collective, and how often a ring sends the largest tensor of it, but for one rank's part."""
    name = func._schema.name.partition("::")[2]
    return next((found for key, found in _KINDS.items() if key in name.replace("_", "")), (name.strip("_"), 1))


_KINDS = {
    "allgather": ("all-gather", 1),
    "reducescatter": ("reduce-scatter", 1),
    "alltoall": ("all-to-all", 1),
    "allreduce": ("all-reduce", 2),  # a reduce-scatter and an all-gather
}


def shard(model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """``model`` under FSDP2, block by block, as accelerate's plugin wraps it; without a mesh as it is."""
    if mesh is None:
        return model
    from torch.distributed.fsdp import fully_shard

    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh)
    return model


def under_ddp(forward: Any, *, layout_has_hook: bool) -> Any:
    """``forward`` under DDP. A hook all-reduces, unless the layout registers its own: torch takes only one."""
    ddp = DistributedDataParallel(forward, init_sync=False)
    if not layout_has_hook:
        ddp.register_comm_hook(None, lambda state, bucket: _all_reduce(bucket.buffer()))
    return ddp


def make_tensor_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Spread ``model``, of fake tensors, as ``from_pretrained(..., tp_plan="auto")`` does before it loads weights.

    Raises:
        ValueError: for a model without a plan, or with heads that so many ranks cannot share.
    """
    name = type(model).__name__
    if not model.tp_plan:
        raise ValueError(
            f"parallel='tp' needs a model with a tp_plan in Transformers, and {name} has none: use 'fsdp2', 'hsdp' or "
            "'ddp'"
        )
    check_heads(model, ranks)
    with unset_fake_temporarily():  # a mesh is made of real tensors
        config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=ranks))
    model.maybe_distribute_model(model, config, mesh)
    model.tie_weights()  # each of two tied weights was split by itself


def _all_reduce(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """What DDP does by itself on a real process group: a fake one gives no results."""
    torch.distributed.all_reduce(gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


@contextlib.contextmanager
def one_rank_of(settings: TrainingSettings, device: torch.device) -> Iterator[DeviceMesh | None]:
    """Be rank 0 of ``settings.ranks``, of which no other exists, on ``device``.

    Yields:
        The mesh that FSDP2 shards over, None without it.

    Raises:
        RuntimeError: where this process is one of several that do exist.
    """
    if settings.ranks == 1:
        yield None
        return
    import torch.distributed as distributed

    if distributed.is_initialized():
        raise RuntimeError("this process is one of several already: plan other ranks in a process outside torchrun")
    with contextlib.ExitStack() as stack:
        replace = lambda *args, **kwargs: stack.enter_context(mock.patch.object(*args, **kwargs))  # noqa: E731
        replace(sys, "excepthook", sys.excepthook)  # torch puts its own there, which names the rank
        distributed.init_process_group("fake", rank=0, world_size=settings.ranks, store=distributed.HashStore())
        stack.callback(distributed.destroy_process_group)
        _let_torch_accept(device, replace)
        yield make_mesh(settings)


def make_mesh(settings: TrainingSettings) -> DeviceMesh | None:
    """The mesh that FSDP2 shards over, None without it; a ``FakeTensorMode`` cannot make one."""
    from torch.distributed.device_mesh import init_device_mesh

    shapes = {"fsdp2": (settings.ranks,), "hsdp": (settings.ranks // settings.node_size, settings.node_size)}
    if (shape := shapes.get(settings.parallel)) is None:
        return None
    # FSDP2 shards over the last dimension, and replicates over one before it.
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _let_torch_accept(device: torch.device, replace: Callable[..., object]) -> None:
    """Have FSDP2 and DDP run on fake tensors: with ``device`` for that of the mesh, without a look at any value."""
    from torch.distributed import Reducer, _functional_collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    # A fake process group has a mesh of CPUs alone, also on a machine with GPUs, which Transformers asks torch for.
    replace(torch._C, "_get_accelerator", lambda check=None: torch.device("cpu"))
    replace(_fully_shard, "_get_device_from_mesh", lambda mesh: device)
    # Views for all ranks, of which one is read, take minutes for 1,024.
    replace(_fsdp_param, "_chunk_with_empty", _chunk_of_first_rank)
    for name in ("wait_tensor", "_maybe_wrap_tensor"):  # without memory, each makes another
        replace(_functional_collectives, name, lambda tensor: tensor)
    replace(Reducer, "_rebuild_buckets", lambda reducer: False)
    if device.type == "meta":  # it stands for a GPU: streams and events are the CPU's, which do nothing
        replace(torch, "meta", torch.cpu, create=True)
        replace(torch.cpu.Stream, "record_event", lambda stream, event=None: torch.cpu.Event())
        for name in ("stream_id", "device_index", "device_type"):  # which FSDP2 reads from torch 2.15 on
            replace(torch.cpu.Stream, name, 0, create=True)
        replace(FSDPParamGroup, "_validate_no_meta_params", lambda group: None)


def _chunk_of_first_rank(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    """The first of ``torch.chunk``: rank 0 reads no other, and a view for each of 1,024 ranks takes minutes."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // ranks))]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that Transformers would not split over devices, in order; without any, none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
