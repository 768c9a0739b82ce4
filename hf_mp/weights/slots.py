"""``WeightSlots``: the parameter slots of one forward, and its weight cache.

As in ``torch.autocast`` (``cached_cast`` in ``ATen/autocast_mode.cpp``), lower-precision ops receive a 16-bit copy of a
weight, and other code reads it in FP32. The update fills this cache, not the first cast.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.casting.data_tracking import track_data_writes
from hf_mp.kernels.native import native
from hf_mp.scale_boundary import AliasSetUse, ScaleProvider, original_of, unscaling_aliases
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.working_copies import is_master

# Elements of the weights that share an unscale node, which costs host time. Their gradients, up to 48 MiB on a GPU,
# exist together.
_GROUP_ELEMENTS = {"cpu": 2**18}
_GROUP_ELEMENTS_ELSEWHERE = 2**23

_Pairs = Iterable[tuple[Tensor, Tensor | None]]  # weights, working copies

_DATA: Any = Tensor.data  # the property itself, which the class below overrides


class ParameterSlot(NamedTuple):
    """Where a module stores a weight, and whether a working copy replaces it."""

    module: nn.Module
    name: str
    weight: Tensor
    has_copy: bool  # whether the weight has a working copy from the first forward on
    holds_copy: bool  # whether the slot holds that copy during a forward


class WeightAlias(Tensor):
    """Alias of a weight in a slot; ``data``, hooks and deep copies are those of the weight."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    weight: Tensor

    @property
    def data(self) -> Tensor:
        return self.weight.data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.weight.data = value
        # For later forwards. A split weight has rounded the value.
        _DATA.__set__(self, _DATA.__get__(self.weight))

    def register_hook(self, hook: Any) -> Any:
        return self.weight.register_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.weight, memo)


class WeightAliases(NamedTuple):
    """A weight or an external tensor, and its aliases of one forward."""

    weight: Tensor
    alias: Tensor  # in the dtype of the weight; the weight itself if it has no unscale node
    copy: Tensor | None  # alias of the working copy


class AliasSet:
    """Aliases of all weights of a model, with their unscale nodes, for one forward at a time."""

    def __init__(
        self,
        filled: list[tuple[ParameterSlot, Tensor]],
        aliases: dict[int, WeightAliases],
        with_copies: list[Tensor],
        copies: list[Tensor],
    ) -> None:
        self.filled, self.aliases = filled, aliases
        self._with_copies, self._copies = with_copies, copies  # weights and their working copies
        self._in_slots = [value for _, value in filled if value.requires_grad]
        self.nodes = {value.grad_fn for value in self._in_slots}  # unscale nodes
        self.use: weakref.ref[AliasSetUse] | None = None  # by the last forward
        # Cache for the C++ kernels, which leave a tensor without a copy to Python.
        module = native()
        self.native_copies: Any = None if module is None else module.Copies()
        for each in {id(each): each for each in aliases.values()}.values():
            self._add_native(each)
        self.weight_ids = {id(each.weight) for each in aliases.values()}

    def add(self, aliases: WeightAliases, stored_copy: Tensor) -> None:
        self.aliases.update(dict.fromkeys(map(id, aliases), aliases))
        self._with_copies.append(aliases.weight)
        self._copies.append(stored_copy)
        if aliases.copy is not None and aliases.copy.grad_fn is not None:
            self.nodes.add(aliases.copy.grad_fn)
        self._add_native(aliases)

    def _add_native(self, aliases: WeightAliases) -> None:
        if self.native_copies is not None and (aliases.copy is not None or aliases.alias.requires_grad):
            for one in {id(aliases.weight): aliases.weight, id(aliases.alias): aliases.alias}.values():
                self.native_copies.add(one, aliases.copy)

    def is_free(self) -> bool:
        """Whether the last graph is freed or its backward is over."""
        use = None if self.use is None else self.use()
        return use is None or use.is_over

    def has_working_copies_of(self, layout: WeightLayout) -> bool:
        """Whether ``layout`` still has the working copies that are aliased."""
        present = layout.working_copies(self._with_copies).values()
        return [*map(id, present)] == [*map(id, self._copies)]

    def is_intact(self) -> bool:
        """Whether no forward has written an alias in place, or registered a hook on it."""
        nodes = self.nodes
        return all([x.grad_fn in nodes and not x._backward_hooks and not x.retains_grad for x in self._in_slots])


class WeightSlots:
    """Fills the parameter slots of a model for one forward, and restores them.

    If gradients are scaled, the slot of a trained weight holds an output of an unscale node, also for calls that no
    torch function mode intercepts, as in custom autograd functions.

    Args:
        layout: has the working copies.
        scale_provider: provides S and 1/S.
        aliases_fp32_weights: whether FP32 weights have aliases, and not only working copies.
        groups_weights: whether several weights may have one unscale node.
        holds_copies: whether slots hold the working copies, for compiled code.
    """

    is_active = False  # whether the forward runs

    def __init__(
        self,
        layout: WeightLayout,
        scale_provider: ScaleProvider,
        *,
        aliases_fp32_weights: bool,
        groups_weights: bool,
        holds_copies: bool,
    ) -> None:
        self.layout, self.scale_provider = layout, scale_provider
        self.has_grad = torch.is_grad_enabled()
        self.aliases_fp32_weights = aliases_fp32_weights
        self.groups_weights, self.holds_copies = groups_weights, holds_copies
        self.aliases: dict[int, WeightAliases] = {}  # by the identity of each tensor in a WeightAliases
        self._alias_set: AliasSet | None = None
        # Identities of weights: those of the model, and those that may be written through ``.data``.
        self._in_model, self._exposed = set[int](), set[int]()
        self._filled = list[tuple[ParameterSlot, Tensor]]()

    def make_alias_set(self, slots: list[ParameterSlot]) -> AliasSet:
        with_copies = [slot.weight for slot in slots if slot.has_copy]
        # First, because writes to memory that an alias shares are undetected.
        copies = self.layout.working_copies(with_copies)
        return AliasSet(self.alias_weights(slots, copies), self.aliases, with_copies, list(copies.values()))

    def use_alias_set(self, aliases: AliasSet) -> None:
        """Fill the slots from ``aliases``, and mark the set as used (:meth:`AliasSet.is_free`)."""
        self._filled, self.aliases = list(aliases.filled), dict(aliases.aliases)
        self._alias_set, self._in_model = aliases, aliases.weight_ids
        if aliases.native_copies is not None:
            aliases.native_copies.validate()
        self.alias_set_use = AliasSetUse(aliases.nodes, self.scale_provider)
        aliases.use = weakref.ref(self.alias_set_use)

    @property
    def native_copies(self) -> Any:
        """Weight cache of the C++ kernels."""
        return None if self._alias_set is None else self._alias_set.native_copies

    def alias_weights(
        self, slots: Sequence[ParameterSlot], copies: dict[int, Tensor]
    ) -> list[tuple[ParameterSlot, Tensor]]:
        """Make aliases of the weights in ``slots`` and of their ``copies``; return the slots to fill with values."""
        self._in_model = self._in_model | {id(slot.weight) for slot in slots}
        trained = {id(slot.weight): slot.weight for slot in slots if self.has_grad and slot.weight.requires_grad}
        self._unscale([one for one in trained.values() if id(one) not in self.aliases], copies)
        filled, in_slot = [], set[int]()
        for slot in slots:
            weight, aliases = slot.weight, self.aliases.get(id(slot.weight))
            is_tied_and_trained = id(weight) in in_slot and id(weight) in trained
            if aliases is None:
                aliases = WeightAliases(weight, weight, copies.get(id(weight)))
                self._set(aliases)
            elif is_tied_and_trained and self.layout.keeps_scaled_gradients:
                # Autograd would sum the gradients of one alias in 16 bits.
                aliases = self.alias_group([(weight, None)])
            in_slot.add(id(weight))
            holds_copy = slot.holds_copy or (slot.has_copy and self.holds_copies)
            value = aliases.copy if holds_copy and aliases.copy is not None else aliases.alias
            if value is not weight:
                filled.append((slot, value))
        return filled

    def _unscale(self, weights: list[Tensor], copies: dict[int, Tensor]) -> None:
        if self.aliases_fp32_weights:
            for weight in filter(is_master, weights):
                # Before an alias shares its memory, so that a later copy detects writes through other views.
                track_data_writes(weight)
        pairs = [(one, copies.get(id(one))) for one in weights if self.aliases_fp32_weights or id(one) in copies]
        for group in _node_groups(pairs, None if self.groups_weights else 1):
            self.alias_group(group)

    def alias_group(self, pairs: _Pairs) -> WeightAliases:
        """Make one unscale node for tensors and their working copies; return the aliases of the last one."""
        tensors, working_copies = zip(*pairs, strict=True)
        aliases, copies = unscaling_aliases(
            tensors, working_copies, self.scale_provider, with_aliases=self.aliases_fp32_weights
        )
        for each in map(WeightAliases, tensors, aliases, copies):
            # Dynamo traces plain tensors only; DTensors and fake tensors keep their class.
            is_plain = type(each.alias) is Tensor and not self.holds_copies
            if is_plain and each.alias is not each.weight and id(each.weight) in self._in_model:
                each.alias.__class__ = WeightAlias
                each.alias.weight = each.weight  # type: ignore[attr-defined]
            self._set(each)
        return each

    def _set(self, aliases: WeightAliases) -> None:
        self.aliases.update((id(each), aliases) for each in aliases if each is not None)

    def working_copy(self, tensor: Tensor) -> Tensor | None:
        """Return an alias of the FP16/BF16 working copy of a weight, given the weight or its alias.

        None for any other tensor, for a weight that was written in this forward or cannot have a copy, and if a forward
        without gradients has enabled them.
        """
        aliases = self.aliases.get(id(tensor))
        if aliases is None or tensor is aliases.copy or (torch.is_grad_enabled() and not self.has_grad):
            return None
        if aliases.copy is None:
            aliases = self._make_copy(aliases)
        if aliases is None:
            return None
        is_written = id(aliases.weight) in self._exposed or self.layout.copies.is_stale(aliases.weight)
        return None if is_written else aliases.copy

    def _make_copy(self, aliases: WeightAliases) -> WeightAliases | None:
        """Return ``aliases`` with a new working copy; None if the tensor cannot have one."""
        weight = aliases.weight
        can_have_copy = id(weight) in self._in_model and is_master(weight)
        stored = self.layout.working_copies([weight]).get(id(weight)) if can_have_copy else None
        if stored is None:
            return None
        alias: Tensor | None = stored
        if self.has_grad and weight.requires_grad:
            with torch.enable_grad():
                _, (alias,) = unscaling_aliases([weight], [stored], self.scale_provider, with_aliases=False)
        aliases = aliases._replace(copy=alias)
        self._set(aliases)
        if self._alias_set is not None:
            self._alias_set.add(aliases, stored)
        return aliases

    def invalidate(self, weight: Tensor) -> None:
        """Stop using the working copy of ``weight``, which may be written through ``.data``, in this forward."""
        self._exposed.add(id(weight))
        if self.native_copies is not None and (aliases := self.aliases.get(id(weight))) is not None:
            self.native_copies.invalidate(aliases.weight)
            self.native_copies.invalidate(aliases.alias)

    def recast_with_grad(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``; for a working copy, a new cast of its weight, with an unscaled gradient."""
        aliases = self.aliases.get(id(tensor))
        return tensor if aliases is None or aliases.copy is not tensor else aliases.weight.to(tensor.dtype)

    def original_of(self, tensor: Tensor) -> Tensor:
        """Return the weight or external tensor of the alias ``tensor``; any other tensor itself."""
        aliases = self.aliases.get(id(tensor))
        return original_of(tensor) if aliases is None else aliases.weight

    def keep_alias_set_in_use(self, results: Sequence[Tensor]) -> None:
        """Reserve the alias set while the graph of ``results`` exists: their nodes get a reference to its use."""
        with torch._C.DisableTorchFunctionSubclass():  # a read of a DeferredOutput would cast it
            nodes: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
        for node in nodes:
            node.alias_set_use = self.alias_set_use

    def __enter__(self) -> None:
        self.is_active = True
        for slot, value in self._filled:
            slot.module._parameters[slot.name] = value  # type: ignore[assignment]
        self._versions = [value._version for _, value in self._filled]  # raised by in-place writes

    def _restore_slots(self, filled: list[tuple[ParameterSlot, Tensor]]) -> None:
        for slot, value in filled:
            if slot.module._parameters.get(slot.name) is value:  # the forward may have set another
                slot.module._parameters[slot.name] = slot.weight  # type: ignore[assignment]

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Restore the slots; a RuntimeError if the forward wrote a working copy in one."""
        self.is_active = False
        written = None
        for version, (slot, value) in zip(self._versions, self._filled, strict=False):
            if value._version != version and not torch.equal(value, slot.weight.to(value.dtype)):
                value.detach().copy_(slot.weight)
                written = f"{type(slot.module).__name__}.{slot.name}"
        self._restore_slots(self._filled)
        # torch's own error about the write, or the exception with which a checkpoint stops a recomputation.
        is_replaceable = isinstance(error, RuntimeError | None) or type(error).__module__ == "torch.utils.checkpoint"
        if written is not None and is_replaceable:
            raise RuntimeError(
                f"a forward wrote into {written} in place: only its 16-bit copy was written, not the weight. Write "
                "weights between forwards"
            )


def _node_groups(pairs: _Pairs, elements: int | None) -> Iterator[_Pairs]:
    """Yield groups of weights for one unscale node each: on one device, and of at most ``elements``.

    A larger weight, or one with hooks, is alone: reentrant checkpointing runs a node once for each part of the model.
    """
    group: list[tuple[Tensor, Tensor | None]] = []
    free, device = 0, None
    for weight, working_copy in pairs:
        size, limit = weight.numel(), elements or _GROUP_ELEMENTS.get(weight.device.type, _GROUP_ELEMENTS_ELSEWHERE)
        if size >= limit or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            yield [(weight, working_copy)]
            continue
        if group and (size > free or weight.device != device):
            yield group
            group = []
        if not group:
            free, device = limit, weight.device
        group.append((weight, working_copy))
        free -= size
    if group:
        yield group
