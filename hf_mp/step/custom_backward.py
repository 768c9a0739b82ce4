"""Backwards of custom autograd functions that recompute a part of an attached model.

In its backward, such a ``torch.autograd.Function`` (a reversible layer, a custom checkpoint) enables gradients,
recomputes a part of the model and runs a nested backward. It receives and returns gradients that are multiplied by the
loss scale S. Therefore:

- While gradients are enabled, it runs in the :class:`~hf_mp.step.forward.ForwardContext` that created its node.
- A nested ``backward()`` from the received gradients is scaled, and unscale nodes unscale its gradients of weights.
- A nested ``backward()`` from another loss is neither. :class:`_Origins` distinguishes the two.
- ``torch.autograd.grad`` returns scaled gradients, also those of weights, because the function returns them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
    """A backward that a custom backward runs."""

    within: CustomBackward
    is_scaled: bool  # whether its gradients are multiplied by S
    accumulates: bool  # whether it adds gradients to ``.grad``; False for ``torch.autograd.grad``


class CustomBackward:
    """Context manager around the backward of a custom autograd function in the graph of an attached model.

    Args:
        forward: :class:`ForwardContext` in which its node was created.
        mode: the innermost autocast at that moment.
        name: of the function.
        gradients: that it receives.
    """

    def __init__(self, forward: Any, mode: Mode | None, name: str, gradients: Iterable[Any]) -> None:
        self.forward, self._mode, self.name = forward, mode, name
        self.runtime, self._check = forward.runtime, forward.runtime.check
        self.is_scaled = self._check.is_scaled and self._check.backwards.are_scaled(current_graph_task())
        self._origins = _Origins(self, gradients) if self.is_scaled else None
        self._first_node = torch.autograd._get_sequence_nr()  # nodes from this number on are of a recomputation
        self._recomputations: list[tuple[object, ExitStack]] = []  # with the grad mode that began each
        self._tasks: list[int] = []  # autograd's numbers of nested backwards
        # Of weights with gradients from torch.autograd.grad, _ids_and_versions() before.
        self._grads_before: dict[Tensor, list[tuple[int, int]]] = {}
        self.has_recomputed = False

    def __enter__(self) -> CustomBackward:
        self._outer, state.backward = state.backward, self
        if self._origins is not None:
            self._origins.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            while self._recomputations:
                _, recomputation = self._recomputations.pop()
                recomputation.__exit__(*raised)
            if self._origins is not None:
                self._origins.__exit__(*raised)
        finally:
            state.backward, self._origins = self._outer, None  # breaks a reference cycle
            for task in self._tasks:
                self._check.backwards.nested.pop(task, None)
        writes = (self._ids_and_versions(weight) != before for weight, before in self._grads_before.items())
        if raised[0] is None and any(writes):
            self._raise_for_scaled()

    # Recomputation

    def begin_recomputation(self, by: object) -> None:
        """Enter the forward, unless it or a recomputation of it runs. ``by`` is the grad mode that is entered."""
        running, autocast = state.forward, self.forward.autocast
        if running is not None and running.autocast is autocast:
            return
        # An autocast entered by custom_bwd, or the one in which the function was applied.
        inner = active_autocast() or self._mode
        self.has_recomputed = True
        recomputation = ExitStack()
        recomputation.enter_context(self.forward.for_recompute(None))
        if inner is not None and inner is not autocast:
            recomputation.enter_context(inner)
        self._recomputations.append((by, recomputation))

    def end_recomputation(self, by: object, *raised: Any) -> None:
        """Exit the forward if it was entered for ``by``."""
        if self._recomputations and self._recomputations[-1][0] is by:
            _, recomputation = self._recomputations.pop()
            recomputation.__exit__(*raised)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Return a context manager for unscaled received gradients and nested backwards."""
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
        """Run a nested backward from ``outputs`` with ``seeds``, by calling ``engine``."""
        nested = NestedBackward(self, self._is_scaled_run(outputs, seeds, accumulates), accumulates)
        if nested.is_scaled and accumulates and self.forward.weights is not None:
            # For weights that were read from a closure or an attribute, not from their slots.
            tensors = [output for output in outputs if isinstance(output, Tensor)]
            is_external = self.forward.weights.external.is_weight_or_external
            add_leaf_unscale_hooks(tensors, self.runtime.scale_provider, self._first_node, is_external)

        def record_task(*_: Any) -> None:
            task = current_graph_task()
            self._check.backwards.nested[task] = nested
            self._tasks.append(task)

        with torch._C.DisableTorchFunction():
            starts: set[Any] = {one.grad_fn if isinstance(one, Tensor) else one.node for one in outputs} - {None}
        # autograd's number of the nested backward is available in its nodes only.
        handles = [node.register_prehook(record_task) for node in starts]
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
        powers = {
            origins.power_of_scale(output, None if is_implicit else seed)
            for output, seed, is_implicit in zip(outputs, seeds, seeds.are_implicit, strict=True)
            if seed is not None  # otherwise the output needs no gradient
        }
        if powers in ({0}, {1}):
            return powers == {1}
        if accumulates and powers:
            raise RuntimeError(
                f"the backward of {self.name} runs another backward, and hf_mp cannot tell whether its gradients are "
                "multiplied by the loss scale: they start from a tensor that no torch function computed from the "
                f"gradients that {self.name} received (or from two such, multiplied). {_WAY_OUT}"
            )
        return True  # with torch.autograd.grad, a write of these gradients to `.grad` is an error then

    def record_returned(self, node: Any, indices: Iterable[int]) -> None:
        """Record weights, at inputs ``indices`` of ``node``, of which ``autograd.grad`` returns scaled gradients."""
        for index in indices:
            weight = getattr(node.next_functions[index][0], "variable", None)
            if weight is not None and weight not in self._grads_before:
                self._grads_before[weight] = self._ids_and_versions(weight)

    def _ids_and_versions(self, weight: Tensor) -> list[tuple[int, int]]:
        return [(id(gradient), gradient._version) for gradient in self._check.gradients([weight])]

    def _raise_for_scaled(self) -> NoReturn:
        raise RuntimeError(
            f"the backward of {self.name} wrote .grad of a weight, with a gradient that is multiplied by the loss "
            "scale: return such gradients as those of the function's inputs, call backward() in the place of "
            "torch.autograd.grad, or decorate the function's backward with @hf_mp.unscaled_gradients"
        )

    def check_written_gradient(self, tensor: Tensor, *, is_scaled: bool) -> None:
        """Raise a RuntimeError if a write to ``tensor.grad`` is lost, or writes a scaled gradient."""
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
    """Backward of any other custom function: of torch or hf_mp, or created outside attached forwards."""

    forward = None

    def autocast_for(self, enabled: bool) -> None:
        return None


_OTHER = _Other()  # `state.backward` in such a backward


# Attribute of a tensor: (number of a custom backward, _SCALED or _CONSTANT).
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
    """Marks results of torch functions, not of custom kernels, of received gradients or of constants."""

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

    def power_of_scale(self, output: Any, seed: Any | None) -> int | None:
        """Return k if gradients from ``output`` with ``seed`` (None: of torch, 1) are multiplied by S**k, else None.

        k may be 2: ``output`` may be a product with a received gradient.
        """
        has_scaled_seed = seed is not None and self.is_scaled(seed)
        is_known = seed is None or has_scaled_seed or self.is_constant(seed)
        return has_scaled_seed + self.is_scaled(output) if is_known else None

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
        reads_scaled = any(map(self.is_scaled, tensors)) or (func == _READ_GRADIENT and self.leaves_scaled)
        if reads_scaled:
            self._left_torch |= name in _LEAVE_TORCH
            self._mark(result, _SCALED)
            is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            if is_in_place:
                self._mark(args[:1], _SCALED)
        elif name in _MAKE_CONSTANTS or (tensors and all(map(self.is_constant, tensors))):
            self._mark(result, _CONSTANT)
        return result


# Patches of torch while a model is attached.


class _Seeds(tuple[Any, ...]):
    """Gradients from which a backward inside another one starts; carries facts to ``_engine_run_backward``."""

    are_implicit: list[bool]  # whether torch made the gradient: 1, for a loss


# Not Function.apply, because user code stores `apply = Custom.apply` before a model is attached.
@around
def _make_node(original: Any, node: Any, /, *args: Any, **kwargs: Any) -> None:
    """Record the forward and autocast in which a custom function creates its node."""
    original(node, *args, **kwargs)
    forward = state.forward
    is_attached = forward is not None and forward.weights is not None
    if is_attached and not node._forward_cls.__module__.startswith(("torch.", "hf_mp.")):
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
    engine = partial(original, outputs, seeds, *args, **kwargs)
    if not isinstance(seeds, _Seeds):
        return engine()
    accumulates = bool(kwargs.get("accumulate_grad"))
    if (backward := _running()) is not None:
        return backward.run(outputs, seeds, accumulates, engine)
    if accumulates and not all(seeds.are_implicit):  # in a hook: a given gradient may be scaled
        _check_backward_in_hook([output for output in outputs if isinstance(output, Tensor)])
    return engine()


def scaled_runtimes() -> list[Any]:
    """Return the runtimes with gradients that are scaled in the running backward."""
    task = current_graph_task()
    return [one for one in RUNTIMES if one.check.is_scaled and one.check.backwards.are_scaled(task)]


def _check_backward_in_hook(outputs: Sequence[Tensor]) -> None:
    """Raise a RuntimeError if a backward in a hook of a scaled one adds to ``.grad`` of that model."""
    models = [runtime.model for runtime in scaled_runtimes() if runtime.model is not None]
    weights = {id(weight) for model in models for weight in model.parameters()}
    leaves = [leaf for _, _, leaf in leaf_edges(outputs, 0)] if weights else []
    if any([id(leaf) in weights for leaf in leaves]):
        raise RuntimeError(
            "a hook runs a backward from a given gradient, in a backward whose gradients are multiplied by the loss "
            "scale, and it would leave gradients in weights of the attached model that may be scaled: recompute in the "
            "backward of a torch.autograd.Function that is applied in forward()"
        )


_SCALED_BY_S = "gradients of weights that a custom autograd function recomputes with are multiplied by the loss scale"

BACKWARD_PATCHES = Patches(
    (
        DIFFERENTIATE_WEIGHTS,  # first: it patches the attribute of the last entry too
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
