"""The attached forward: the model's own, in autocast, with a border around every way in and out."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.borders import cast_to_output
from hf_mp.casting.active import state
from hf_mp.casting.deferred_output import DeferredOutput, can_be_deferred, may_stay_unread
from hf_mp.casting.dispatched import current_graph_task, dispatched
from hf_mp.casting.uncompiled import outside_of_graphs
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.models.base import ReplacedForward
from hf_mp.models.positions import counting_positions
from hf_mp.step.profiling import profiled
from hf_mp.step.runtime import StepRuntime
from hf_mp.weights.attached_autocast import AttachedAutocast
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.outside_reads import as_stored


class AttachedForward(ReplacedForward):
    """Takes the place of ``model.forward`` while attached, or of another method that is called in its place."""

    def __init__(self, runtime: StepRuntime, module: nn.Module, name: str = "forward") -> None:
        super().__init__(module, name)
        self.runtime = runtime
        runtime.forwards.append(weakref.ref(self))
        self.alias_cache = runtime.weights.alias_cache()
        counts_positions = runtime.policy.exact_generation and name == "forward"
        self.inner_forward = counting_positions(self) if counts_positions else self.original
        functools.update_wrapper(self, self.original, updated=())  # not the attributes of an attached forward below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Nested in another attached forward, this one belongs to its graph: the borders are the outer one's.
        return self._run(args, kwargs) if state.forward is None else self.inner_forward(*args, **kwargs)

    # torch.compile leaves this frame alone and compiles the model's own forward, in autocast, as one graph.
    @outside_of_graphs("hf_mp's borders are outside of the graph of an attached model: leave fullgraph=True out")
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The model was detached or is gone, and a library that has wrapped this forward still calls it.
        if (model := self.runtime.model) is None:
            return self.original(*args, **kwargs)
        with profiled("forward"):
            context, args, kwargs = self._begin(model, args, kwargs)
            with context:
                forward = context.autocast.under_rules(self.module(), self.inner_forward)
                outputs = forward(*args, **kwargs)
            return self._finish(context, outputs)

    @torch.compiler.disable
    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[ForwardContext, Any, Any]:
        """The context of a forward, and its arguments: an external tensor among them through a border."""
        with as_stored():
            weights = self.runtime.begin_forward(model, self)
        context = ForwardContext(self.runtime, weights)
        if weights is not None and weights.slots.has_grad:
            hooks = [one.on_forward_begin(self, args, kwargs) for one in self.runtime.observers]
            context.output_hooks = [hook for hook in hooks if hook]
        if weights is not None and weights.slots.has_unscale_nodes:
            args, kwargs = apply_to_tensors(weights.external.alias_argument, (args, kwargs))
        return context, args, kwargs

    @torch.compiler.disable
    def _finish(self, context: ForwardContext, outputs: Any) -> Any:
        """The outputs in FP32, each through its border. Not called if the forward raised."""
        weights, may_defer = context.weights, may_stay_unread(outputs)
        scale_provider = self.runtime.scale_provider if weights is not None and weights.slots.has_grad else None
        crossed: list[Tensor] = []

        def cross(output: Tensor) -> Tensor:
            wrap = DeferredOutput if may_defer and can_be_deferred(output) else None
            crossed.append(cast_to_output(output, scale_provider, wrap))
            return crossed[-1]

        outputs = apply_to_tensors(cross, outputs, objects=True)
        if weights is not None:
            weights.finish(crossed)
        for hook in context.output_hooks:
            hook(outputs)
        return outputs

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> AttachedForward:
        return AttachedForward(self.runtime.copy_for(memo), module, self.name)


class ForwardContext:
    """One forward of an attached model, or the recomputation of a part of it: a context for one thread.

    While it is entered, the weights are in their slots, autocast casts the calls, and ``state.forward``
    (:mod:`hf_mp.casting.active`) is this object, from which autocast, kernels, caches and borders read its attributes:
    those of :class:`hf_mp.casting.calls.Forward`.

    Args:
        runtime: of the model.
        weights: of the forward; None leaves the slots alone.
        recomputes: the forward of which a part is recomputed; default None.
    """

    def __init__(
        self, runtime: StepRuntime, weights: ForwardWeights | None, recomputes: ForwardContext | None = None
    ) -> None:
        self.runtime, self.weights, self.is_recomputing = runtime, weights, recomputes is not None
        # A model that was attached anew, or that got other rules, has another autocast since.
        self.autocast: AttachedAutocast = runtime.autocast if recomputes is None else recomputes.autocast
        autocast = self.autocast
        self.graph_task = current_graph_task()
        self.began_without_grad = autocast.call_override is None and not torch.is_grad_enabled()
        self.lowers_caches = self.began_without_grad and autocast.lowers_attention()
        # FSDP and tensor parallelism, which keep no copies, fill slots while the forward runs.
        keeps_copies = weights is not None and runtime.weights.layout.keeps_copies
        self.is_dispatched = keeps_copies and autocast.may_be_dispatched()
        self.output_hooks: list[Callable[[Any], None]] = []  # of observers

    # Its frames are Python's: the compiler has nothing to compile in what they call.
    @torch.compiler.disable
    def __enter__(self) -> ForwardContext:
        self._running = self._run()
        self._running.__enter__()
        return self

    @torch.compiler.disable
    def __exit__(self, *raised: Any) -> None:
        self._running.__exit__(*raised)
        if self.weights is not None and not self.is_recomputing:
            self.weights.external.record_nodes()

    @contextmanager
    def _run(self) -> Iterator[None]:
        source, ident = self.runtime.weights, threading.get_ident()
        outer, state.forward = state.forward, self
        source.threads.append(ident)
        # Filled already if a backward inside of this forward recomputes a part of it, in any thread.
        slots = nullcontext() if self.weights is None or self.weights.slots.is_active else self.weights.slots
        kernels = dispatched(self) if self.is_dispatched else nullcontext()
        try:
            with slots:
                with source.layout.saving_for_backward(), kernels, self.autocast:
                    yield
                if self.is_dispatched:
                    self.autocast.discard_compiled_frames()
        finally:
            source.threads.remove(ident)
            state.forward = outer

    @contextmanager
    def for_recompute(self, args: tuple[Any, ...] | None) -> Iterator[None]:
        """A context to recompute a part of this forward in, whose arguments are ``args`` (None: not known).

        In any thread.
        """
        numbered_anew = nullcontext() if self.weights is None else self.weights.external.recomputing(args)
        with ForwardContext(self.runtime, self.weights, recomputes=self), numbered_anew:
            yield


def entry_points(model: nn.Module) -> list[nn.Module]:
    """The modules whose call is a forward of ``model``: itself, and Transformers models inside (PEFT calls those).

    A container (``ModuleList``, ``ModuleDict``, a class without a ``forward``) cannot be called: its children are.
    """
    called = [m for m in _called(model) if m is not model]
    transformers_models = sys.modules.get("transformers.modeling_utils")
    if transformers_models is not None:
        called += [m for m in model.modules() if m is not model and isinstance(m, transformers_models.PreTrainedModel)]
    return [model, *dict.fromkeys(called)]


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """``module``, or if it has no ``forward`` those inside that have."""
    own = vars(module).get("forward")
    in_class = getattr(type(module), "forward", None)  # a scripted module has none
    if in_class is not nn.Module.forward or not (own is None or isinstance(own, ReplacedForward)):
        yield module
    else:
        for child in module.children():
            yield from _called(child)


def methods_of(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """The methods of ``model`` with these names, each as its module and its name there.

    Raises:
        TypeError: if ``names`` is a string.
        ValueError: for a name that is no method of the model or of a module inside (``"vision.features"``).
    """
    if isinstance(names, str):
        raise TypeError(f"methods must be names in a list, not the string {names!r}: use methods=[{names!r}]")
    found = []
    for path in names:
        owner, _, name = path.rpartition(".")
        module = dict(model.named_modules()).get(owner)
        if module is None or not inspect.isroutine(getattr(type(module), name, None)):
            raise ValueError(
                f"methods=[{path!r}] names no method of {type(model).__name__}: use the name of one that is called in "
                "the place of forward, such as 'get_value', or of one of a module inside, such as 'vision.features'"
            )
        if inspect.isgeneratorfunction(getattr(type(module), name)):
            raise ValueError(
                f"methods=[{path!r}] names a generator, of which the body runs after the call, outside of any forward: "
                "name a method that computes one of its steps"
            )
        found.append((module, name))
    return found
