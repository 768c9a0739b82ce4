"""``WorkingWeights``: the trained weights of one forward, brought inside, and the rule for all else from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_mp.casting.cpu.products import Operand
from hf_mp.policy import LOWER_PRECISION_DTYPES
from hf_mp.scaling.borders import Crossings, inward_borders
from hf_mp.weights.distributed import fsdp_modules, is_dtensor
from hf_mp.weights.layout import TensorParallelLayout, WeightLayout
from hf_mp.weights.model_walk import modules_of

# Weights share a border, one autograd node instead of many, up to so many elements: their gradients leave together.
GROUP_ELEMENTS = 2**18


_Group = list[tuple[Tensor, Tensor | None]]  # weights and those of their working copies that forwards read


class _Weight:
    """A trained weight, as one forward uses it."""

    __slots__ = ("inside", "is_placed", "is_used", "outside", "rounded")

    def __init__(self, outside: Tensor, inside: Tensor, rounded: Tensor | None) -> None:
        self.outside = outside
        self.inside = inside  # in its own dtype
        self.rounded = rounded  # a use of its working copy that nobody has had yet
        self.is_placed = self.is_used = False  # in the place of a parameter; by an op that casts


class WorkingWeights:
    """The trained weights of one forward, brought inside, and the rule for everything else that comes from outside.

    While the forward runs, what is inside lies in the places of the parameters: in the modules' ``_parameters``, and in
    their ``__dict__``, where attributes are looked up first. So calls that no torch function mode sees, such as custom
    autograd functions, cross the border as well. What comes in by another way (a closure, an attribute, an object) was
    made outside if its autograd node is older than the forward, and gets its border at its first use.

    ``has_made`` tells whether an earlier forward of the model made an autograd node; ``group_elements`` is the most
    elements of weights that share a border.
    """

    def __init__(
        self,
        layout: WeightLayout,
        model: nn.Module,
        crossings: Crossings,
        is_scaled: bool,
        has_made: Callable[[Any], bool],
        group_elements: int = GROUP_ELEMENTS,
    ) -> None:
        self.layout, self._crossings, self._has_made = layout, crossings, has_made
        self.has_borders = is_scaled or layout.takes_gradients
        self._weights: dict[int, _Weight] = {}  # by what is outside, and by what is inside
        self._carriers: set[int] = set()  # leaves that carry gradients from one piece of the model to another
        self._slots: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []  # attributes, name, outside, inside
        self._model, self._has_dtensors = model, isinstance(layout, TensorParallelLayout)
        self._handles: list[RemovableHandle] = []  # of FSDP's modules
        self.first_node = torch.autograd._get_sequence_nr()
        if not layout.keeps_copies:
            return
        places = _places(model)
        weights = {id(weight): weight for _, _, weight in places}.values()
        # Made fresh before an alias inside exists: anything else that shares the memory may write it unseen.
        pairs = [(weight, layout.copies.rounded(weight)) for weight in weights]
        if not self.has_borders:
            pairs = [(weight, copy) for weight, copy in pairs if copy is not None]
        for group in _groups(pairs, group_elements):
            self._bring_in(group)
        if self.has_borders:
            self._slots = [(names, name, weight, self._in_place(weight)) for names, name, weight in places]

    def _in_place(self, outside: Tensor) -> Tensor:
        weight = self._weights[id(outside)]
        if self.layout.takes_gradients and weight.is_placed:
            self._bring_in_one(outside)  # a tied weight has a border for each place
            weight = self._weights[id(outside)]
        weight.is_placed = True
        return weight.inside

    def _bring_in_one(self, outside: Tensor) -> None:
        self._bring_in([(outside, self.layout.copies.rounded(outside))])

    def _bring_in(self, group: _Group) -> None:
        outside, copies = zip(*group, strict=True)
        insides, rounded = inward_borders(outside, copies, self._crossings, with_aliases=self.has_borders)
        for weight in map(_Weight, outside, insides, rounded):
            self._weights[id(weight.outside)] = self._weights[id(weight.inside)] = weight

    def fill(self) -> None:
        """Put what is inside into the places of the parameters; where FSDP shards them, when it has gathered them."""
        for names, name, _, inside in self._slots:
            names[name] = inside
            if self.layout.keeps_copies:  # else FSDP puts its own there
                names["_parameters"][name] = inside
        if self.has_borders and not self.layout.keeps_copies:
            self._fill_gathered(self._model, ())
            shards = [module for module in fsdp_modules(self._model) if module._compiled_call_impl is None]
            self._handles = [module.register_forward_pre_hook(self._fill_gathered) for module in shards]

    def _fill_gathered(self, gathered: nn.Module, args: Any) -> None:
        with torch._C.DisableTorchFunction():  # the region runs already, and has nothing to decide here
            # FSDP's DTensor is that of a part that it gathers by itself.
            places = [place for place in _places(gathered) if self._has_dtensors or not is_dtensor(place[2])]
            comes_in = {id(weight): weight for _, _, weight in places if id(weight) not in self._weights}.values()
            for weight in comes_in:
                if weight.dtype in LOWER_PRECISION_DTYPES:
                    weight.grad_dtype = torch.float32  # what leaves through the border
            # Transformers < 5.23 sums a norm's .grad over ranks as soon as the norm's backward has run.
            elements = 1 if self._has_dtensors else GROUP_ELEMENTS
            for group in _groups([(weight, None) for weight in comes_in if self.is_outside(weight)], elements):
                self._bring_in(group)
            for names, name, weight in places:
                names[name] = self._weights[id(weight)].inside if id(weight) in self._weights else weight
                self._slots.append((names, name, weight, names[name]))

    def clear(self) -> None:
        """Give the places back."""
        for names, name, weight, _ in self._slots:
            names.pop(name, None)
            if self.layout.keeps_copies and name in names["_parameters"]:
                names["_parameters"][name] = weight
        for handle in self._handles:
            handle.remove()

    def outside(self, tensor: Tensor) -> Tensor:
        """The weight of which ``tensor`` is the inside; any other tensor as it is."""
        weight = self._weights.get(id(tensor))
        return tensor if weight is None else weight.outside

    def use(self, tensor: Tensor) -> Tensor:
        """``tensor``; of a weight a border for each use, so that their 16-bit gradients are summed in FP32."""
        weight = self._weights.get(id(tensor))
        if weight is None:
            return tensor
        if not weight.is_used:
            weight.is_used = True
            return tensor
        return inward_borders([weight.outside], [None], self._crossings)[0][0]

    def rounded(self, tensor: Tensor) -> Tensor | None:
        """A use of the working copy of a weight; None where there is none."""
        weight = self._weights.get(id(tensor))
        if weight is not None and weight.rounded is not None:
            found, weight.rounded = weight.rounded, None
            return found
        if weight is None and tensor.grad_fn is not None:  # an activation
            return None
        outside = tensor if weight is None else weight.outside
        if (copy := self.layout.working_copy(outside)) is None or not outside.requires_grad:
            return copy
        # A border for each use: their gradients are summed in FP32.
        self.layout.copies.note_rounded(outside)
        return inward_borders([outside], [copy], self._crossings, with_aliases=False)[1][0]

    def operand(self, tensor: Tensor) -> Operand | None:
        """A weight for a product that writes the weight's gradient itself; None where a border must."""
        outside = self.outside(tensor)
        if self.layout.takes_gradients or (outside is tensor and self.has_borders) or not outside.requires_grad:
            return None
        copy = self.layout.working_copy(outside)
        return None if copy is None else Operand(tensor, copy, outside, self._crossings)

    def bring_in(self, tensor: Tensor) -> Tensor:
        """``tensor``, through a border if it comes from outside and wants a gradient."""
        if not self.has_borders or not tensor.requires_grad or not self.is_outside(tensor):
            return tensor
        if id(tensor) not in self._weights:
            self._bring_in_one(tensor)
        return self._weights[id(tensor)].inside

    def bring_in_argument(self, tensor: Tensor) -> Tensor:
        """As :meth:`bring_in`, for what was made before the forward began, in whatever thread: each numbers its own."""
        if not self.has_borders or not tensor.requires_grad:
            return tensor
        if tensor.grad_fn is not None and self._has_made(tensor.grad_fn):
            return tensor
        if id(tensor) not in self._weights:
            self._bring_in_one(tensor)
        return self._weights[id(tensor)].inside

    def is_outside(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has grad, was made before this forward began, and by none of this model."""
        if (node := tensor.grad_fn) is None:
            return id(tensor) not in self._carriers
        return node._sequence_nr() < self.first_node and not self._has_made(node)

    def has_outside(self, values: Iterable[Any]) -> bool:
        """Whether among the arguments of a call is a tensor from outside that wants a gradient."""
        for value in values:  # every call of a model comes here: is_outside() is written out
            if isinstance(value, Tensor):
                if not value.requires_grad:
                    continue
                if (node := value.grad_fn) is None:
                    if id(value) not in self._carriers:
                        return True
                elif node._sequence_nr() < self.first_node and not self._has_made(node):
                    return True
            elif isinstance(value, (list, tuple)) and self.has_outside(value):
                return True
        return False

    @contextmanager
    def recomputing(self, args: tuple[Any, ...]) -> Iterator[None]:
        """To run a piece of the forward again in, in a thread that may number nodes anew: all but leaves is inside."""
        first, self.first_node = self.first_node, -1
        self._carriers = {id(arg) for arg in args if isinstance(arg, Tensor)}
        try:
            yield
        finally:
            self.first_node, self._carriers = first, set()


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Where trained weights are looked up: a module's attributes, a name, the weight."""
    return [
        (names, name, weight)
        for names in map(vars, modules_of(model))
        for name, weight in names["_parameters"].items()
        if weight is not None and weight.requires_grad and name not in names
    ]


def _groups(weights: _Group, elements: int) -> Iterator[_Group]:
    """Weights of one device, of at most so many ``elements`` together; a larger one alone."""
    group: _Group = []
    free, device = elements, None
    for weight, copy in weights:
        if (size := weight.numel()) >= elements:
            yield [(weight, copy)]
            continue
        if size > free or weight.device != device:
            if group:
                yield group
            group, free, device = [], elements, weight.device
        group.append((weight, copy))
        free -= size
    if group:
        yield group
