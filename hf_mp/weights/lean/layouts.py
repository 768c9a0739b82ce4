"""The lean layout of a model, on one process and under DDP. What FSDP2 shards has FP32 masters in its shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.lean.optimizer import MasterWeightOptimizer, clip_grad_norm_
from hf_mp.weights.lean.outside_reads import on_stored_values
from hf_mp.weights.lean.split_model import restore_parameters, split_trainable_parameters
from hf_mp.weights.lean.split_parameter import SplitParameter, copy_gradient_factors, gradient_and_factor
from hf_mp.weights.lean.unwrapped_steps import refuse_unwrapped_steps
from hf_mp.weights.ranks.parallelism import Parallelism, is_distributed
from hf_mp.weights.ranks.wire import Runtime


class SplitLayout(WeightLayout):
    """The model's parameters are the working copies; with 16 more bits for each, they are the FP32 masters.

    Gradients stay in FP16/BF16, scaled, until the update reads them. Frozen FP32 parameters have working copies.
    """

    keeps_scaled_gradients = True

    def make_masters(self, model: nn.Module) -> None:
        if split_trainable_parameters(model, self.policy.params):
            self.copies.clear()  # of what was frozen before
            refuse_unwrapped_steps()

    def join_ranks(
        self, model: nn.Module, parallelism: Parallelism, runtime: Runtime, in_fp32: Sequence[nn.Module]
    ) -> None:
        if is_distributed() and parallelism.fsdp:
            raise ValueError(
                f"precision={str(self.policy)!r} learned that FSDP shards this {type(model).__name__} when a forward "
                "ran already: call attach_optimizer before the first forward"
            )
        super().join_ranks(model, parallelism, runtime, in_fp32)

    @on_stored_values
    def keep_scaled_gradients(
        self, weights: Mapping[int, Tensor], uses: dict[int, list[Tensor]], inverse: Tensor | None
    ) -> None:
        # DDP's hook reduces what lies in its buckets, and puts it there when autograd says that it is ready.
        beside_grad = bool(self._joined)
        looks_for_unused = any(buckets.looks_for_unused for buckets in self._joined.values())
        for place, weight in weights.items():
            if isinstance(weight, SplitParameter):
                # What is left, autograd accumulates, so that a hook sees it.
                take = functools.partial(weight.keep_scaled_gradient, factor=inverse, beside_grad=beside_grad)
                left = [one for one in uses.pop(place) if not take(one)]
                if left:
                    uses[place] = left
                if looks_for_unused:
                    weight.mark_used()

    @on_stored_values
    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        parameters = list(parameters)
        for buckets in self._joined.values():
            buckets.hand_out(parameters)
        found = [gradient_and_factor(parameter) for parameter in parameters]
        return [(gradient, factor) for gradient, factor in found if gradient is not None]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        return clip_grad_norm_(parameters, max_norm)

    def wrap(self, optimizer: Optimizer) -> Optimizer:
        return optimizer if isinstance(optimizer, MasterWeightOptimizer) else MasterWeightOptimizer(optimizer)

    def fused_step(self, *given: Any) -> bool:
        return False

    def after_update(self, optimizer: Optimizer) -> None:
        pass  # the update has written both halves

    @on_stored_values
    def before_next_scale(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        copy_gradient_factors(parameters())

    def restore(self, model: nn.Module | None) -> None:
        super().restore(model)
        if model is not None:
            restore_parameters(model)
