"""The attached forward: the model's own, in autocast, with a border around every way in and out."""

from __future__ import annotations

import bisect
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from hf_mp.casting.active import active_autocast
from hf_mp.casting.active import state as autocasts
from hf_mp.casting.cpu.products import Operand
from hf_mp.casting.mode import PlannedCall, autocast
from hf_mp.casting.nested import apply_to_tensors
from hf_mp.casting.replacements.base import class_forward
from hf_mp.casting.tables import CastRule
from hf_mp.scaling.multiply import Crossings
from hf_mp.step.borders import inward_borders, output_border

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    from hf_mp.step.mixed_precision import MixedPrecision

DEFERRED_ELEMENTS = 2**20  # outputs from this size on are cast to FP32 only when they are read
GROUP_SIZE = 16  # small weights that share a border: one autograd node instead of as many
ALONE_ELEMENTS = 2**18  # weights from this size on have a border of their own: their gradients leave at once


class AttachedForward:
    """Takes the place of ``model.forward`` while attached."""

    def __init__(self, runtime: MixedPrecision, module: nn.Module, original: Callable[..., Any]) -> None:
        self.runtime = runtime
        self.module = weakref.ref(module)
        self.original = original
        functools.update_wrapper(self, original)

    # torch.compile leaves this frame alone and compiles the model's own forward, in the region, as one graph.
    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Detached: a library that put its own forward over this one still calls it. Inside of another attached forward
        # this one is a part of it, and the borders are the outer one's.
        if self.runtime.is_detached or _is_inside():
            return self.original(*args, **kwargs)
        passage = _Passage(self.runtime, self, args, kwargs)
        try:
            outputs = self.original(*passage.args, **passage.kwargs)
        finally:
            passage.leave()
        return passage.bring_out(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Deep-copying a model copies its attributes, this one too: the copy must run the copied weights.
        copied = memo.get(id(self.module()))
        if copied is None:
            raise TypeError("an attached forward is copied only together with its model: copy.deepcopy(model)")
        return self.runtime.copy_for(memo).attached_forward(copied)

    def __reduce__(self) -> Any:
        # A pickled model is an ordinary FP32 model.
        module: Any = self.module()
        return class_forward, (module,)


def _is_inside() -> bool:
    return any(isinstance(mode, Region) for mode in autocasts.active)


class _Passage:
    """One call of an attached forward: what comes in, what goes out, and the region between."""

    @torch.compiler.disable
    def __init__(
        self, runtime: MixedPrecision, forward: AttachedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._runtime = runtime
        self._weights = weights = runtime.begin_forward()
        self._takers = [] if weights is None else runtime.observe_forward(forward, args, kwargs)
        if weights is not None:
            args, kwargs = apply_to_tensors(weights.bring_in, (args, kwargs))
        self.args, self.kwargs = args, kwargs
        self._inside = runtime.region.running(weights)
        self._inside.__enter__()

    @torch.compiler.disable
    def leave(self) -> None:
        """The model's own forward has ended, also by an exception."""
        self._inside.__exit__(None, None, None)
        if self._weights is not None:
            self._runtime.region.note_made(self._weights)

    @torch.compiler.disable
    def bring_out(self, outputs: Any) -> Any:
        """The outputs, each through its border."""
        may_defer = _has_loss(outputs)  # next to a loss, large outputs may stay unread
        outputs = apply_to_tensors(functools.partial(self._out, may_defer=may_defer), outputs, objects=True)
        for take in self._takers:
            take(outputs)
        return outputs

    def _out(self, output: Tensor, *, may_defer: bool) -> Tensor:
        if self._weights is None:
            return output_border(output, None)
        output = self._weights.bring_in(output)  # a weight that forward() returns as it is
        return output_border(output, self._runtime, deferred=may_defer and output.numel() >= DEFERRED_ELEMENTS)


def _has_loss(outputs: Any) -> bool:
    if isinstance(outputs, Mapping):
        first = outputs.get("loss")
    else:
        first = outputs[0] if isinstance(outputs, tuple) and outputs else None
    return isinstance(first, Tensor) and first.dim() == 0 and first.requires_grad


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

    While the forward runs, what is inside lies in the places of the parameters (in the modules' ``__dict__``, where
    attributes are looked up first): calls that no torch function mode sees, such as autograd functions of one's own,
    cross the border as well. What comes in by another way (a closure, an attribute, an object) was made outside if its
    autograd node is older than the forward, and gets its border at its first use.

    Args:
        runtime: of the model.
        model: whose parameters are brought in.
        crossings: what the borders ask; default ``runtime``.
    """

    def __init__(self, runtime: MixedPrecision, model: nn.Module, crossings: Crossings | None = None) -> None:
        self._region, self._layout = runtime.region, runtime.layout
        self._crossings: Crossings = runtime if crossings is None else crossings
        self.has_borders = runtime.check.is_scaled or self._layout.takes_gradients
        self._weights: dict[int, _Weight] = {}  # by what is outside, and by what is inside
        self._carriers: set[int] = set()  # leaves that carry gradients from one piece of the model to another
        self._slots: list[tuple[dict[str, Any], str, Tensor]] = []
        self.first_node = torch.autograd._get_sequence_nr()
        if not self._layout.keeps_copies:
            return
        places = list(_places(model))
        weights = list({id(weight): weight for _, _, weight in places}.values())
        if not self.has_borders:
            weights = [weight for weight in weights if self._layout.is_rounded(weight)]
        for group in _groups(weights, 1 if runtime.in_backward is not None else GROUP_SIZE):
            self._bring_in(group)
        if self.has_borders:
            self._slots = [(names, name, self._in_place(weight)) for names, name, weight in places]

    def _in_place(self, outside: Tensor) -> Tensor:
        weight = self._weights[id(outside)]
        if self._layout.takes_gradients and weight.is_placed:
            self._bring_in([outside])  # a tied weight has a border for each place
            weight = self._weights[id(outside)]
        weight.is_placed = True
        return weight.inside

    def _bring_in(self, group: list[Tensor]) -> None:
        copies = [self._layout.working_copy(weight) if self._layout.is_rounded(weight) else None for weight in group]
        insides, rounded = inward_borders(group, copies, self._crossings)
        for weight in map(_Weight, group, insides, rounded):
            self._weights[id(weight.outside)] = self._weights[id(weight.inside)] = weight

    def fill(self) -> None:
        """Put what is inside into the places of the parameters."""
        for names, name, inside in self._slots:
            names[name] = inside

    def clear(self) -> None:
        """Give the places back."""
        for names, name, _ in self._slots:
            names.pop(name, None)

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
        outside = self.outside(tensor)
        if (copy := self._layout.working_copy(outside)) is None or not outside.requires_grad:
            return copy
        # A border for each use: their gradients are summed in FP32.
        self._layout.note_rounded(outside)
        return inward_borders([outside], [copy], self._crossings)[1][0]

    def operand(self, tensor: Tensor) -> Operand | None:
        """A weight for a product that writes the weight's gradient itself; None where a border must."""
        outside = self.outside(tensor)
        if self._layout.takes_gradients or (outside is tensor and self.has_borders) or not outside.requires_grad:
            return None
        copy = self._layout.working_copy(outside)
        return None if copy is None else Operand(tensor, copy, outside, self._crossings)

    def bring_in(self, tensor: Tensor) -> Tensor:
        """``tensor``, through a border if it comes from outside and wants a gradient."""
        if not self.has_borders or not tensor.requires_grad or not self.is_outside(tensor):
            return tensor
        if id(tensor) not in self._weights:
            self._bring_in([tensor])
        return self._weights[id(tensor)].inside

    def is_outside(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has grad, was made before this forward began, and by none of this model."""
        if (node := tensor.grad_fn) is None:
            return id(tensor) not in self._carriers
        return node._sequence_nr() < self.first_node and not self._region.has_made(node)

    @contextmanager
    def recomputing(self, args: tuple[Any, ...]) -> Iterator[None]:
        """To run a piece of the forward again in, in a thread that may number nodes anew: all but leaves is inside."""
        first, self.first_node = self.first_node, -1
        self._carriers = {id(arg) for arg in args if isinstance(arg, Tensor)}
        try:
            yield
        finally:
            self.first_node, self._carriers = first, set()


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where trained weights are looked up: a module's attributes, a name, the weight."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.requires_grad and name not in module.__dict__:
                yield module.__dict__, name, weight


def _groups(weights: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for weight in weights:
        if weight.numel() >= ALONE_ELEMENTS:
            yield [weight]
            continue
        if len(group) == size or (group and group[0].device != weight.device):
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


class _Thread(threading.local):
    """What a region knows of one thread."""

    def __init__(self) -> None:
        self.weights: WorkingWeights | None = None  # of the forward that runs, if it builds a graph
        self.made: list[tuple[int, float]] = []  # first and last of the autograd nodes of recent forwards


class Region(autocast):
    """Autocast inside of an attached model: reads working copies, and lets no gradient out but through a border."""

    takes_products = True

    def __init__(self, runtime: MixedPrecision, **settings: Any) -> None:
        super().__init__(runtime.policy.compute, **settings)
        self._runtime = runtime
        self._thread = _Thread()
        self._plan = {**self._plan, **_OF_WEIGHTS}

    @contextmanager
    def running(self, weights: WorkingWeights | None) -> Iterator[None]:
        """To run a forward in, with the weights that it uses; None without grad."""
        before, self._thread.weights = self._thread.weights, weights
        if weights is not None:
            weights.fill()
        try:
            with self._runtime.layout.saving(), self:
                yield
        finally:
            self._thread.weights = before
            if weights is not None:
                weights.clear()

    def recomputation(self, function: Callable[P, R]) -> Callable[P, R]:
        weights = self._thread.weights

        def recompute(*args: P.args, **kwargs: P.kwargs) -> R:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with self._runtime.check.no_backward(), self.running(weights):
                if weights is None:
                    return function(*args, **kwargs)
                with weights.recomputing(args):
                    return function(*args, **kwargs)

        return recompute

    def note_made(self, weights: WorkingWeights) -> None:
        """Take in that a forward has ended, of which tensors may be kept for another one."""
        self._thread.made.append((weights.first_node, torch.autograd._get_sequence_nr()))
        del self._thread.made[:-1000]

    def has_made(self, node: Any) -> bool:
        """Whether an earlier forward of this model made an autograd node, whose result was kept."""
        made, number = self._thread.made, node._sequence_nr()
        position = bisect.bisect_right(made, (number, math.inf)) - 1
        return position >= 0 and number < made[position][1]

    def apply(
        self, entry: PlannedCall | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        # In compiled code, what comes in from outside is the graph's input: see bring_in().
        weights = None if torch.compiler.is_dynamo_compiling() else self._thread.weights
        if weights is not None and weights.has_borders and torch.is_grad_enabled():
            comes_in = _has_outside(weights, args) or (kwargs and _has_outside(weights, kwargs.values()))
            if comes_in and func not in _OF_THE_TENSOR_ITSELF:
                args, kwargs = apply_to_tensors(weights.bring_in, (args, dict(kwargs)))
        return super().apply(entry, func, args, kwargs)

    def bring_in(self, tensor: Tensor) -> Tensor:
        weights = self._thread.weights
        return tensor if weights is None or not torch.is_grad_enabled() else weights.bring_in(tensor)

    def convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype is not self.dtype or torch.compiler.is_dynamo_compiling():
            return tensor.to(dtype)
        weights = self._thread.weights
        copy = self._runtime.layout.working_copy(tensor) if weights is None else weights.rounded(tensor)
        return tensor.to(dtype) if copy is None else copy

    def operand(self, tensor: Tensor) -> Operand:
        weights = None if torch.compiler.is_dynamo_compiling() else self._thread.weights
        found = None if weights is None else weights.operand(tensor)
        return super().operand(tensor) if found is None else found


class RegionOfUses(Region):
    """A region for weights that take their 16-bit gradients themselves: each use of one has a border of its own."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        weights = None if torch.compiler.is_dynamo_compiling() else self._thread.weights
        if weights is not None and isinstance(value, Tensor):
            value = weights.use(value)
        return super().cast(value, dtype)


def _has_outside(weights: WorkingWeights, values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad and weights.is_outside(value):
                return True
        elif isinstance(value, (list, tuple)) and _has_outside(weights, value):
            return True
    return False


def _write_or_read_data(region: Region, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.data``, of which the parameter outside must know."""
    weights = region._thread.weights
    if weights is not None and (outside := weights.outside(args[0])) is not args[0]:
        if len(args) == 1:
            return func(outside)
        func(outside, args[1])
    return func(*args, **kwargs)


_OF_WEIGHTS = {
    func: PlannedCall(CastRule.UNLISTED, "data", _write_or_read_data)
    for func in (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
}


def _of_the_tensor_itself() -> frozenset[Callable[..., Any]]:
    """Calls that carry no gradient, or mean the tensor that they are given: properties, writers, hooks."""
    names = """
        register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad backward set_ share_memory_
        size dim ndimension stride numel nelement element_size data_ptr storage untyped_storage storage_offset
        is_contiguous is_floating_point is_complex is_shared is_pinned get_device type __len__ __hash__ __repr__
        __format__ __deepcopy__ __reduce_ex__ __setstate__ __dir__ detach
    """
    calls = {getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)}
    carries_gradient = {"T", "mT", "H", "mH", "real", "imag"}
    for name in dir(Tensor):
        descriptor = getattr(Tensor, name)
        if hasattr(descriptor, "__set__") and not callable(descriptor):
            calls.add(descriptor.__set__)
            if name not in carries_gradient:
                calls.add(descriptor.__get__)
    return frozenset(calls | {torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel})


_OF_THE_TENSOR_ITSELF = _of_the_tensor_itself()
