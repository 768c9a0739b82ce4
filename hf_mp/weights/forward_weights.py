"""``ForwardWeights``: the weights of one forward, each in its module's slot, and the rule for all else from outside."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_mp._warnings import module_of_frame
from hf_mp.borders import BorderUse, Crossings, add_late_borders, inward_borders, leads_inside, outside_of
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.outside_reads import OF_THE_TENSOR_ITSELF
from hf_mp.weights.product_uses import Notes, ProductUses, Slot

# Weights share a border, one autograd node instead of many, up to so many elements: their gradients leave together.
# On a GPU a node costs the host more than gradients that wait for each other, up to 48 MiB of them, cost the memory.
_GROUP_ELEMENTS = {"cpu": 2**18}
_GROUP_ELEMENTS_ELSEWHERE = 2**23

# Calls that are no use of a weight. What is done with its detached value is one.
UNASKED = OF_THE_TENSOR_ITSELF - {Tensor.detach} | {torch.autograd.grad}

_Pairs = Iterable[tuple[Tensor, Tensor | None]]  # weights and their working copies, where products use them


class _Inside(NamedTuple):
    """A weight, and the tensors that stand for it inside of a forward."""

    outside: Tensor
    wide: Tensor  # in the weight's own dtype
    rounded: Tensor | None  # its working copy


class Owner(Protocol):
    """What a forward's weights ask of their owner, the :class:`~hf_mp.weights.source.WeightSource`."""

    layout: WeightLayout
    crossings: Crossings
    uses: ProductUses

    def made_earlier(self, node: Any) -> bool: ...


class BorderSet:
    """Borders of all trained weights of a model, and what lies in the slots behind them."""

    def __init__(
        self, filled: list[tuple[Slot, Tensor]], inside: dict[int, _Inside], rounded: list[Tensor], copies: list[Tensor]
    ) -> None:
        self.filled, self.inside = filled, inside
        self._rounded, self._copies = rounded, copies  # the weights whose slots hold their working copies
        self._behind_borders = [value for _, value in filled if value.requires_grad]
        self.nodes = {value.grad_fn for value in self._behind_borders}
        self.use: weakref.ref[BorderUse] | None = None  # that of the last forward

    def is_free(self) -> bool:
        """Whether no backward through the graph of the last forward is to come."""
        use = None if self.use is None else self.use()
        return use is None or use.is_over

    def has_working_copies_of(self, layout: WeightLayout) -> bool:
        """Whether the working copies in ``layout`` are still those that the borders were made for."""
        return [*map(id, layout.working_copies(self._rounded).values())] == [*map(id, self._copies)]

    def is_intact(self) -> bool:
        """Whether no forward has written in place into what lies in a slot, or left a hook there."""
        behind, nodes = self._behind_borders, self.nodes
        return all([one.grad_fn in nodes and not one._backward_hooks and not one.retains_grad for one in behind])


class ForwardWeights:
    """The weights of one forward, and the rule for everything else that comes from outside.

    While the forward runs, the slot of a weight that products use holds its working copy in 16 bits, behind its border,
    and the slot of any other trained weight an alias of it, behind the same border where gradients are scaled. A slot
    is an entry of a module's ``_parameters``: so calls that no torch function mode sees, such as custom autograd
    functions, cross the border as well. What comes in by another way (a closure, an attribute, an object) was made
    outside if its autograd node is older than the forward, or if it is a leaf. A forward whose calls are watched gives
    it a border where a call first uses it: the first forward of each kind, and all later ones if the first met any.
    Any other forward adds the border when it has ended: see :func:`add_late_borders`.

    Args:
        owner: of the weights.
        kind: of the forward; the first of each kind shows what its calls do.
        model: whose weights they are.
        is_scaled: whether the loss is scaled.
        shares_borders: whether several weights may have one border.
    """

    are_filled = False  # whether the slots hold what is inside: the forward runs
    # Leaves that carry gradients from one part of the model to another; None for all but those that calls have met.
    _carriers: frozenset[int] | None = frozenset()
    _slots: Sequence[Slot] = ()  # where the weights are looked up, if this forward shows what uses them

    def __init__(
        self, owner: Owner, kind: Hashable, model: nn.Module, *, is_scaled: bool, shares_borders: bool
    ) -> None:
        self._owner, self._layout, self._uses = owner, owner.layout, owner.uses
        self.kind, self.model, self.shares_borders = kind, model, shares_borders
        self.has_grad = has_grad = torch.is_grad_enabled()
        self.has_borders = has_grad and (is_scaled or owner.layout.keeps_scaled_gradients)
        self._notes = Notes()
        # Whether to ask as_used() about each call, also where gradient checkpointing makes it again later.
        self.records_uses = kind not in owner.uses.is_watched
        self.is_scaled = has_grad and is_scaled
        # Whether a mode has to see the calls.
        self.is_watched = self.records_uses or owner.uses.is_watched[kind]
        # Whether this forward uses what came from outside, or reads `.data` of a weight, or a dtype to cast by it.
        self.must_be_watched = False
        self._inside: dict[int, _Inside] = {}  # by the identity of what is outside, and of what is inside
        self._outside: set[Any] = set()  # autograd nodes that are known to lead to nothing inside
        self._met: dict[int, Tensor] = {}  # from outside, in a part without grad, which a checkpoint may compute again
        # autograd numbers nodes as they are made; nothing public tells which of two is older.
        self.first_node = torch.autograd._get_sequence_nr()

    def make_set(self, slots: list[Slot]) -> BorderSet:
        """Borders for the weights in ``slots``, and what is behind them."""
        rounded = [slot.weight for slot in slots if slot.in_16_bits]
        # Made fresh before an alias inside exists: anything else that shares the memory may write it unseen.
        copies = self._layout.working_copies(rounded)
        return BorderSet(self._bring_in_all(slots, copies), self._inside, rounded, list(copies.values()))

    def fill_from(self, borders: BorderSet) -> None:
        """Take ``borders`` for this forward."""
        # What lies where. A forward may change both.
        self._filled, self._inside = list(borders.filled), dict(borders.inside)
        self._border_use = BorderUse(borders.nodes, self._owner.crossings)
        borders.use = weakref.ref(self._border_use)

    def _bring_in_all(self, slots: list[Slot], copies: dict[int, Tensor]) -> list[tuple[Slot, Tensor]]:
        """What to put into which of ``slots``; ``copies`` are the weights' working copies, by identity."""
        if self.records_uses:
            self._slots = [*self._slots, *slots]
        trained = {id(slot.weight): slot.weight for slot in slots if self.has_grad and slot.weight.requires_grad}
        crossing = [(one, copies.get(id(one))) for one in trained.values() if self.has_borders or id(one) in copies]
        for group in _border_groups(crossing, None if self.shares_borders else 1):
            self._bring_in_group(group)
        filled, placed = [], set[int]()
        for slot in slots:
            weight, inside = slot.weight, self._inside.get(id(slot.weight))
            if inside is None:
                inside = self._inside[id(weight)] = _Inside(weight, weight, copies.get(id(weight)))
                if inside.rounded is not None:
                    self._inside[id(inside.rounded)] = inside
            # One border for all slots of a tied weight would sum the gradients that the layout takes in 16 bits.
            elif self._layout.keeps_scaled_gradients and id(weight) in trained and id(weight) in placed:
                inside = self._bring_in_group([(weight, None)])
            placed.add(id(weight))
            value = inside.rounded if slot.in_16_bits and inside.rounded is not None else inside.wide
            if value is not weight:
                filled.append((slot, value))
        return filled

    def _bring_in_group(self, pairs: _Pairs) -> _Inside:
        """Make one border for tensors and their working copies, if any; returns what the last one is inside."""
        outside, copies = zip(*pairs, strict=True)
        wide, rounded = inward_borders(outside, copies, self._owner.crossings, with_aliases=self.has_borders)
        by_identity = self._inside
        for inside in map(_Inside, outside, wide, rounded):
            by_identity[id(inside.outside)] = by_identity[id(inside.wide)] = by_identity[id(inside.rounded)] = inside
        by_identity.pop(id(None), None)  # of weights without a working copy
        return inside

    def __enter__(self) -> None:
        """Put what is inside into the slots."""
        self.are_filled = True
        for slot, value in self._filled:
            slot.module._parameters[slot.name] = value  # type: ignore[assignment]
        self._versions = [value._version for _, value in self._filled]  # a write in place raises it

    def _give_back(self, filled: list[tuple[Slot, Tensor]]) -> None:
        for slot, value in filled:
            if slot.module._parameters.get(slot.name) is value:  # else the forward has put another there
                slot.module._parameters[slot.name] = slot.weight  # type: ignore[assignment]

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Give the slots back. A copy that was written, and its weight not, is rounded anew, and the write refused."""
        self.are_filled = False
        written = None
        for version, (slot, value) in zip(self._versions, self._filled, strict=False):
            if value._version != version and not torch.equal(value, slot.weight.to(value.dtype)):
                value.detach().copy_(slot.weight)
                written = f"{type(slot.module).__name__}.{slot.name}"
        self._give_back(self._filled)
        # Also in the place of torch's own error about the written copy, which does not say what to do, and of the
        # signal by which a checkpoint stops computing.
        is_torchs = isinstance(error, RuntimeError | None) or type(error).__module__ == "torch.utils.checkpoint"
        if written is not None and is_torchs:
            raise RuntimeError(
                f"a forward wrote into {written} in place, which the first of its kind did not: only its 16-bit copy "
                "was written, not the weight. Write weights between forwards"
            )

    def data_of(self, tensor: Tensor) -> list[Tensor]:
        """The tensors with the ``.data`` of the weight that ``tensor`` stands for, it first; else ``tensor`` alone."""
        if (inside := self._inside.get(id(tensor))) is None:
            return [tensor]
        self.must_be_watched = True
        self._note(inside, tensor, by_product=False)
        for place, (slot, value) in enumerate(self._filled):
            parameters: Any = slot.module._parameters
            # What is written through `.data` is not in the copy. A forward may have put something else into the slot.
            if value is inside.rounded and parameters.get(slot.name) is value:
                parameters[slot.name] = inside.wide
                self._filled[place] = slot, inside.wide
        return [inside.outside] if inside.wide is inside.outside else [inside.outside, inside.wide]

    def as_used(self, args: Any, kwargs: Any, *, by_product: bool, by_selection: bool) -> tuple[Any, Any]:
        """The arguments of a call in the first forward: a weight that not only products use is given in FP32.

        ``by_selection``: whether the call gives a part or another order of the weight, as products of experts take.
        """

        def given(tensor: Tensor) -> Tensor:
            if (inside := self._inside.get(id(tensor))) is None:
                return tensor
            if by_selection and tensor is inside.rounded and tensor.dim() > 2:
                return tensor
            is_for_products = self._note(inside, tensor, by_product=by_product)
            return inside.wide if tensor is inside.rounded and not is_for_products else tensor

        changed: tuple[Any, Any] = apply_to_tensors(given, (args, dict(kwargs)))
        return changed

    def _note(self, inside: _Inside, tensor: Tensor, *, by_product: bool) -> bool:
        """Note that an op uses ``tensor``, one of ``inside``; returns whether only products have used it so far."""
        uses = self._notes.setdefault((id(inside.outside), tensor is inside.rounded), [])
        uses.append(by_product)
        return all(uses)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that a forward is told of ``tensor``: of a working copy its parameter's, since autocast casts.

        Stacked experts, whose products are in no table, and convolutions tell their own. A weight that is FP32 in the
        first forward stays FP32 if its dtype is read: the next forward would compute otherwise.
        """
        if (inside := self._inside.get(id(tensor))) is None:
            return tensor.dtype
        if tensor is not inside.rounded:
            self._note(inside, tensor, by_product=False)
        elif tensor.dim() > 2:  # later forwards do not intercept .dtype of 3-d weights: answer the same now
            return tensor.dtype
        elif not _is_for_a_product():
            self.must_be_watched = True
        return inside.outside.dtype

    def with_grad(self, tensor: Tensor) -> Tensor:
        """``tensor`` for a part that switches grad on in a forward without: for a working copy, a cast of its weight.

        No border: what such a part makes is outside of every forward, and its gradients are not scaled.
        """
        inside = self._inside.get(id(tensor))
        return tensor if inside is None or inside.rounded is not tensor else inside.outside.to(tensor.dtype)

    def outside_of(self, tensor: Tensor) -> Tensor:
        """The tensor outside that ``tensor`` stands for: a weight, or what a border brought in; else ``tensor``."""
        inside = self._inside.get(id(tensor))
        return outside_of(tensor) if inside is None else inside.outside

    def bring_in_argument(self, tensor: Tensor) -> Tensor:
        """``tensor`` through a border, if it wants a gradient, and none of this model's forwards made it."""
        if not tensor.requires_grad or (tensor.grad_fn is not None and self._owner.made_earlier(tensor.grad_fn)):
            return tensor
        return self._alias(tensor)

    def bring_in(self, tensor: Tensor) -> Tensor:
        """As :meth:`bring_in_argument`, for an argument of a call: if the tensor was made before the forward began.

        Without grad the tensor is remembered, for a thread that computes the call again.
        """
        if not tensor.requires_grad or not self._is_outside(tensor):
            return tensor
        if torch.is_grad_enabled():
            return self._alias(tensor)
        self._met[id(tensor)] = tensor
        return tensor

    def _alias(self, tensor: Tensor) -> Tensor:
        inside = self._inside.get(id(tensor))
        return (self._bring_in_group([(tensor, None)]) if inside is None else inside).wide

    def has_outside(self, values: Iterable[Any]) -> bool:
        """Whether among the arguments of a call is a tensor from outside that wants a gradient."""
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad and self._is_outside(value):
                    return True
            elif isinstance(value, (list, tuple)) and self.has_outside(value):
                return True
        return False

    def _is_outside(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has grad, was made before this forward began, and by no forward of this model."""
        try:
            node = tensor.grad_fn
        except RuntimeError:  # torch tells no node of a view that a custom function made, without grad, and wrote
            return self._is_outside(tensor._base)  # type: ignore[arg-type]
        if id(tensor) in self._met:
            return True
        if node is None:
            return self._carriers is not None and id(tensor) not in self._carriers
        is_early = node._sequence_nr() < self.first_node and not self._owner.made_earlier(node)
        return is_early and not leads_inside(node, self.first_node, self._outside)

    def finish(self, results: Sequence[Tensor]) -> None:
        """The forward has ended with these results: put a border on each edge of its graph that leads outside.

        If there was one, calls are watched from the next forward on: a second derivative takes edges that are made
        later. The first forward of a kind also teaches what it did with the weights.
        """
        if self.records_uses:
            self._uses.record_uses(self.kind, self._slots, self._notes, is_watched=self.must_be_watched)
        if not self.has_grad:
            return
        with torch._C.DisableTorchFunctionSubclass():  # a loss that may stay unread
            nodes: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
        for node in nodes:
            node.border_use = self._border_use  # while one of them lives, no other forward takes these borders
        owner = self._owner
        if self.is_scaled and add_late_borders(results, owner.crossings, self.first_node, owner.made_earlier):
            self._uses.is_watched[self.kind] = True

    @contextmanager
    def recomputing(self, args: tuple[Any, ...] | None) -> Iterator[None]:
        """A context to run a piece of the forward again, in a thread that may number nodes anew.

        There every tensor counts as inside, except leaves other than ``args`` and the tensors from outside that calls
        met in the forward. If ``args`` is None, a leaf counts as outside only if calls met it.
        """
        before = self.first_node, self._carriers
        self.first_node = -1
        self._carriers = None if args is None else frozenset(id(arg) for arg in args if isinstance(arg, Tensor))
        try:
            yield
        finally:
            self.first_node, self._carriers = before

    def is_external_leaf(self, leaf: Tensor) -> bool:
        """Whether ``leaf`` is a weight of this forward, or a tensor from outside that its calls met."""
        return id(leaf) in self._inside or id(leaf) in self._met


# Models of Transformers that read the dtype of a weight to cast what its own product takes, and nothing else. Others
# cast what a norm or a difference takes before (Gemma 4's embedder, Phi-4's audio), which 16 bits would round.
_ENCODER_DECODERS = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pix2struct", "udop", "pop2piano")
_CAST_FOR_PRODUCTS = {
    f"transformers.models.{name}.modeling_{name}" for name in (*_ENCODER_DECODERS, "mamba", "mamba2", "falcon_mamba")
}


def _is_for_a_product() -> bool:
    """Whether the model that reads a dtype casts a product's input by it, as autocast does otherwise."""
    frame = sys._getframe()
    while frame.f_back is not None and module_of_frame(frame).startswith(("hf_mp.", "torch.")):
        frame = frame.f_back
    return module_of_frame(frame) in _CAST_FOR_PRODUCTS


def _border_groups(pairs: _Pairs, elements: int | None) -> Iterator[_Pairs]:
    """Weights of one device, of at most so many ``elements`` together; a larger weight, or one with hooks, alone.

    A border gives all of its weights a gradient or None, and reentrant checkpointing runs it once for each piece.
    """
    group: list[tuple[Tensor, Tensor | None]] = []
    free, device = 0, None
    for weight, copy in pairs:
        most = elements or _GROUP_ELEMENTS.get(weight.device.type, _GROUP_ELEMENTS_ELSEWHERE)
        has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # no call: each weight is asked
        if has_hooks or (size := weight.numel()) >= most:
            yield [(weight, copy)]
            continue
        if size > free or weight.device != device:
            if group:
                yield group
            group, free, device = [], most, weight.device
        group.append((weight, copy))
        free -= size
    if group:
        yield group
