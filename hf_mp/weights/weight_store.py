"""``WeightStore``: master weights, working copies and aliases of one attached model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.casting.data_tracking import untrack_data_writes
from hf_mp.model_index import ModelIndex
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.weights.external import ExternalTensors, ForwardNodes
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.fused_adamw import Clipping, UpdateCache, try_fused_step_whole
from hf_mp.weights.gathered_weights import GatheredSlots
from hf_mp.weights.inference_layout import InferenceLayout
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.optimizer_state import state_to_fp32
from hf_mp.weights.sharded_layouts import ShardedLayout, TensorParallelLayout
from hf_mp.weights.slots import AliasSet, WeightSlots
from hf_mp.weights.split_layout import SplitLayout
from hf_mp.weights.weight_uses import WeightUses

_MAX_ALIAS_SETS = 4  # for each forward key; more forwards in one backward make new aliases


class AliasCache:
    """Alias sets that are reused from forward to forward. Attached forwards own the cache.

    An alias shares memory and version counter with its weight or working copy, and its unscale node saves no tensors.
    For two forwards in one set, autograd would sum gradients in 16 bits.
    """

    def __init__(self) -> None:
        self.index: Any = None  # ModelIndex of the model when the sets were made
        self.has_masters = False  # whether the trained weights of `index` have FP32 masters
        self.by_key: dict[Hashable, list[AliasSet]] = {}  # by forward key

    def reset(self, index: ModelIndex | None, *, has_masters: bool = False) -> None:
        self.by_key.clear()
        self.index, self.has_masters = index, has_masters


class Entry(Protocol):
    """Attached forward of the model or of a part."""

    alias_cache: AliasCache


class WeightStore:
    """Master weights, working copies and aliases of one attached model.

    ``layout`` stores masters and copies, ``uses`` finds the weights of lower-precision ops.
    """

    def __init__(self, layout: WeightLayout, scale_provider: Any) -> None:
        self.layout, self.scale_provider = layout, scale_provider
        self.uses = WeightUses(lambda op: False)
        self._intercepts_by_key: dict[Hashable, bool] = {}  # for ForwardWeights
        self._alias_cache: Callable[[], AliasCache | None] = lambda: None  # a weak reference
        self._nodes = ForwardNodes()
        self.threads: list[int] = []  # thread of each running forward

    def check_single_thread(self) -> None:
        """Raise a RuntimeError if another thread runs a forward: slots are not per thread."""
        if set(self.threads) - {threading.get_ident()}:
            raise RuntimeError(
                "a forward with gradients began while another thread ran one of the same attached model, and a module "
                "can hold the 16-bit weights of only one: run them one after the other, or give the other thread a "
                "copy.deepcopy of the model"
            )

    def reset_uses(
        self,
        is_lower_precision: Callable[[Callable[..., Any] | None], bool],
        modules_with_rules: Iterable[nn.Module],
    ) -> None:
        """Find the uses of weights again, for other rules."""
        self.uses = WeightUses(is_lower_precision, modules_with_rules)
        self._intercepts_by_key.clear()
        self.clear_alias_cache()

    def alias_cache(self) -> AliasCache:
        """Return the cache of the attached forwards, or a new one."""
        cache = self._alias_cache()
        if cache is None:
            cache = AliasCache()
            self._alias_cache = weakref.ref(cache)
        return cache

    def clear_alias_cache(self) -> None:
        if (cache := self._alias_cache()) is not None:
            cache.reset(None)

    def prepare_forward(
        self, model: nn.Module, forward: Entry, is_scaled: bool, groups_weights: bool, holds_copies: bool
    ) -> ForwardWeights:
        """Make masters, and return the weights of ``forward``, which is about to run.

        ``is_scaled``: whether the loss is. ``groups_weights``, ``holds_copies``: as for :class:`WeightSlots`.
        """
        has_grad, index, cache = torch.is_grad_enabled(), ModelIndex(model), forward.alias_cache
        if index != cache.index:
            cache.reset(index)
        if has_grad and not cache.has_masters:
            self.layout.prepare_weights(model)
            cache.reset(ModelIndex(model), has_masters=True)
        settings = {
            "aliases_fp32_weights": has_grad and (is_scaled or self.layout.keeps_scaled_gradients),
            "groups_weights": groups_weights,
            "holds_copies": holds_copies,
        }
        slots: WeightSlots
        if self.layout.keeps_copies:
            slots = WeightSlots(self.layout, self.scale_provider, **settings)
            slots.use_alias_set(self._alias_set(model, slots, cache, (has_grad, *settings.values())))
        else:
            slots = GatheredSlots(model, self.uses, self.layout, self.scale_provider, **settings)
        external = ExternalTensors(slots, self._nodes, is_scaled=has_grad and is_scaled)
        if isinstance(slots, GatheredSlots):
            slots.external = external
        return ForwardWeights(slots, external, (id(forward), has_grad, model.training), self._intercepts_by_key)

    def _alias_set(self, model: nn.Module, slots: WeightSlots, cache: AliasCache, key: Hashable) -> AliasSet:
        """Return a free alias set for a forward with ``key``: a cached or a new one."""
        sets = cache.by_key.get(key, [])
        if not all([one.has_working_copies_of(self.layout) for one in sets]):
            # All keys: their nodes keep AccumulateGrad nodes with the old shape of a resized weight.
            cache.by_key.clear()
            sets = []
        sets = cache.by_key[key] = [one for one in sets if one.is_intact()]
        for one in sets:
            if one.is_free():
                return one
        made = slots.make_alias_set(self.uses.find_slots(model))
        # A computed weight is another tensor in the next forward.
        can_reuse = all([weight.is_leaf for weight in cache.index.weights])
        if can_reuse and len(sets) < _MAX_ALIAS_SETS:
            sets.append(made)
        return made

    def adopt_sharding(
        self,
        model: nn.Module | None,
        parameters: Sequence[Tensor],
        parallelism: Parallelism,
        in_fp32: Sequence[nn.Module],
    ) -> None:
        """Change to the layout for the sharding of ``parameters``, and register communication for ``model``, if given.

        Weights of the modules ``in_fp32`` are sent in FP32. Raises a ValueError for an unsupported sharding.
        """
        layout = _layout_for(self.layout, parameters, parallelism)
        if layout is not self.layout:
            self.layout.restore(model)  # parameters that FSDP2 does not shard may be split
            self.layout = layout
        if model is not None:
            layout.register_communication(model, parallelism, self.scale_provider, in_fp32)

    # Update

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step from now on; its state is cast to FP32."""
        optimizer = self.layout.wrap_optimizer(optimizer)
        state_to_fp32(optimizer)
        return optimizer

    def try_fused_update(
        self,
        optimizer: Optimizer,
        replaced_step: Callable[..., Any] | None,
        updates: UpdateCache,
        clipping: Clipping | None,
        found_inf: Tensor | None,
    ) -> bool:
        """As :func:`try_fused_step_whole`; False for a lean layout, which has its own kernel."""
        if self.layout.keeps_scaled_gradients:
            return False
        return try_fused_step_whole(optimizer, replaced_step, self.layout.copies, updates, clipping, found_inf)

    def copy_of(self, parameter: nn.Parameter) -> Tensor:
        """Return ``parameter`` as the forward reads it, in 16 bits if it is floating; do not write to it."""
        layout, value = self.layout, parameter.detach()
        if layout.keeps_copies and parameter in layout.copies:
            return layout.copies.get(parameter)
        return value.to(layout.policy.compute) if value.is_floating_point() else value

    def restore(self, model: nn.Module | None) -> None:
        """As :meth:`WeightLayout.restore`."""
        self.clear_alias_cache()
        for parameter in () if model is None else model.parameters():
            untrack_data_writes(parameter)
        self.layout.restore(model)


def make_layout(policy: PrecisionPolicy, offload: str | None = None) -> WeightLayout:
    """Return the layout for ``policy``; ``offload`` names the tensors of a lean layout in host memory."""
    if offload is not None:
        # Imported only if it is used.
        return resolve_name("hf_mp.weights.offload.layout:OffloadLayout")(policy, offload)
    return SplitLayout(policy) if policy.is_lean else WeightLayout(policy)


def make_inference_layout(policy: PrecisionPolicy, *, only_trainable: bool) -> WeightLayout:
    return InferenceLayout(policy, only_trainable=only_trainable)


def _layout_for(layout: WeightLayout, parameters: Iterable[Tensor], parallelism: Parallelism) -> WeightLayout:
    """Return ``layout`` if it supports the sharding of ``parameters``, otherwise another one."""
    if isinstance(layout, ShardedLayout) or not any(map(is_dtensor, parameters)):
        return layout
    policy = layout.policy
    if layout.offload is not None:
        raise ValueError(
            f"offload={layout.offload!r} needs whole weights, and this model is sharded (FSDP2, tensor parallelism): "
            "leave offload out, or use DDP"
        )
    if not parallelism.is_tensor_parallel:
        return ShardedLayout(policy)  # of a lean model too: its shards are FP32
    if policy.is_lean:
        raise ValueError(
            f"precision={str(policy)!r} needs whole weights, and this model is tensor parallel: use "
            f"{str(policy).removesuffix('-lean')!r}"
        )
    return TensorParallelLayout(policy)
