"""``WeightStore``: the one owner of the weights of an attached model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.casting.watched import untrack_data_writes
from hf_mp.model_walk import Walk
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import Parallelism, is_dtensor
from hf_mp.weights.early_state import state_to_fp32
from hf_mp.weights.external import ExternalTensors, ForwardNodes
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.fused_adamw import Clipping, UpdateCache, try_fused_step_whole
from hf_mp.weights.gathered_weights import GatheredSlots
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.reading_layout import InferenceLayout
from hf_mp.weights.slots import AliasSet, WeightSlots
from hf_mp.weights.split_layout import SplitLayout
from hf_mp.weights.spread_layouts import ShardedLayout, TensorParallelLayout
from hf_mp.weights.weight_uses import WeightUses

_MAX_ALIAS_SETS = 4  # kept for the forwards of one kind: so many in one backward cost no new borders


class AliasCache:
    """Borders that are kept from forward to forward: made when a weight of the model comes or changes.

    A border shares memory and version counter with what it brings in and saves no tensors, so it serves one forward
    after another. Two forwards in one backward must not share one, because autograd would sum their gradients in 16
    bits before the border sees them: a forward takes a set that no graph of another leads to.

    They refer to the model, and so its attached forwards hold this object.
    """

    def __init__(self) -> None:
        self.walk: Any = None  # the Walk over the model, for which they were made
        self.has_masters = False  # whether trained weights have had FP32 masters since
        self.by_key: dict[Hashable, list[AliasSet]] = {}


class Entry(Protocol):
    """The attached forward of the model or of a part of it."""

    alias_cache: AliasCache


class WeightStore:
    """Owns, for each weight of one model: its FP32 master, its working copy, its border, and what lies in its slot.

    ``layout`` stores masters and copies, ``uses`` finds the weights of lower-precision ops. :meth:`prepare_forward`
    returns the weights of a forward; :meth:`restore` leaves ordinary parameters.
    """

    def __init__(self, layout: WeightLayout, scale_provider: Any) -> None:
        self.layout, self.scale_provider = layout, scale_provider
        self.uses = WeightUses(lambda op: False)
        self._intercepts_by_key: dict[Hashable, bool] = {}  # of ForwardWeights
        self._alias_cache: Callable[[], AliasCache | None] = lambda: None  # a weak reference
        self._nodes = ForwardNodes()
        self.threads: list[int] = []  # identifiers, one for each forward that runs

    def check_single_thread(self) -> None:
        """Raise a RuntimeError if another thread runs a forward of the model: its weights are in the modules."""
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
        """Forget the uses of weights: autocast casts other ops to 16 bits, or rules hold for other modules."""
        self.uses = WeightUses(is_lower_precision, modules_with_rules)
        self._intercepts_by_key.clear()
        self.clear_alias_cache()

    def alias_cache(self) -> AliasCache:
        """The borders that the attached forwards of the model hold; new ones where nobody holds any."""
        cache = self._alias_cache()
        if cache is None:
            cache = AliasCache()
            self._alias_cache = weakref.ref(cache)
        return cache

    def clear_alias_cache(self) -> None:
        """Let go of all borders that are kept."""
        if (cache := self._alias_cache()) is not None:
            cache.walk = None
            cache.by_key.clear()

    def prepare_forward(
        self, model: nn.Module, forward: Entry, is_scaled: bool, groups_weights: bool, holds_copies: bool
    ) -> ForwardWeights:
        """The weights of ``forward``, which is about to run; masters are made first.

        ``is_scaled``: whether the loss is; ``groups_weights``: whether several weights may have one unscale node;
        ``holds_copies``: whether slots hold the working copies.
        """
        has_grad, walk, cache = torch.is_grad_enabled(), Walk(model), forward.alias_cache
        if walk != cache.walk:
            cache.by_key.clear()
            cache.walk, cache.has_masters = walk, False
        if has_grad and not cache.has_masters:
            self.layout.prepare_weights(model)
            cache.by_key.clear()
            cache.walk, cache.has_masters = Walk(model), True
        settings = {
            "has_unscale_nodes": has_grad and (is_scaled or self.layout.keeps_scaled_gradients),
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
        """The aliases that a forward uses: a stored set that is free, or a new one."""
        sets = cache.by_key.setdefault(key, [])
        if not all([one.has_working_copies_of(self.layout) for one in sets]):
            # All of them: a node holds the AccumulateGrad of a weight, which torch keeps when a weight is resized.
            cache.by_key.clear()
            sets = cache.by_key[key] = []
        sets[:] = [one for one in sets if one.is_intact()]
        for one in sets:
            if one.is_free():
                return one
        made = slots.make_alias_set(self.uses.find_slots(model))
        # A tensor that was computed is another in the next forward.
        are_leaves = all([weight.is_leaf for weight in cache.walk.weights])
        if are_leaves and len(sets) < _MAX_ALIAS_SETS:
            sets.append(made)
        return made

    def adopt_sharding(
        self,
        model: nn.Module | None,
        parameters: Sequence[Tensor],
        parallelism: Parallelism,
        in_fp32: Sequence[nn.Module],
    ) -> None:
        """Change to the layout that the sharding of ``parameters`` needs, and take over the communication of ``model``.

        ``parameters`` are the model's or its optimizer's, as they are spread over processes now. Weights of the modules
        ``in_fp32`` travel in FP32. A ValueError for a lean layout of a tensor parallel model.
        """
        layout = _spread_layout(self.layout, parameters, parallelism)
        if layout is not self.layout:
            self.layout.restore(model)  # a lean layout still has the parameters that FSDP2 does not shard
            self.layout = layout
        if model is not None:
            layout.register_communication(model, parallelism, self.scale_provider, in_fp32)

    # Update

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step from now on; its state becomes FP32, as the masters are."""
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
        """Write masters and working copies in one launch, by :func:`try_fused_step_whole`.

        False: nothing was written, and ``optimizer`` has to step.
        The optimizer of a lean layout has a kernel of its own.
        """
        given = optimizer, replaced_step, self.layout.copies, updates, clipping, found_inf
        return not self.layout.keeps_scaled_gradients and try_fused_step_whole(*given)

    def copy_of(self, parameter: nn.Parameter) -> Tensor:
        """``parameter`` as the forward reads it, in 16 bits if it is floating; do not write to it.

        The working copy itself where one is kept, and the parameter's own memory where nothing needs rounding.
        """
        layout, value = self.layout, parameter.detach()
        if layout.keeps_copies and parameter in layout.copies:
            return layout.copies.get(parameter)
        return value.to(layout.policy.compute) if value.is_floating_point() else value

    def restore(self, model: nn.Module | None) -> None:
        """Leave ordinary FP32 parameters, and no copy."""
        self.clear_alias_cache()
        for parameter in () if model is None else model.parameters():
            untrack_data_writes(parameter)
        self.layout.restore(model)


def make_layout(policy: PrecisionPolicy, offload: str | None = None) -> WeightLayout:
    """The layout that a policy's ``params`` asks for; ``offload``: what of a lean one is in host memory."""
    if offload is not None:
        # By name, so that a training without it imports nothing of it.
        return resolve_name("hf_mp.weights.offload.layout:OffloadLayout")(policy, offload)
    return SplitLayout(policy) if policy.is_lean else WeightLayout(policy)


def make_inference_layout(policy: PrecisionPolicy, *, only_trainable: bool) -> WeightLayout:
    """The layout of a model that is read and not trained, as :class:`InferenceLayout`."""
    return InferenceLayout(policy, only_trainable=only_trainable)


def _spread_layout(layout: WeightLayout, parameters: Iterable[Tensor], parallelism: Parallelism) -> WeightLayout:
    """The layout for ``parameters`` as they are sharded: ``layout`` itself where it can stay."""
    # Plain tensors need no other layout: DDP holds whole weights.
    if isinstance(layout, ShardedLayout) or not any(map(is_dtensor, parameters)):
        return layout
    policy = layout.policy
    if layout.offload is not None:
        raise ValueError(
            f"offload={layout.offload!r} needs whole weights, and this model is sharded (FSDP2, tensor parallelism): "
            "leave offload out, or use DDP"
        )
    if not parallelism.is_tensor_parallel:
        # For a lean model too: fully_shard has read its weights as FP32 values.
        return ShardedLayout(policy)
    if policy.is_lean:
        raise ValueError(
            f"precision={str(policy)!r} needs whole weights, and this model is tensor parallel: use "
            f"{str(policy).removesuffix('-lean')!r}"
        )
    return TensorParallelLayout(policy)
