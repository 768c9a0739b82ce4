"""FSDP2 communication in 16 bits: an all-gather of rounded weights and a reduce-scatter of scaled gradients.

Only the messages are in 16 bits: shards, gathered parameters and ``.grad`` stay FP32.
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


class ScaleSource(Protocol):
    scaler: LossScaler[Any]

    @property
    def updates_in_backward(self) -> bool:
        """Whether gradients are used within the backward, before DDP can reduce them."""

    def loss_scale_for(self, device: torch.device) -> Tensor | None:
        """Return S, FP32 of shape (1,); None if nothing is scaled."""


class LowPrecisionAllGather:
    """All-gather of FP32 shards that sends them in ``dtype``, to which matmuls round, and casts them to FP32.

    FP32 ops read parameters with less than two dimensions (norms, biases), in ``kept`` and in routers: these are sent
    in FP32.
    """

    def __init__(self, group: Any, dtype: torch.dtype, kept: Iterable[nn.Module]) -> None:
        self.before = group._all_gather_comm
        self.allocate = self.before.allocate  # part of FSDP2's protocol
        fp32_modules = {module for one in kept for module in one.modules()}
        self._parameters = group.fsdp_params
        self._dtypes = []  # one for each parameter
        for one in group.fsdp_params:
            module = one._module_info.module
            is_fp32 = len(one._orig_size) < 2 or module in fp32_modules or is_fp32_router(module)
            self._dtypes.append(torch.float32 if is_fp32 else dtype)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: torch.distributed.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather ``input_tensor`` into ``output_tensor``, both one-dimensional, on the current stream.

        ``async_op`` is used only if a tensor is not FP32 or all parameters are sent in FP32.
        """
        # FSDP2 gathers a group of several dtypes (frozen FP16 weights) as bytes, without the boundaries of parameters.
        if output_tensor.dtype is not torch.float32 or set(self._dtypes) == {torch.float32}:
            return self.before(output_tensor, input_tensor, group, async_op)
        sizes, ranks = self._shard_sizes(input_tensor.numel()), group.size()
        # One message of bytes for both dtypes: a second one costs a launch for each group.
        lengths = [size * dtype.itemsize for size, dtype in zip(sizes, self._dtypes, strict=True)]
        padded = [-(-length // 4) * 4 for length in lengths]  # views as FP32 must begin at multiples of 4 bytes
        messages = self.allocate((ranks * sum(padded),), dtype=torch.uint8, device=input_tensor.device)
        by_rank = messages.view(ranks, -1)
        own = by_rank[group.rank()]
        torch._foreach_copy_(self._views(own, lengths, padded), list(input_tensor.split(sizes)))
        self.before(messages, own, group, False)
        received = self._views(by_rank, lengths, padded)
        torch._foreach_copy_(list(output_tensor.view(ranks, -1).split(sizes, -1)), received)

    def _shard_sizes(self, total: int) -> list[int]:
        """Return the number of elements of each parameter in shards of ``total`` elements."""
        sizes = [one._sharded_param_data.numel() for one in self._parameters]
        if sum(sizes) != total:  # resharded after forward to fewer ranks
            sizes = [one._sharded_post_forward_param_data.numel() for one in self._parameters]
        return sizes

    def _views(self, message: Tensor, lengths: list[int], padded: list[int]) -> list[Tensor]:
        """Return views of the parameters, of ``lengths`` in bytes, in ``message``."""
        pieces = zip(message.split(padded, -1), lengths, self._dtypes, strict=True)
        return [piece[..., :length].view(dtype) for piece, length, dtype in pieces]


class ScaledReduceScatter:
    """Reduce-scatter of FP32 gradients that sends them multiplied by S in 16 bits. The result is FP32 and unscaled."""

    def __init__(self, group: Any, policy: PrecisionPolicy, scale_source: ScaleSource) -> None:
        self.before, self._policy, self._scale_source = group._reduce_scatter_comm, policy, scale_source
        self.allocate = self.before.allocate  # part of FSDP2's protocol

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: torch.distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor``, one-dimensional, and write this rank's part to ``output_tensor``.

        ``async_op`` is not used: FSDP2 leaves it False.
        """
        is_average, reduce_dtype = op == torch.distributed.ReduceOp.AVG, self._policy.reduce_dtype
        is_sum = is_average or op == torch.distributed.ReduceOp.SUM
        if reduce_dtype is torch.float32 or input_tensor.dtype is not torch.float32 or not is_sum:
            self.before(output_tensor, input_tensor, group, op, False)
            return
        scale = self._scale_source.loss_scale_for(input_tensor.device)
        scaled = input_tensor if scale is None else input_tensor * scale
        reduce_scatter_in_fp32(output_tensor, scaled.to(reduce_dtype), group)
        if is_average:
            output_tensor.div_(group.size())
        if scale is not None:
            output_tensor.div_(scale)


def reduce_scatter_in_fp32(output: Tensor, sent: Tensor, group: torch.distributed.ProcessGroup) -> None:
    """Sum one-dimensional 16-bit tensors over the ranks, and write this rank's part to ``output`` in FP32.

    An all-to-all sends as many bytes as a reduce-scatter in 16 bits. The sums are FP32, without intermediate rounding.
    """
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    torch.sum(received.view(group.size(), -1), 0, dtype=torch.float32, out=output)


def fsdp_groups(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2 modules of ``model`` and their parameter groups, except modules with several groups (meshes)."""
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        # torch has no public API for the parameters of one message.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch < 2.13 has one
        if len(groups) == 1 and groups[0] is not None:
            yield module, groups[0]


def set_low_precision_comm(
    model: nn.Module, policy: PrecisionPolicy, scale_source: ScaleSource, kept: Iterable[nn.Module]
) -> None:
    """Set the communication of FSDP2: all-gathers of ``model`` in 16 bits, gradients reduced in the policy's dtype.

    Parameters of the modules ``kept`` are sent in FP32. A communication set by user code (``set_custom_all_gather``,
    ``set_symm_mem_for_comm``) is not replaced.
    """
    for module, group in fsdp_groups(model):
        # By name, because torch does not export the default classes.
        if type(group._all_gather_comm).__name__ == "DefaultAllGather":
            module.set_custom_all_gather(LowPrecisionAllGather(group, policy.compute, kept))
            _correct_dtypes(group)
        if (
            policy.reduce_dtype is not torch.float32
            and type(group._reduce_scatter_comm).__name__ == "DefaultReduceScatter"
        ):
            module.set_custom_reduce_scatter(ScaledReduceScatter(group, policy, scale_source))


def _correct_dtypes(group: Any) -> None:
    """Set the dtypes in DTensor specs to those of the shards.

    FSDP2 recorded FP32 for a split parameter, from the values that it read, and gradients would report that dtype.
    """
    for one in group.fsdp_params:
        specs = getattr(one, "_sharding_spec", None), getattr(one.sharded_param, "_spec", None)
        for spec in filter(None, specs):
            spec.tensor_meta = spec.tensor_meta._replace(dtype=one.sharded_param.dtype)


def restore_default_comm(model: nn.Module) -> None:
    """Restore the communication that :func:`set_low_precision_comm` replaced."""
    for module, group in fsdp_groups(model):
        if isinstance(group._all_gather_comm, LowPrecisionAllGather):
            module.set_custom_all_gather(group._all_gather_comm.before)
        if isinstance(group._reduce_scatter_comm, ScaledReduceScatter):
            module.set_custom_reduce_scatter(group._reduce_scatter_comm.before)
