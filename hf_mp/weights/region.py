"""``Region``: autocast in an attached forward, which reads working copies and lets gradients out by borders alone."""

from __future__ import annotations

import bisect
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hf_mp.casting.active import active_autocast
from hf_mp.casting.cpu.products import Operand
from hf_mp.casting.mode import PlannedCall, autocast
from hf_mp.casting.nested import apply_to_tensors
from hf_mp.casting.tables import OPS, CastRule
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.weights.distributed import is_dtensor
from hf_mp.weights.graph_inputs import lift_casts
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.region_losses import planned_losses
from hf_mp.weights.working_copies import WatchedParameter
from hf_mp.weights.working_weights import WorkingWeights

if TYPE_CHECKING:
    from hf_mp.weights.reading_region import ReadingRegion


class _Thread(threading.local):
    """What a region knows of one thread."""

    def __init__(self) -> None:
        self.weights: WorkingWeights | None = None  # of the forward that runs, if it builds a graph
        self.made: list[tuple[int, float]] = []  # first and last of the autograd nodes of recent forwards


class Region(autocast):
    """Autocast in an attached forward: reads working copies, and lets no gradient out but through a border."""

    takes_products = True

    def __init__(
        self,
        layout: WeightLayout,
        no_backward: Callable[[], AbstractContextManager[None]],
        reading: ReadingRegion | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(layout.policy.compute, **settings)
        self.layout, self.sums_in_fp64 = layout, layout.policy.exact_generation
        self._no_backward, self._reading = no_backward, reading
        self._thread = _Thread()
        self._plan = {**self._plan, **_OF_WEIGHTS, **planned_losses(self._plan)}
        self._shortcuts = _leaves(self._plan) | _norms(self, self._plan)
        if self.sums_in_fp64:
            self._check_sums()

    def _check_sums(self) -> None:
        summed = CastRule.LOWER_PRECISION, CastRule.FP32
        for function, (rule, name) in OPS[self.tables].items():
            planned = self._plan.get(function)
            if rule is summed[0] and (planned is None or planned.rule not in summed):
                raise ValueError(
                    f"exact_generation=True sums {name} in FP64, and a rule has it run as it is called: leave that "
                    "rule out, or make it 'fp32'"
                )

    def running(self, weights: WorkingWeights | None) -> AbstractContextManager[None]:
        """To run a forward in, with the weights that it uses; None without grad."""
        if (reading := self._reading) is None:
            return self._running(weights)
        if weights is not None:
            reading.release()
        elif self.observer is None and not torch.is_grad_enabled():
            reading.layout = self.layout
            return reading.running(None)
        return self._running(weights)

    @contextmanager
    def _running(self, weights: WorkingWeights | None) -> Iterator[None]:
        before, self._thread.weights = self._thread.weights, weights
        if weights is not None:
            weights.fill()
        try:
            with self.layout.saving(), self:
                yield
        finally:
            self._thread.weights = before
            if weights is not None:
                weights.clear()

    def add_rules(self, rules: Mapping[str, str], model: nn.Module | None) -> None:
        super().add_rules(rules, model)
        if self._reading is not None:
            self._reading.add_rules(rules, model)

    def recomputation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        weights = self._thread.weights

        def recompute(*args: Any, **kwargs: Any) -> Any:
            if active_autocast() is self:
                return function(*args, **kwargs)
            with self._no_backward(), self.running(weights):
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

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self._plan or self.observer is not None or is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        # Most calls of a model are in no table, and go straight on.
        weights = self._thread.weights
        if weights is not None and weights.has_borders and func not in _OF_THE_TENSOR_ITSELF:
            args, kwargs = _brought_in(weights, func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def apply(
        self, entry: PlannedCall | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        # In compiled code, what comes in from outside is the graph's input: see bring_in().
        weights = None if is_dynamo_compiling() else self._thread.weights
        if weights is not None and weights.has_borders and func not in _OF_THE_TENSOR_ITSELF:
            args, kwargs = _brought_in(weights, func, args, kwargs)
        return super().apply(entry, func, args, kwargs)

    def shortcut(self, func: Callable[..., Any], tensors: Sequence[Any]) -> Callable[..., Any] | None:
        if (found := self._shortcuts.get(func)) is None or self.observer is not None or not self.is_alone:
            return None
        weights = self._thread.weights
        if any([type(t) not in _PLAIN for t in tensors]) or (
            weights is not None and weights.has_borders and weights.has_outside(tensors)
        ):
            return None
        return found

    def bring_in(self, tensor: Tensor) -> Tensor:
        weights = self._thread.weights
        return tensor if weights is None or not torch.is_grad_enabled() else weights.bring_in(tensor)

    def may_bypass(self, activation: Any, weights: list[Any]) -> bool:
        if type(activation) is not Tensor or self.observer is not None or self.has_op_rules or self.sums_in_fp64:
            return False
        if not self.is_alone or any([is_dtensor(weight) for weight in weights]):
            return False
        inside = self._thread.weights
        return inside is None or not inside.has_borders or not inside.has_outside([activation, *weights])

    def lift_casts(self, graph: Any, inputs: list[Any]) -> tuple[Any, list[int]]:
        weights = self._thread.weights
        if self.sums_in_fp64:
            raise ValueError("exact_generation=True is for models that are not compiled: leave torch.compile out")

        def has_copy(tensor: Tensor) -> bool:
            outside = tensor if weights is None else weights.outside(tensor)
            return self.layout.keeps_copies and self.layout.working_copy(outside) is not None

        return lift_casts(graph, inputs, self.dtype, has_copy, weights is None or weights.has_borders)

    def copy_of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The working copy of ``tensor``, which a compiled graph is given: through a border where there are borders."""
        weights = self._thread.weights
        if weights is None or weights.has_borders:
            return self.convert(tensor, dtype)
        copy = self.layout.working_copy(tensor)
        return tensor.detach().to(dtype) if copy is None else copy

    def convert(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype is not self.dtype or is_dynamo_compiling():
            return tensor.to(dtype)
        weights = self._thread.weights
        if weights is None:  # without grad, or where no border is: under functorch
            needs_graph = tensor.requires_grad and torch.is_grad_enabled()
            copy = None if needs_graph else self.layout.working_copy(tensor)
        else:
            copy = weights.rounded(tensor)
        return tensor.to(dtype) if copy is None else copy

    def operand(self, tensor: Tensor) -> Operand:
        weights = None if is_dynamo_compiling() else self._thread.weights
        found = None if weights is None else weights.operand(tensor)
        return super().operand(tensor) if found is None else found


class RegionOfUses(Region):
    """A region for weights that take their 16-bit gradients themselves: each use of one has a border of its own."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        weights = None if is_dynamo_compiling() else self._thread.weights
        if weights is not None and isinstance(value, Tensor):
            value = weights.use(value)
        return super().cast(value, dtype)


_PLAIN = frozenset({type(None), Tensor, nn.Parameter, WatchedParameter})
_Shortcuts = dict[Callable[..., Any], Callable[..., Any]]


def _leaves(plan: Mapping[Callable[..., Any], PlannedCall]) -> _Shortcuts:
    """Functions that ask, in Python, whether a mode takes them, of those that no table names."""
    return {f: f for f in (F.dropout, F.embedding, F.silu, F.relu) if f not in plan}


def _norms(region: Region, plan: Mapping[Callable[..., Any], PlannedCall]) -> _Shortcuts:
    found = {name: plan.get(getattr(torch, name)) for name in ("layer_norm", "group_norm", "rms_norm")}
    fp32 = {getattr(F, name): entry for name, entry in found.items() if entry and entry.rule is CastRule.FP32}
    return {func: functools.partial(_call, entry, region, func) for func, entry in fp32.items()}


def _call(entry: PlannedCall, region: Region, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return entry.handler(region, entry.name, func, args, kwargs)


def _brought_in(weights: WorkingWeights, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, those that come from outside through a border."""
    comes_in = weights.has_outside(args) or (kwargs and weights.has_outside(kwargs.values()))
    if comes_in and torch.is_grad_enabled() and not _is_below_autograd(func):
        return apply_to_tensors(weights.bring_in, (args, dict(kwargs or {})))
    return args, kwargs


def _is_below_autograd(func: Callable[..., Any]) -> bool:
    """Whether a dispatch mode, which records memory or counts FLOPs, makes the call that autograd has recorded."""
    return isinstance(func, OpOverload) and is_in_torch_dispatch_mode()


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
