"""What travels between processes: weights rounded to 16 bits, gradients in FP32, or scaled in 16 bits.

FSDP2 accepts a custom all-gather and reduce-scatter (``FSDPModule.set_custom_all_gather``,
``set_custom_reduce_scatter``). Ours change what is sent and nothing that FSDP sees: shards, gathered parameters and
``.grad`` stay FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_mp.models.routers import is_fp32_router
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import fsdp_modules
from hf_mp.scaling.scalers import LossScaler


class Runtime(Protocol):
    """What knows the loss scale."""

    scaler: LossScaler[Any]

    def loss_scale_on(self, device: torch.device) -> Tensor | None:
        """S, FP32 of shape (1,); None where nothing is scaled."""


class RoundedGather:
    """An all-gather of FP32 shards that sends them rounded to ``dtype``, and casts what it receives to FP32.

    The forward rounds weights of products to ``dtype`` anyway. Parameters with less than two dimensions (norms,
    biases), those in ``kept`` and those of routers travel in FP32: ops in FP32 read them.
    """

    def __init__(self, group: Any, dtype: torch.dtype, kept: Iterable[nn.Module]) -> None:
        self.before = group._all_gather_comm
        self.allocate = self.before.allocate  # which FSDP asks for as well
        in_fp32 = {module for one in kept for module in one.modules()}
        self._parameters = group.fsdp_params
        self._dtypes = []  # in which each travels
        for one in group.fsdp_params:
            module = one._module_info.module
            stays = len(one._orig_size) < 2 or module in in_fp32 or is_fp32_router(module)
            self._dtypes.append(torch.float32 if stays else dtype)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: torch.distributed.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather ``input_tensor``, one dimension, into ``output_tensor``, as ``torch.distributed`` does.

        Ordered with the stream that is current, like any collective; ``async_op`` is for what is not FP32 throughout.
        """
        # FSDP2 gathers a group of several dtypes as bytes, of which we could not tell the parts apart: frozen FP16
        # weights are among them, or all in 16 bits.
        if output_tensor.dtype is not torch.float32 or set(self._dtypes) == {torch.float32}:
            return self.before(output_tensor, input_tensor, group, async_op)
        sizes = [one._sharded_param_data.numel() for one in self._parameters]
        if sum(sizes) != input_tensor.numel():  # resharded after forward to fewer ranks
            sizes = [one._sharded_post_forward_param_data.numel() for one in self._parameters]
        # As bytes: one message for both dtypes, since a second one costs a launch a block.
        lengths = [size * dtype.itemsize for size, dtype in zip(sizes, self._dtypes, strict=True)]
        aligned = [-(-length // 4) * 4 for length in lengths]  # as FP32 wants it in what follows
        ranks = group.size()
        sent = self.allocate((ranks * sum(aligned),), dtype=torch.uint8, device=input_tensor.device)
        by_rank = sent.view(ranks, -1)

        def parts(of: Tensor) -> list[Tensor]:
            pieces = zip(of.split(aligned, -1), lengths, self._dtypes, strict=True)
            return [piece[..., :length].view(dtype) for piece, length, dtype in pieces]

        mine = by_rank[group.rank()]
        torch._foreach_copy_(parts(mine), list(input_tensor.split(sizes)))
        self.before(sent, mine, group, False)
        torch._foreach_copy_(list(output_tensor.view(ranks, -1).split(sizes, -1)), parts(by_rank))


class ScaledReduceScatter:
    """A reduce-scatter of FP32 gradients that sends them times S in 16 bits; what it gives is FP32 and unscaled."""

    def __init__(self, group: Any, policy: PrecisionPolicy, runtime: Runtime) -> None:
        self.before, self._policy, self._runtime = group._reduce_scatter_comm, policy, runtime
        self.allocate = self.before.allocate  # which FSDP asks for as well

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: torch.distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor``, one dimension, into this rank's part of it, ``output_tensor``."""
        averages, wire = op == torch.distributed.ReduceOp.AVG, self._policy.wire
        factor = self._runtime.loss_scale_on(input_tensor.device)
        sums = averages or op == torch.distributed.ReduceOp.SUM
        if wire is torch.float32 or input_tensor.dtype is not torch.float32 or not sums:
            self.before(output_tensor, input_tensor, group, op, False)
            return
        sent = (input_tensor if factor is None else input_tensor * factor).to(wire)
        sum_parts(output_tensor, sent, group)
        if averages:
            output_tensor.div_(group.size())
        if factor is not None:
            output_tensor.div_(factor)


def sum_parts(output: Tensor, sent: Tensor, group: torch.distributed.ProcessGroup) -> None:
    """Sum the ranks' ``sent`` of 16 bits, one dimension, and write this rank's part of the sum to ``output``, FP32.

    The sums are made where the parts arrive: as many bytes as a reduce-scatter in 16 bits, and no rounding in between.
    """
    arrived = torch.empty_like(sent)
    torch.distributed.all_to_all_single(arrived, sent, group=group)
    torch.sum(arrived.view(group.size(), -1), 0, dtype=torch.float32, out=output)


def fsdp_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """FSDP2's modules in ``model``, each with its group of parameters; without those that have several (meshes)."""
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        # Private, as is all that tells which parameters FSDP2 sends together.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch < 2.13 has one
        if len(groups) == 1 and groups[0] is not None:
            yield module, groups[0]


def send_in_16_bits(model: nn.Module, policy: PrecisionPolicy, runtime: Runtime, kept: Iterable[nn.Module]) -> None:
    """Have FSDP2 gather weights of ``model`` in 16 bits, and reduce gradients as ``policy`` says.

    ``kept`` are modules whose parameters, those of their children included, travel in FP32. A communication that was
    set before (``set_custom_all_gather``, ``set_symm_mem_for_comm``) stays.
    """
    for module, group in fsdp_groups(model):
        # By its name, because torch exports neither default class; anything else is somebody's own choice.
        if type(group._all_gather_comm).__name__ == "DefaultAllGather":
            module.set_custom_all_gather(RoundedGather(group, policy.compute, kept))
            # FSDP2 has read FP32 values of a split parameter, and noted its dtype, which gradients would have by name.
            for one in group.fsdp_params:
                held = getattr(one, "_sharding_spec", None), getattr(one.sharded_param, "_spec", None)
                for spec in filter(None, held):
                    spec.tensor_meta = spec.tensor_meta._replace(dtype=one.sharded_param.dtype)
        if policy.wire is not torch.float32 and type(group._reduce_scatter_comm).__name__ == "DefaultReduceScatter":
            module.set_custom_reduce_scatter(ScaledReduceScatter(group, policy, runtime))


def send_as_before(model: nn.Module) -> None:
    """Give FSDP2 back the communication that it had."""
    for module, group in fsdp_groups(model):
        if isinstance(group._all_gather_comm, RoundedGather):
            module.set_custom_all_gather(group._all_gather_comm.before)
        if isinstance(group._reduce_scatter_comm, ScaledReduceScatter):
            module.set_custom_reduce_scatter(group._reduce_scatter_comm.before)
