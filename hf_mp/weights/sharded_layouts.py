"""Weight layouts for FP32 masters in sharded memory: FSDP2 and tensor parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from hf_mp.kernels.transforms import is_saving_elsewhere
from hf_mp.model_index import optimizer_parameters
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.fsdp_communication import ScaleSource, restore_default_comm, set_low_precision_comm
from hf_mp.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.working_copies import is_master


class UncachedCopies:
    """Rounds a parameter at each use, and again in backward.

    FSDP2 refills the memory of whole parameters before backward without raising version counters
    (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, "FSDP and autograd"), so a stored copy could be stale.
    Copies saved for backward would be the whole model in 16 bits on every rank.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._by_storage: dict[int, nn.Parameter] = {}  # parameters by the storage of an existing copy

    def get(self, parameter: nn.Parameter) -> Tensor:
        """Return ``parameter`` rounded to nearest, as a new tensor."""
        copy = parameter.detach().to(self.dtype, copy=True)
        storage = copy.untyped_storage()
        self._by_storage[storage._cdata] = parameter
        # Remove the entry when the storage is freed, before its address is reused. The forward aliases the storage, and
        # may keep it longer than `copy`.
        weakref.finalize(storage, self._by_storage.pop, storage._cdata)
        return copy

    def recompute_copies(self) -> AbstractContextManager[None]:
        """Return a context in which autograd saves parameters instead of copies, unless other hooks are active."""
        if not torch.is_grad_enabled() or is_saving_elsewhere():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor] | tuple[Tensor, int]:
        """Return a function that rounds a copy again, or any other tensor and its version."""
        is_strided = tensor.layout is torch.strided
        parameter = self._by_storage.get(tensor.untyped_storage()._cdata) if is_strided else None
        if parameter is None:
            # An op that saves its own output would keep it alive.
            return tensor.detach(), tensor._version
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return lambda: parameter.detach().to(self.dtype).as_strided(*view)

    def _unpack(self, saved: Any) -> Tensor:
        """Return the tensor that :meth:`_pack` saved; a RuntimeError if it was written since."""
        if callable(saved):
            return saved()
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                f"a tensor needed for backward was changed by an in-place operation: a {tensor.dtype} tensor of shape "
                f"{list(tensor.shape)} is at version {tensor._version} instead of {version}"
            )
        return tensor


class ShardedLayout(WeightLayout):
    """FP32 masters in FSDP2's shards, rounded at each use."""

    keeps_copies = False

    def __init__(self, policy: PrecisionPolicy) -> None:
        super().__init__(policy)
        self._uncached = UncachedCopies(policy.compute)

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        return {id(weight): self._uncached.get(weight) for weight in weights if is_master(weight)}

    def register_communication(
        self, model: nn.Module, parallelism: Parallelism, scale_source: ScaleSource, in_fp32: Sequence[nn.Module]
    ) -> None:
        """Set FSDP2's all-gather and reduce-scatter to 16 bits, except for the modules ``in_fp32``."""
        set_low_precision_comm(model, self.policy, scale_source, in_fp32)

    def restore(self, model: nn.Module | None) -> None:
        super().restore(model)
        if model is not None:
            restore_default_comm(model)

    def parameters_to_check(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
        # FSDP may leave whole parameters in the modules; optimizers have the shards, with the gradients.
        stepped = [parameter for optimizer in optimizers for parameter in optimizer_parameters(optimizer)]
        parameters = [*super().parameters_to_check(model, optimizers), *stepped]
        return list({id(parameter): parameter for parameter in parameters}.values())

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer``; a ValueError for one of bitsandbytes, which does not support DTensors."""
        if type(optimizer).__module__.startswith("bitsandbytes."):
            raise ValueError(
                f"{type(optimizer).__name__} of bitsandbytes updates plain tensors, and these parameters are DTensors: "
                "use torch's optimizers"
            )
        return optimizer

    def saving_for_backward(self) -> AbstractContextManager[None]:
        return self._uncached.recompute_copies()


class TensorParallelLayout(ShardedLayout):
    """FP32 masters that are DTensors, rounded at each use: writes to shards do not raise their version counters."""

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        return {id(weight): weight.detach().to(self.policy.compute) for weight in weights if is_master(weight)}

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return ``optimizer``; a ValueError for ``fused`` or ``foreach`` in a group with and without DTensors."""
        for group in optimizer.param_groups:
            if (group.get("fused") or group.get("foreach")) and len(set(map(is_dtensor, group["params"]))) > 1:
                raise ValueError(
                    f"{type(optimizer).__name__} updates a group of DTensors and plain tensors at once, which torch "
                    "cannot: leave fused=True and foreach=True out (in the Trainer: optim='adamw_torch'), or give each "
                    "kind a group of its own"
                )
        return super().wrap_optimizer(optimizer)

    def saving_for_backward(self) -> AbstractContextManager[None]:
        return nullcontext()
