"""Layouts of FP32 masters whose memory something else manages: FSDP2, tensor parallelism."""

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
from hf_mp.model_walk import optimizer_parameters
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.ranks.wire import ScaleSource, send_as_before, send_in_16_bits
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.working_copies import is_master


class UncachedCopies:
    """Rounds a parameter anew at each use, and once more in backward in place of saving the rounding.

    FSDP2 shows a module's whole parameters only while it runs, and fills their memory again before backward without
    raising their version counters (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, "FSDP and autograd"): a copy
    kept between uses would be stale unseen, and copies kept for backward would make every process hold the whole model
    in 16 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._transient: dict[int, nn.Parameter] = {}  # by the storage of a copy that lives: what it is a copy of

    def get(self, parameter: nn.Parameter) -> Tensor:
        """A new tensor: ``parameter`` as it is now, rounded to nearest.

        While that lives, :meth:`recompute_copies` knows by its storage that it stands for ``parameter``.
        """
        copy = parameter.detach().to(self.dtype, copy=True)
        storage = copy.untyped_storage()
        self._transient[storage._cdata] = parameter
        # The entry goes with the storage, whose address may then be another's, and not with the object `copy`: that is
        # freed first, since a border hands out an alias. torch keeps one Python object for each storage.
        weakref.finalize(storage, self._transient.pop, storage._cdata)
        return copy

    def recompute_copies(self) -> AbstractContextManager[None]:
        """Have autograd save a parameter for a copy of it, unless other hooks are active (activations offloaded)."""
        if not torch.is_grad_enabled() or is_saving_elsewhere():
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor] | tuple[Tensor, int]:
        found = self._transient.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if found is None:
            # Detached: an op's output would otherwise be kept alive by the op itself.
            return tensor.detach(), tensor._version
        view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        # Holds the parameter alone: the copy is freed as soon as the forward lets go of it.
        return lambda: found.detach().to(self.dtype).as_strided(*view)

    def _unpack(self, saved: Any) -> Tensor:
        """What :meth:`_pack` saved; a RuntimeError for a tensor that was written since."""
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
    """FP32 masters whose memory something else manages (FSDP2): rounded at each use."""

    keeps_copies = False

    def __init__(self, policy: PrecisionPolicy) -> None:
        super().__init__(policy)
        self._transient = UncachedCopies(policy.compute)

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        """As the base class, rounded anew."""
        return {id(weight): self._transient.get(weight) for weight in weights if is_master(weight)}

    def register_communication(
        self, model: nn.Module, parallelism: Parallelism, scale_source: ScaleSource, in_fp32: Sequence[nn.Module]
    ) -> None:
        """Have FSDP2 gather weights and reduce gradients in 16 bits, but for the modules ``in_fp32``."""
        send_in_16_bits(model, self.policy, scale_source, in_fp32)

    def restore(self, model: nn.Module | None) -> None:
        super().restore(model)
        if model is not None:
            send_as_before(model)

    def parameters_to_check(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
        # FSDP may leave whole parameters in the places of the shards, which have the gradients.
        given = [parameter for optimizer in optimizers for parameter in optimizer_parameters(optimizer)]
        found = [*super().parameters_to_check(model, optimizers), *given]
        return list({id(parameter): parameter for parameter in found}.values())

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """``optimizer`` itself; a ValueError for one of bitsandbytes, which updates no DTensors."""
        if type(optimizer).__module__.startswith("bitsandbytes."):
            raise ValueError(
                f"{type(optimizer).__name__} of bitsandbytes updates plain tensors, and these parameters are DTensors: "
                "use torch's optimizers"
            )
        return optimizer

    def saving_for_backward(self) -> AbstractContextManager[None]:
        return self._transient.recompute_copies()


class TensorParallelLayout(ShardedLayout):
    """FP32 masters that are DTensors, whose shards the products compute with: rounded at each use.

    No copy is kept between forwards: a DTensor's version counter knows nothing of writes into its shard.
    """

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        return {id(weight): weight.detach().to(self.policy.compute) for weight in weights if is_master(weight)}

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """``optimizer`` itself; a ValueError for ``fused`` or ``foreach`` over DTensors and plain tensors at once."""
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
