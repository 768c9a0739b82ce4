"""``WeightSlots``: the parameter slots of a model during one forward, and the working copy of a tensor by identity.

The working copy is autocast's weight cache. As under ``torch.autocast`` (``ATen/autocast_mode.cpp``, ``cached_cast``),
a weight is FP32 for every reader, and a lower-precision op receives its 16-bit copy. This cache is filled by the
update instead of by the first cast, and returns an alias of the copy with a backward that unscales.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_mp.borders import AliasSetUse, ScaleProvider, original_of, unscaling_aliases
from hf_mp.casting.watched import track_data_writes
from hf_mp.kernels.native import native
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.working_copies import is_master

# Weights share an unscale node up to this many elements. On a GPU a node costs the host more than gradients that wait
# for each other, up to 48 MiB of them, cost the memory.
_GROUP_ELEMENTS = {"cpu": 2**18}
_GROUP_ELEMENTS_ELSEWHERE = 2**23

_Pairs = Iterable[tuple[Tensor, Tensor | None]]  # weights, each with its working copy if it has one

_DATA: Any = Tensor.data  # the property itself, which the class below overrides


class ParameterSlot(NamedTuple):
    """Entry of a module's ``_parameters`` from which the module reads a weight."""

    module: nn.Module
    name: str
    weight: Tensor
    has_copy: bool  # whether the weight has a working copy from the first forward on
    holds_copy: bool  # whether the slot holds that copy during a forward


class WeightAlias(Tensor):
    """Alias of a weight in its parameter slot.

    ``data``, hooks and deep copies are those of the weight: it records the access to its data, and its hooks receive
    unscaled gradients.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    weight: Tensor

    @property
    def data(self) -> Tensor:
        return self.weight.data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.weight.data = value
        # A split weight rounds the value, and later forwards use this alias.
        _DATA.__set__(self, _DATA.__get__(self.weight))

    def register_hook(self, hook: Any) -> Any:
        return self.weight.register_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.weight, memo)


class WeightAliases(NamedTuple):
    """A weight or an external tensor, and the tensors that represent it during a forward."""

    weight: Tensor
    alias: Tensor  # in the dtype of the weight; the weight itself if nothing is unscaled
    copy: Tensor | None  # alias of the working copy


class AliasSet:
    """Aliases of all weights of a model and the unscale nodes that made them. Used by one forward after another."""

    def __init__(
        self,
        filled: list[tuple[ParameterSlot, Tensor]],
        aliases: dict[int, WeightAliases],
        with_copies: list[Tensor],
        copies: list[Tensor],
    ) -> None:
        self.filled, self.aliases = filled, aliases
        self._with_copies, self._copies = with_copies, copies  # weights with working copies, and these
        self._in_slots = [value for _, value in filled if value.requires_grad]
        self.nodes = {value.grad_fn for value in self._in_slots}
        self.use: weakref.ref[AliasSetUse] | None = None  # of the last forward
        # The same look-up for the kernels in C++: a tensor without a copy is left to Python, which makes one.
        self.native_copies: Any = None if (module := native()) is None else module.Copies()
        for each in {id(each): each for each in aliases.values()}.values():
            self._add_native(each)
        self.weights = {id(each.weight) for each in aliases.values()}  # identities

    def add(self, aliases: WeightAliases, copy: Tensor) -> None:
        """Add the working copy ``copy`` of a weight that had none."""
        self.aliases.update(dict.fromkeys(map(id, aliases), aliases))
        self._with_copies.append(aliases.weight)
        self._copies.append(copy)
        if aliases.copy is not None and aliases.copy.grad_fn is not None:
            self.nodes.add(aliases.copy.grad_fn)
        self._add_native(aliases)

    def _add_native(self, aliases: WeightAliases) -> None:
        if self.native_copies is not None and (aliases.copy is not None or aliases.alias.requires_grad):
            for one in {id(aliases.weight): aliases.weight, id(aliases.alias): aliases.alias}.values():
                self.native_copies.add(one, aliases.copy)

    def is_free(self) -> bool:
        """Whether the graph of the last forward is gone or its backward is over."""
        use = None if self.use is None else self.use()
        return use is None or use.is_over

    def has_working_copies_of(self, layout: WeightLayout) -> bool:
        """Whether the working copies in ``layout`` are still those that the aliases were made of."""
        return [*map(id, layout.working_copies(self._with_copies).values())] == [*map(id, self._copies)]

    def is_intact(self) -> bool:
        """Whether no forward has written an alias in a slot out of place, or left a hook there."""
        nodes = self.nodes
        return all([x.grad_fn in nodes and not x._backward_hooks and not x.retains_grad for x in self._in_slots])


class WeightSlots:
    """Fills the parameter slots of a model for one forward, and restores them.

    If gradients are scaled, the slot of a trained weight holds an alias of it, which is an output of an unscale node.
    So the gradients of calls that no torch function mode receives, as in custom autograd functions, are unscaled too.
    Otherwise the slot keeps the weight. A lower-precision op gets the working copy by :meth:`working_copy`.

    Args:
        layout: has the working copies.
        scale_provider: provides S and 1/S for the unscale nodes.
        has_unscale_nodes: whether weights without a working copy have an unscale node too.
        groups_weights: whether several weights may have one unscale node.
        holds_copies: whether slots hold the working copies: compiled code cannot look them up.
    """

    is_active = False  # whether the forward runs

    def __init__(
        self,
        layout: WeightLayout,
        scale_provider: ScaleProvider,
        *,
        has_unscale_nodes: bool,
        groups_weights: bool,
        holds_copies: bool,
    ) -> None:
        self.layout, self.scale_provider = layout, scale_provider
        self.has_grad = torch.is_grad_enabled()
        self.has_unscale_nodes, self.groups_weights, self.holds_copies = has_unscale_nodes, groups_weights, holds_copies
        # By the identity of the weight, of its alias and of its copy; external tensors too.
        self.aliases: dict[int, WeightAliases] = {}
        self._in_model = set[int]()  # identities of the weights of the model
        self._alias_set: AliasSet | None = None
        self._exposed = set[int]()  # identities of weights with ``.data`` read or set in this forward
        self._filled = list[tuple[ParameterSlot, Tensor]]()

    def make_alias_set(self, slots: list[ParameterSlot]) -> AliasSet:
        """Make the aliases of the weights in ``slots``."""
        with_copies = [slot.weight for slot in slots if slot.has_copy]
        # Refreshed before an alias exists: afterwards, memory that is shared may be written unseen.
        copies = self.layout.working_copies(with_copies)
        return AliasSet(self.alias_weights(slots, copies), self.aliases, with_copies, list(copies.values()))

    def use_alias_set(self, aliases: AliasSet) -> None:
        """Use ``aliases`` in this forward."""
        # Copies: a forward may change both.
        self._filled, self.aliases, self._alias_set = list(aliases.filled), dict(aliases.aliases), aliases
        self._in_model = aliases.weights
        if aliases.native_copies is not None:
            aliases.native_copies.validate()
        self.alias_set_use = AliasSetUse(aliases.nodes, self.scale_provider)
        aliases.use = weakref.ref(self.alias_set_use)

    @property
    def native_copies(self) -> Any:
        """The look-up of working copies for the kernels in C++; None without them."""
        return None if self._alias_set is None else self._alias_set.native_copies

    def alias_weights(
        self, slots: Sequence[ParameterSlot], copies: dict[int, Tensor]
    ) -> list[tuple[ParameterSlot, Tensor]]:
        """Make aliases of the weights in ``slots``; ``copies`` are working copies by the identity of their weight.

        Returns:
            The slots to fill, each with its value.
        """
        self._in_model = self._in_model | {id(slot.weight) for slot in slots}
        trained = {id(slot.weight): slot.weight for slot in slots if self.has_grad and slot.weight.requires_grad}
        new = [weight for weight in trained.values() if id(weight) not in self.aliases]  # FSDP fills a slot at a time
        unscaled = [(one, copies.get(id(one))) for one in new if self.has_unscale_nodes or id(one) in copies]
        for weight in new if self.has_unscale_nodes else ():
            # Before its memory is shared with an alias: a copy that is made later must hear of other views of it.
            if is_master(weight):
                track_data_writes(weight)
        for group in _node_groups(unscaled, None if self.groups_weights else 1):
            self.alias_group(group)
        filled, placed = [], set[int]()
        for slot in slots:
            weight, aliases = slot.weight, self.aliases.get(id(slot.weight))
            if aliases is None:
                aliases = WeightAliases(weight, weight, copies.get(id(weight)))
                self._set(aliases)
            # One alias in all slots of a tied weight would sum gradients in 16 bits that the layout stores scaled.
            elif self.layout.keeps_scaled_gradients and id(weight) in trained and id(weight) in placed:
                aliases = self.alias_group([(weight, None)])
            placed.add(id(weight))
            holds_copy = slot.holds_copy or (slot.has_copy and self.holds_copies)
            value = aliases.copy if holds_copy and aliases.copy is not None else aliases.alias
            if value is not weight:
                filled.append((slot, value))
        return filled

    def alias_group(self, pairs: _Pairs) -> WeightAliases:
        """Make one unscale node for several tensors and their working copies. Returns the aliases of the last one."""
        tensors, uncast_copies = zip(*pairs, strict=True)
        aliases, copies = unscaling_aliases(
            tensors, uncast_copies, self.scale_provider, with_aliases=self.has_unscale_nodes
        )
        for each in map(WeightAliases, tensors, aliases, copies):
            # Dynamo traces plain tensors alone. DTensors and fake tensors keep their class.
            is_plain = type(each.alias) is Tensor and not self.holds_copies
            if is_plain and each.alias is not each.weight and id(each.weight) in self._in_model:
                each.alias.__class__ = WeightAlias
                each.alias.weight = each.weight  # type: ignore[attr-defined]
            self._set(each)
        return each

    def _set(self, aliases: WeightAliases) -> None:
        self.aliases.update((id(each), aliases) for each in aliases if each is not None)

    def working_copy(self, tensor: Tensor) -> Tensor | None:
        """The working copy of the weight that ``tensor`` is or is an alias of. A weight without one gets it now.

        Returns:
            An alias of the copy, of the shape of ``tensor``, in FP16/BF16. None if ``tensor`` is no weight of the
            model, if this forward has written the weight, and where gradients were enabled in a forward without.
        """
        aliases = self.aliases.get(id(tensor))
        if aliases is None or tensor is aliases.copy or (torch.is_grad_enabled() and not self.has_grad):
            return None
        if aliases.copy is None:
            if (made := self._make_copy(aliases)) is None:
                return None
            aliases = made
        is_written = id(aliases.weight) in self._exposed or self.layout.copies.is_stale(aliases.weight)
        return None if is_written else aliases.copy

    def _make_copy(self, aliases: WeightAliases) -> WeightAliases | None:
        """``aliases`` with a working copy; None if its tensor can have none."""
        weight = aliases.weight
        if id(weight) not in self._in_model or not is_master(weight):
            return None
        if (stored := self.layout.working_copies([weight]).get(id(weight))) is None:
            return None
        made: Tensor | None = stored
        if self.has_grad and weight.requires_grad:
            with torch.enable_grad():
                _, (made,) = unscaling_aliases([weight], [stored], self.scale_provider, with_aliases=False)
        aliases = aliases._replace(copy=made)
        self._set(aliases)
        if self._alias_set is not None:
            self._alias_set.add(aliases, stored)
        return aliases

    def invalidate(self, weight: Tensor) -> None:
        """Use the working copy of ``weight`` no more in this forward: it may be written through ``.data``."""
        self._exposed.add(id(weight))
        if self.native_copies is not None and (aliases := self.aliases.get(id(weight))) is not None:
            self.native_copies.invalidate(aliases.weight)
            self.native_copies.invalidate(aliases.alias)

    def recast_with_grad(self, tensor: Tensor) -> Tensor:
        """``tensor``, but for a working copy a cast of its weight.

        For code that enables gradients in a forward without: the results are external tensors, and nothing is scaled.
        """
        aliases = self.aliases.get(id(tensor))
        return tensor if aliases is None or aliases.copy is not tensor else aliases.weight.to(tensor.dtype)

    def original_of(self, tensor: Tensor) -> Tensor:
        """The weight or external tensor that ``tensor`` is an alias of; ``tensor`` itself if it is none."""
        aliases = self.aliases.get(id(tensor))
        return original_of(tensor) if aliases is None else aliases.weight

    def hold(self, results: Sequence[Tensor]) -> None:
        """Keep other forwards from using the same aliases while the graph of ``results`` lives."""
        with torch._C.DisableTorchFunctionSubclass():  # a deferred output would be cast
            nodes: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
        for node in nodes:
            node.alias_set_use = self.alias_set_use

    def __enter__(self) -> None:
        """Fill the slots."""
        self.is_active = True
        for slot, value in self._filled:
            slot.module._parameters[slot.name] = value  # type: ignore[assignment]
        self._versions = [value._version for _, value in self._filled]  # a write in place raises it

    def _restore_slots(self, filled: list[tuple[ParameterSlot, Tensor]]) -> None:
        for slot, value in filled:
            if slot.module._parameters.get(slot.name) is value:  # else the forward has put another there
                slot.module._parameters[slot.name] = slot.weight  # type: ignore[assignment]

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Restore the slots. A RuntimeError if a copy in a slot was written and its weight was not."""
        self.is_active = False
        written = None
        for version, (slot, value) in zip(self._versions, self._filled, strict=False):
            if value._version != version and not torch.equal(value, slot.weight.to(value.dtype)):
                value.detach().copy_(slot.weight)
                written = f"{type(slot.module).__name__}.{slot.name}"
        self._restore_slots(self._filled)
        # Raised in place of torch's own error about the written copy, which gives no advice, and of the exception by
        # which a checkpoint stops a recomputation.
        is_torchs = isinstance(error, RuntimeError | None) or type(error).__module__ == "torch.utils.checkpoint"
        if written is not None and is_torchs:
            raise RuntimeError(
                f"a forward wrote into {written} in place: only its 16-bit copy was written, not the weight. Write "
                "weights between forwards"
            )


def _node_groups(pairs: _Pairs, elements: int | None) -> Iterator[_Pairs]:
    """Group weights of one device of at most ``elements`` together; a larger weight, or one with hooks, is alone.

    An unscale node returns gradients for all of its weights or None, and reentrant checkpointing runs it once for each
    part of the model.
    """
    group: list[tuple[Tensor, Tensor | None]] = []
    free, device = 0, None
    for weight, working_copy in pairs:
        most = elements or _GROUP_ELEMENTS.get(weight.device.type, _GROUP_ELEMENTS_ELSEWHERE)
        has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # no call: this runs for each weight
        if has_hooks or (size := weight.numel()) >= most:
            yield [(weight, working_copy)]
            continue
        if size > free or weight.device != device:
            if group:
                yield group
            group, free, device = [], most, weight.device
        group.append((weight, working_copy))
        free -= size
    if group:
        yield group
