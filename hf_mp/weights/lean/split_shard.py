"""``SplitShard``: a parameter that FSDP2 shards in 16 bits; each rank has the rest of its part's FP32 master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_mp.kernels.split import split
from hf_mp.policy import LOWER_PRECISION_DTYPES
from hf_mp.weights.lean.outside_reads import stores_16_bits
from hf_mp.weights.lean.split_parameter import (
    SplitParameter,
    become_split,
    master_value,
    remainder_where_equal,
    unscaled,
)
from hf_mp.weights.ranks.wire import Arrivals, fsdp_groups

Place = tuple[nn.Module, str]


class SplitShard(DTensor):
    """A sharded parameter in FP16/BF16 whose part on this rank is a :class:`SplitParameter`, ``local``.

    FSDP gathers the 16 bits as they are. What it reduces stays scaled in ``local`` until the update; ``.grad`` gives it
    in FP32 and unscaled, as that of a split parameter, and None while a backward runs.
    """

    local: SplitParameter
    arrivals: Arrivals

    def master(self) -> DTensor:
        """The FP32 master weight."""
        return with_part(self, master_value(self.local))

    @property
    def grad(self) -> Tensor | None:
        if self.arrivals.are_open():  # FSDP would add to it what is scaled
            return None
        gradient = self.local.grad
        return None if gradient is None else with_part(self, gradient)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is None:
            self.local.grad = None
            return
        values = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not self.arrivals.are_open():
            self.local.grad = values
        elif not self.local.take_scaled_gradient(values.to(self.dtype), self.arrivals.inverse):
            self.local.grad = unscaled(values, self.arrivals.inverse, like=self.local)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """As ``Tensor.copy_``; the bits of an FP32 ``source`` are kept."""
        if not isinstance(source, DTensor):
            return super().copy_(source, non_blocking)
        self.local.copy_(source.redistribute(self.device_mesh, self.placements).to_local(), non_blocking)
        return self


def split_shards(model: nn.Module, dtype: torch.dtype, before: dict[Place, SplitParameter], arrivals: Arrivals) -> None:
    """Split what FSDP2 shards of ``model``, in ``dtype``, in place.

    ``before`` has the split parameters of which it made 16-bit shards, and is emptied.

    Raises:
        ValueError: for what cannot be split, or too late.
    """
    if any(one.offload_to_cpu for one in _trained(model)):
        raise ValueError(
            "lean layouts take gradients on the device that computes them, and fully_shard(offload_policy="
            "CPUOffloadPolicy()) brings them to the CPU: leave it out, or use a default layout (fp16, bf16)"
        )
    if any(one.sharded_param.dtype is torch.float32 for one in _trained(model)):
        _lower(model, dtype)
    for one in _trained(model):
        shard, place = one.sharded_param, (one._module_info.module, one._module_info.param_name)
        if isinstance(shard, SplitShard):
            continue
        if (remainder := shard.__dict__.pop("remainder_bits", None)) is None:
            remainder = _remainder_of(before.get(place), one)
        local = become_split(nn.Parameter(shard._local_tensor, shard.requires_grad), remainder)
        local.is_saved_in_full, local.device_mesh = True, shard.device_mesh  # type: ignore[attr-defined]
        shard.__class__ = SplitShard
        shard.local, shard.arrivals = local, arrivals
    before.clear()


def _trained(model: nn.Module) -> Iterator[Any]:
    """FSDP's records of the trained floating parameters."""
    for _, group in fsdp_groups(model):
        for one in group.fsdp_params:
            if one.sharded_param.requires_grad and one.sharded_param.is_floating_point():
                yield one


@stores_16_bits
def _remainder_of(whole: SplitParameter | None, one: Any) -> Tensor:
    local, name = one.sharded_param._local_tensor, one._param_fqn or one._module_info.param_name
    if whole is None or whole.is_meta or local.dtype not in LOWER_PRECISION_DTYPES:
        raise ValueError(
            f"{name} is sharded in {local.dtype} and its FP32 value is lost: attach mixed precision to the model "
            "before fully_shard with weights in place (cpu_ram_efficient_loading=False), or after it in FP32"
        )
    size, rank, dim = one.mesh_info.shard_mesh_size, one.mesh_info.shard_mesh_rank, one.fsdp_placement.dim

    def mine(values: Tensor) -> Tensor:  # this one of values.chunk(size, dim), without a view for each rank
        whole_size = values.size(dim)
        most = -(-whole_size // size)
        first = min(rank * most, whole_size)
        return values.narrow(dim, first, min(most, whole_size - first)).to(local.device)

    return remainder_where_equal(mine(whole.remainder_bits), local, mine(whole.detach()))


@torch.no_grad()
def _lower(model: nn.Module, dtype: torch.dtype) -> None:
    if any(module._get_fsdp_state()._is_root is not None for module, _ in fsdp_groups(model)):
        raise ValueError(
            "this model was sharded in FP32 and has run a forward, after which FSDP cannot change the dtype of its "
            "shards: attach a lean layout before the first forward"
        )
    remainders: dict[int, Tensor] = {}

    def lower(tensor: Tensor) -> Tensor:
        is_master = isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if not is_master or tensor.dtype is not torch.float32:
            return tensor
        halves = split(tensor.to_local(), dtype)  # type: ignore[attr-defined]
        remainders[id(tensor)] = halves.remainder
        return with_part(tensor, halves.working)

    model._apply(lower)
    for parameter in model.parameters():
        if id(parameter) in remainders:
            parameter.remainder_bits = remainders[id(parameter)]  # type: ignore[attr-defined]


def with_part(tensor: Any, local: Tensor) -> DTensor:
    """As ``tensor``, of which this rank's part is ``local``."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def unsplit_shards(model: nn.Module) -> None:
    """Make the split shards of ``model`` ordinary FP32 ones again, in place; gradients are dropped."""
    shards = [parameter for parameter in model.parameters() if isinstance(parameter, SplitShard)]
    if not shards:
        return
    for shard in shards:
        shard.grad = None
    model._apply(lambda tensor: tensor.master() if isinstance(tensor, SplitShard) else tensor)
    for _, group in fsdp_groups(model):
        for one in group.fsdp_params:
            one.all_gather_outputs = []
            vars(one).pop("_unsharded_param", None)
        group._init_mp_dtypes()
