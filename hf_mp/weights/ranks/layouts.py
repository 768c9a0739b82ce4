"""Layouts of FP32 masters whose memory something else manages: FSDP2, tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.policy import PrecisionPolicy
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.model_walk import optimizer_parameters
from hf_mp.weights.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.weights.ranks.transient_copies import TransientCopies
from hf_mp.weights.ranks.wire import Runtime, send_as_before, send_in_16_bits
from hf_mp.weights.working_copies import is_master


class TransientLayout(WeightLayout):
    """FP32 masters whose memory something else manages (FSDP2): rounded at each use."""

    keeps_copies = False

    def __init__(self, policy: PrecisionPolicy) -> None:
        super().__init__(policy)
        self._transient = TransientCopies(policy.compute)

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        return {id(weight): self._transient.get(weight) for weight in weights if is_master(weight)}

    def join_ranks(
        self, model: nn.Module, parallelism: Parallelism, runtime: Runtime, in_fp32: Sequence[nn.Module]
    ) -> None:
        send_in_16_bits(model, self.policy, runtime, in_fp32)

    def restore(self, model: nn.Module | None) -> None:
        super().restore(model)
        if model is not None:
            send_as_before(model)

    def parameters_to_check(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
        # FSDP may leave whole parameters in the places of the shards, which have the gradients.
        given = [parameter for optimizer in optimizers for parameter in optimizer_parameters(optimizer)]
        found = [*super().parameters_to_check(model, optimizers), *given]
        return list({id(parameter): parameter for parameter in found}.values())

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        if type(optimizer).__module__.startswith("bitsandbytes."):
            raise ValueError(
                f"{type(optimizer).__name__} of bitsandbytes updates plain tensors, and these parameters are DTensors: "
                "use torch's optimizers"
            )
        return optimizer

    def saving_for_backward(self) -> AbstractContextManager[None]:
        return self._transient.not_saved()


class TensorParallelLayout(TransientLayout):
    """FP32 masters that are DTensors, whose shards the products compute with: rounded at each use.

    No copy is kept between forwards: a DTensor's version counter knows nothing of writes into its shard.
    """

    def working_copies(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        return {id(weight): weight.detach().to(self.policy.compute) for weight in weights if is_master(weight)}

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        for group in optimizer.param_groups:
            if (group.get("fused") or group.get("foreach")) and len(set(map(is_dtensor, group["params"]))) > 1:
                raise ValueError(
                    f"{type(optimizer).__name__} updates a group of DTensors and plain tensors at once, which torch "
                    "cannot: leave fused=True and foreach=True out (in the Trainer: optim='adamw_torch'), or give each "
                    "kind a group of its own"
                )
        return super().wrap(optimizer)

    def saving_for_backward(self) -> AbstractContextManager[None]:
        return nullcontext()
