"""Backwards of custom autograd functions that recompute a part of an attached model.

In its backward, such a ``torch.autograd.Function`` (a reversible layer, a custom checkpoint) enables gradients,
recomputes a part of the model and runs a nested backward. The gradients that it receives and returns are multiplied by
the loss scale S. Therefore:

- While it enables gradients, it runs in the :class:`~hf_mp.step.forward.ForwardContext` of the forward that created its
  node: with the same aliases of weights, in autocast.
- A nested ``backward()`` from the received gradients is scaled, and unscale nodes unscale its gradients of weights.
- A nested ``backward()`` from another loss is neither. :class:`_Origins` distinguishes the two.
- ``torch.autograd.grad`` returns gradients unchanged, also those of weights, because the function returns them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hf_mp.casting.autocast_stack import active_autocast, state
from hf_mp.casting.compile_exclusion import uncompiled
from hf_mp.casting.dispatcher_kernels import current_graph_task
from hf_mp.casting.plan_entry import Mode
from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.kernels.nested import tensors_in
from hf_mp.scale_boundary import add_leaf_unscale_hooks, leaf_edges, original_of
from hf_mp.weights.alias_patches import DIFFERENTIATE_WEIGHTS
from hf_mp.weights.attach_checks import RUNTIMES

_WAY_OUT = (
    "Start it from the gradients that the function receives, by torch functions, or decorate the function's backward "
    "with @hf_mp.unscaled_gradients"
)


@dataclass(eq=False)
class NestedBackward:
    """A backward that a custom backward runs.

    Attributes:
        within: the custom backward.
        is_scaled: whether its gradients are multiplied by the loss scale.
        accumulates: whether it adds gradients to ``.grad``; False for ``torch.autograd.grad``.
    """

    within: CustomBackward
    is_scaled: bool
    accumulates: bool


class CustomBackward:
    """Context manager around the backward of a custom autograd function in the graph of an attached model.

    Args:
        forward: :class:`ForwardContext` in which its node was created.
        mode: the innermost autocast at that moment.
        name: of the function.
        gradients: received gradients, some None.
    """

    def __init__(self, forward: Any, mode: Mode | None, name: str, gradients: Iterable[Any]) -> None:
        self.forward, self._mode, self.name = forward, mode, name
        self.runtime, self._check = forward.runtime, forward.runtime.check
        self.is_scaled = self._check.is_scaled and self._check.backwards.are_scaled(current_graph_task())
        self._origins = _Origins(self, gradients) if self.is_scaled else None
        self._first_node = torch.autograd._get_sequence_nr()  # nodes from this number on are of a recomputation
        self._recomputations: list[tuple[object, ExitStack]] = []
        self._tasks: list[int] = []  # autograd's numbers of nested backwards
        # Weights with gradients from torch.autograd.grad, by id, and the id and version of each `.grad` before.
        self._returned: dict[int, tuple[Tensor, list[tuple[int, int]]]] = {}
        self.has_recomputed = False

    def __enter__(self) -> CustomBackward:
        self._outer, state.backward = state.backward, self
        if self._origins is not None:
            self._origins.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            while self._recomputations:  # of an `enable_grad` without exit
                self._recomputations.pop()[1].__exit__(*raised)
            if self._origins is not None:
                self._origins.__exit__(*raised)
        finally:
            state.backward, self._origins = self._outer, None  # breaks a reference cycle
            for task in self._tasks:
                self._check.backwards.nested.pop(task, None)
        if raised[0] is None:
            self._check_returned_weights()

    # Recomputation

    def begin_recomputation(self, by: object) -> None:
        """Enter the forward unless it runs already. Called when ``by``, a grad mode, enables gradients."""
        autocast = self.forward.autocast
        is_running = state.forward is not None and state.forward.autocast is autocast  # maybe a recomputation of it
        if is_running:
            return
        # An autocast entered by custom_bwd, or the one in which the function was applied.
        inner = active_autocast() or self._mode
        self.has_recomputed = True
        stack = ExitStack()
        stack.enter_context(self.forward.for_recompute(None))
        if inner is not None and inner is not autocast:
            stack.enter_context(inner)
        self._recomputations.append((by, stack))

    def end_recomputation(self, by: object, *raised: Any) -> None:
        """Exit the forward if :meth:`begin_recomputation` entered it for ``by``."""
        if self._recomputations and self._recomputations[-1][0] is by:
            self._recomputations.pop()[1].__exit__(*raised)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Return a context manager in which received gradients are unscaled, so that nested backwards are too."""
        was_scaled, self.is_scaled = self.is_scaled, False
        try:
            yield
        finally:
            self.is_scaled = was_scaled

    def autocast_for(self, enabled: bool) -> Mode | None:
        autocast: Mode = self.forward.autocast
        return autocast if enabled else autocast.nested_autocast()

    # Nested backwards

    def run(self, outputs: Sequence[Any], seeds: _Seeds, accumulates: bool, engine: Callable[[], Any]) -> Any:
        """Run a nested backward from ``outputs`` with the gradients ``seeds``, by calling ``engine``."""
        nested = NestedBackward(self, self._is_scaled_run(outputs, seeds, accumulates), accumulates)

        def begin(*_: Any) -> None:
            task = current_graph_task()
            self._check.backwards.nested[task] = nested
            self._tasks.append(task)

        if nested.is_scaled and accumulates and self.forward.weights is not None:
            # Weights that were not read from their slots: from a closure or an attribute.
            tensors = [output for output in outputs if isinstance(output, Tensor)]
            is_external = self.forward.weights.external.is_weight_or_external
            add_leaf_unscale_hooks(tensors, self.runtime.scale_provider, self._first_node, is_external)
        # autograd's number of the nested backward is available in its nodes only.
        with torch._C.DisableTorchFunction():
            starts: set[Any] = {one.grad_fn if isinstance(one, Tensor) else one.node for one in outputs} - {None}
        handles = [node.register_prehook(begin) for node in starts]
        try:
            return engine()
        finally:
            for handle in handles:
                handle.remove()
            if self._origins is not None and accumulates:
                self._origins.leaves_scaled = nested.is_scaled

    def _is_scaled_run(self, outputs: Sequence[Any], seeds: _Seeds, accumulates: bool) -> bool:
        """Return whether gradients of a nested backward are scaled; a RuntimeError if unknown and accumulated."""
        origins = self._origins
        if origins is None or not self.is_scaled:
            return False
        powers, is_known = set[int](), True  # powers of S in the gradients
        for output, seed, is_implicit in zip(outputs, seeds, seeds.are_implicit, strict=True):
            if seed is None:  # the output needs no gradient
                continue
            has_scaled_seed = not is_implicit and origins.is_scaled(seed)
            power = has_scaled_seed + origins.is_scaled(output)  # an output may be a product with the gradient
            powers.add(power)
            is_known &= is_implicit or has_scaled_seed or origins.is_constant(seed)
        if is_known and len(powers) == 1 and powers <= {0, 1}:
            return powers == {1}
        if accumulates and powers:
            raise RuntimeError(
                f"the backward of {self.name} runs another backward, and hf_mp cannot tell whether its gradients are "
                "multiplied by the loss scale: they start from a tensor that no torch function computed from the "
                f"gradients that {self.name} received (or from two such, multiplied). {_WAY_OUT}"
            )
        return True  # of torch.autograd.grad: so a write of these gradients to `.grad` is an error

    def record_returned(self, node: Any, indices: Iterable[int]) -> None:
        """Record the weights at inputs ``indices`` of ``node``, of which ``autograd.grad`` returns scaled gradients."""
        for index in indices:
            weight = getattr(node.next_functions[index][0], "variable", None)
            if weight is not None and id(weight) not in self._returned:
                self._returned[id(weight)] = weight, self._gradients_of(weight)

    def _gradients_of(self, weight: Tensor) -> list[tuple[int, int]]:
        return [(id(one), one._version) for one in self._check.gradients([weight])]

    def _check_returned_weights(self) -> None:
        """Raise a RuntimeError if the backward wrote a gradient of ``torch.autograd.grad`` to ``.grad``."""
        if any([self._gradients_of(weight) != before for weight, before in self._returned.values()]):
            self._raise_for_scaled()

    def _raise_for_scaled(self) -> NoReturn:
        raise RuntimeError(
            f"the backward of {self.name} wrote .grad of a weight, with a gradient that is multiplied by the loss "
            "scale: return such gradients as those of the function's inputs, call backward() in the place of "
            "torch.autograd.grad, or decorate the function's backward with @hf_mp.unscaled_gradients"
        )

    def check_written_gradient(self, tensor: Tensor, *, is_scaled: bool) -> None:
        """Raise a RuntimeError if a write to ``tensor.grad`` would be lost, or write a scaled gradient."""
        if original_of(tensor) is not tensor:
            raise RuntimeError(
                f"the backward of {self.name} wrote .grad of a weight while it recomputed, when the module holds an "
                "alias of the weight: call backward() in the place of torch.autograd.grad, or return the gradient as "
                "that of the function's input"
            )
        weights = self.forward.weights
        if is_scaled and weights is not None and weights.external.is_weight_or_external(tensor):
            self._raise_for_scaled()


class _Other:
    """Backward of any other custom function: of torch, of hf_mp, or created outside attached forwards."""

    forward = None

    def autocast_for(self, enabled: bool) -> None:
        return None


# `state.backward` is None outside of custom backwards, a CustomBackward in that of a function that an attached forward
# applied, and _OTHER in that of any other function.
_OTHER = _Other()


# Attribute of a tensor in a custom backward: (number of that backward, _SCALED or _CONSTANT).
_ORIGIN = "_hf_mp_origin"
_SCALED, _CONSTANT = "scaled", "constant"
_numbers = itertools.count()
# Not empty and zeros, because kernels write to their results.
_MAKE_CONSTANTS = {
    *("ones", "ones_like", "new_ones", "full", "full_like", "new_full", "tensor", "as_tensor", "scalar_tensor"),
    *("arange", "eye", "linspace", "rand", "rand_like", "randn", "randn_like"),
}
_LEAVE_TORCH = {"item", "tolist", "numpy", "__float__", "__array__", "__int__", "__bool__", "__complex__"}
_GRAD: Any = Tensor.grad
_READ_GRADIENT, _SET_GRADIENT = _GRAD.__get__, _GRAD.__set__


class _Origins(TorchFunctionMode):
    """Marks tensors in a custom backward that torch functions compute from the received gradients, or from constants.

    Results of extensions and custom kernels are not marked.
    """

    def __init__(self, backward: CustomBackward, gradients: Iterable[Any]) -> None:
        super().__init__()
        self._backward, self._number = backward, next(_numbers)
        self.leaves_scaled = False  # whether the last nested backward stored scaled gradients in leaves
        self._left_torch = False  # whether a number was read from a scaled tensor
        self._mark(gradients, _SCALED)

    def is_scaled(self, value: Any) -> bool:
        return self._backward.is_scaled and getattr(value, _ORIGIN, None) == (self._number, _SCALED)

    def is_constant(self, value: Any) -> bool:
        return not self._left_torch and getattr(value, _ORIGIN, None) == (self._number, _CONSTANT)

    def _mark(self, values: Any, origin: str) -> None:
        for tensor in tensors_in(values):
            setattr(tensor, _ORIGIN, (self._number, origin))

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling():
            return func(*args, **kwargs)
        if func == _SET_GRADIENT:
            self._backward.check_written_gradient(args[0], is_scaled=self.is_scaled(args[1]))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [*tensors_in((args, kwargs))]
        if any(map(self.is_scaled, tensors)) or (func == _READ_GRADIENT and self.leaves_scaled):
            self._left_torch |= name in _LEAVE_TORCH
            self._mark(result, _SCALED)
            if _is_in_place(name):
                self._mark(args[:1], _SCALED)
        elif name in _MAKE_CONSTANTS or (tensors and all(map(self.is_constant, tensors))):
            self._mark(result, _CONSTANT)
        return result


def _is_in_place(name: str) -> bool:
    """Return whether a torch function of this name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


# Patches of torch while a model is attached.


class _Seeds(tuple[Any, ...]):
    """Gradients that a nested backward starts from."""

    are_implicit: list[bool]  # whether torch made the gradient, 1 for a loss


# Not Function.apply, because user code stores `apply = Custom.apply` before a model is attached.
@around
def _make_node(original: Any, node: Any, /, *args: Any, **kwargs: Any) -> None:
    """Record the forward and the autocast in which the node of a custom function is created."""
    original(node, *args, **kwargs)
    if (forward := state.forward) is None or forward.weights is None:
        return
    if not node._forward_cls.__module__.startswith(("torch.", "hf_mp.")):
        node.hf_mp_made_in = forward, active_autocast()


@around
def _run_custom_backward(original: Any, node: Any, /, *gradients: Any) -> Any:
    if (made_in := getattr(node, "hf_mp_made_in", None)) is not None:
        forward, mode = made_in
        with CustomBackward(forward, mode, type(node)._forward_cls.__name__, gradients):
            return original(node, *gradients)
    outer, state.backward = state.backward, _OTHER
    try:
        return original(node, *gradients)
    finally:
        state.backward = outer


def _running() -> CustomBackward | None:
    return backward if isinstance(backward := state.backward, CustomBackward) else None


@around
def _enable_gradients(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if torch.is_grad_enabled() and (backward := _running()) is not None:
        backward.begin_recomputation(self)


@around
def _restore_gradients(original: Any, self: Any, /, *raised: Any) -> None:
    try:
        if (backward := _running()) is not None:
            backward.end_recomputation(self, *raised)
    finally:
        original(self, *raised)


@around
def _make_seeds(original: Any, outputs: Any, grads: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
    made = original(outputs, grads, *args, **kwargs)
    is_nested = current_graph_task() != -1
    if not is_nested or state.backward is _OTHER:
        return made
    seeds = _Seeds(made)
    seeds.are_implicit = [one is None for one in grads]
    return seeds


@around
def _run_backward(original: Any, outputs: Sequence[Any], seeds: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(seeds, _Seeds):  # not nested, or in a backward of _OTHER
        return original(outputs, seeds, *args, **kwargs)
    accumulates = bool(kwargs.get("accumulate_grad"))
    if (backward := _running()) is not None:  # in a custom backward
        return backward.run(outputs, seeds, accumulates, lambda: original(outputs, seeds, *args, **kwargs))
    if accumulates and not all(seeds.are_implicit):  # in a hook: a given gradient may be scaled
        _check_backward_in_hook([output for output in outputs if isinstance(output, Tensor)])
    return original(outputs, seeds, *args, **kwargs)


def scaled_runtimes() -> list[Any]:
    """Return the runtimes with gradients that are multiplied by the loss scale in the backward that runs."""
    task = current_graph_task()
    return [one for one in RUNTIMES if one.check.is_scaled and one.check.backwards.are_scaled(task)]


def _check_backward_in_hook(outputs: Sequence[Tensor]) -> None:
    """Raise a RuntimeError if a hook in a scaled backward runs another one that adds to ``.grad`` of that model."""
    models = [runtime.model for runtime in scaled_runtimes()]
    weights = {id(weight) for model in models if model is not None for weight in model.parameters()}
    if weights and any([id(leaf) in weights for _, _, leaf in leaf_edges(outputs, 0)]):
        raise RuntimeError(
            "a hook runs a backward from a given gradient, in a backward whose gradients are multiplied by the loss "
            "scale, and it would leave gradients in weights of the attached model that may be scaled: recompute in the "
            "backward of a torch.autograd.Function that is applied in forward()"
        )


_SCALED_BY_S = "gradients of weights that a custom autograd function recomputes with are multiplied by the loss scale"

BACKWARD_PATCHES = Patches(
    (
        DIFFERENTIATE_WEIGHTS,  # patches the same attribute as the last entry; patches are removed in reverse order
        Patch(("torch.autograd.function:BackwardCFunction.__init__",), _make_node, _SCALED_BY_S),
        Patch(
            tuple(f"torch.autograd.function:BackwardCFunction.{name}" for name in ("apply", "apply_boxed")),
            _run_custom_backward,
            _SCALED_BY_S,
        ),
        *(
            Patch((f"torch.autograd.grad_mode:{name}",), replace, _SCALED_BY_S)
            for name, replace in {
                "enable_grad.__enter__": _enable_gradients,
                "enable_grad.__exit__": _restore_gradients,
                "set_grad_enabled.__enter__": _enable_gradients,
                "set_grad_enabled.__exit__": _restore_gradients,
            }.items()
        ),
        Patch(("torch.autograd:_make_grads",), _make_seeds, _SCALED_BY_S),
        Patch(("torch.autograd:_engine_run_backward",), _run_backward, _SCALED_BY_S),
    )
)
