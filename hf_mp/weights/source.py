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
from hf_mp.weights.fused_adamw import Clipping, KeptUpdates, fused_step_whole
from hf_mp.weights.gathered_weights import GatheredSlots
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.reading_layout import InferenceLayout
from hf_mp.weights.slots import AliasSet, WeightSlots
from hf_mp.weights.split_layout import SplitLayout
from hf_mp.weights.spread_layouts import TensorParallelLayout, TransientLayout
from hf_mp.weights.weight_uses import WeightUses

_MOST_SETS = 4  # kept for the forwards of one kind: so many in one backward cost no new borders


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
        self.by_kind: dict[Hashable, list[AliasSet]] = {}


class Entry(Protocol):
    """The attached forward of the model or of a part of it."""

    borders: AliasCache


class WeightStore:
    """Owns, for each weight of one model: its FP32 master, its working copy, its border, and what lies in its slot.

    ``layout`` stores masters and copies, ``uses`` finds the weights of lower-precision ops. :meth:`prepare_forward`
    returns the weights of a forward; :meth:`restore` leaves ordinary parameters.
    """

    def __init__(self, layout: WeightLayout, scale_provider: Any) -> None:
        self.layout, self.scale_provider = layout, scale_provider
        self.uses = WeightUses(lambda op: False)
        self._intercepts_by_key: dict[Hashable, bool] = {}  # of ForwardWeights
        self._borders: Callable[[], AliasCache | None] = lambda: None  # a weak reference
        self._nodes = ForwardNodes()
        self.threads: list[int] = []  # identifiers, one for each forward that runs

    def refuse_other_threads(self) -> None:
        """Raise a RuntimeError if another thread runs a forward of the model: its weights are in the modules."""
        if set(self.threads) - {threading.get_ident()}:
            raise RuntimeError(
                "a forward with gradients began while another thread ran one of the same attached model, and a module "
                "can hold the 16-bit weights of only one: run them one after the other, or give the other thread a "
                "copy.deepcopy of the model"
            )

    def reset_uses(self, lowers: Callable[[Callable[..., Any] | None], bool], ruled: Iterable[nn.Module]) -> None:
        """Forget the uses of weights: autocast ``lowers`` other ops, or rules hold for other modules (``ruled``)."""
        self.uses = WeightUses(lowers, ruled)
        self._intercepts_by_key.clear()
        self.forget_borders()

    def lasting_borders(self) -> AliasCache:
        """The borders that the attached forwards of the model hold; new ones where nobody holds any."""
        borders = self._borders()
        if borders is None:
            borders = AliasCache()
            self._borders = weakref.ref(borders)
        return borders

    def forget_borders(self) -> None:
        """Let go of all borders that are kept."""
        if (borders := self._borders()) is not None:
            borders.walk = None
            borders.by_kind.clear()

    def prepare_forward(
        self, model: nn.Module, forward: Entry, is_scaled: bool, shares_borders: bool, holds_copies: bool
    ) -> ForwardWeights:
        """The weights of ``forward``, which is about to run; masters are made first.

        ``is_scaled``: whether the loss is; ``shares_borders``: whether several weights may have one unscale node;
        ``holds_copies``: whether slots hold the working copies.
        """
        has_grad, walk, borders = torch.is_grad_enabled(), Walk(model), forward.borders
        if walk != borders.walk:
            borders.by_kind.clear()
            borders.walk, borders.has_masters = walk, False
        if has_grad and not borders.has_masters:
            self.layout.prepare_weights(model)
            borders.by_kind.clear()
            borders.walk, borders.has_masters = Walk(model), True
        settings = {
            "has_borders": has_grad and (is_scaled or self.layout.keeps_scaled_gradients),
            "shares_borders": shares_borders,
            "holds_copies": holds_copies,
        }
        slots: WeightSlots
        if self.layout.keeps_copies:
            slots = WeightSlots(self.layout, self.scale_provider, **settings)
            slots.use_alias_set(self._alias_set(model, slots, borders, (has_grad, *settings.values())))
        else:
            slots = GatheredSlots(model, self.uses, self.layout, self.scale_provider, **settings)
        external = ExternalTensors(slots, self._nodes, is_scaled=has_grad and is_scaled)
        if isinstance(slots, GatheredSlots):
            slots.external = external
        return ForwardWeights(slots, external, (id(forward), has_grad, model.training), self._intercepts_by_key)

    def _alias_set(self, model: nn.Module, slots: WeightSlots, borders: AliasCache, key: Hashable) -> AliasSet:
        """The aliases that a forward uses: a stored set that is free, or a new one."""
        sets = borders.by_kind.setdefault(key, [])
        if not all([one.has_working_copies_of(self.layout) for one in sets]):
            # All of them: a node holds the AccumulateGrad of a weight, which torch keeps when a weight is resized.
            borders.by_kind.clear()
            sets = borders.by_kind[key] = []
        sets[:] = [one for one in sets if one.is_intact()]
        for one in sets:
            if one.is_free():
                return one
        made = slots.make_alias_set(self.uses.find_slots(model))
        # A tensor that was computed is another in the next forward.
        are_leaves = all([weight.is_leaf for weight in borders.walk.weights])
        if are_leaves and len(sets) < _MOST_SETS:
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
            layout.take_over_communication(model, parallelism, self.scale_provider, in_fp32)

    # Update

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step from now on; its state becomes FP32, as the masters are."""
        optimizer = self.layout.wrap_optimizer(optimizer)
        state_to_fp32(optimizer)
        return optimizer

    def update(
        self,
        optimizer: Optimizer,
        replaced_step: Callable[..., Any] | None,
        updates: KeptUpdates,
        clipping: Clipping | None,
        found_inf: Tensor | None,
    ) -> bool:
        """Write masters and working copies in one launch (:func:`fused_step_whole`); False: ``optimizer`` has to step.

        The optimizer of a lean layout has a kernel of its own.
        """
        given = optimizer, replaced_step, self.layout.copies, updates, clipping, found_inf
        return not self.layout.keeps_scaled_gradients and fused_step_whole(*given)

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
        self.forget_borders()
        for parameter in () if model is None else model.parameters():
            untrack_data_writes(parameter)
        self.layout.restore(model)


def make_layout(policy: PrecisionPolicy, offload: str | None = None) -> WeightLayout:
    """The layout that a policy's ``params`` asks for; ``offload``: what of a lean one is in host memory."""
    if offload is not None:
        # By name, so that a training without it imports nothing of it.
        return resolve_name("hf_mp.weights.offload.layout:OffloadLayout")(policy, offload)
    return SplitLayout(policy) if policy.is_lean else WeightLayout(policy)


def make_reading_layout(policy: PrecisionPolicy, *, trained_alone: bool) -> WeightLayout:
    """The layout of a model that is read and not trained, as :class:`InferenceLayout`."""
    return InferenceLayout(policy, trained_alone=trained_alone)


def _spread_layout(layout: WeightLayout, parameters: Iterable[Tensor], parallelism: Parallelism) -> WeightLayout:
    """The layout for ``parameters`` as they are sharded: ``layout`` itself where it can stay."""
    # Plain tensors need no other layout: DDP holds whole weights.
    if isinstance(layout, TransientLayout) or not any(map(is_dtensor, parameters)):
        return layout
    policy = layout.policy
    if layout.offload is not None:
        raise ValueError(
            f"offload={layout.offload!r} needs whole weights, and this model is sharded (FSDP2, tensor parallelism): "
            "leave offload out, or use DDP"
        )
    if not parallelism.is_tensor_parallel:
        # For a lean model too: fully_shard has read its weights as FP32 values.
        return TransientLayout(policy)
    if policy.is_lean:
        raise ValueError(
            f"precision={str(policy)!r} needs whole weights, and this model is tensor parallel: use "
            f"{str(policy).removesuffix('-lean')!r}"
        )
    return TensorParallelLayout(policy)
