"""``AttachedForward``: runs the model's forward in autocast, between unscale nodes and scaled outputs."""

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

from hf_mp.casting.autocast_stack import state
from hf_mp.casting.compile_exclusion import disable_compile
from hf_mp.casting.deferred_output import DeferredOutput, can_be_deferred, can_defer_casts
from hf_mp.casting.dispatcher_kernels import current_graph_task, kernels_enabled
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.models.base import ReplacedForward
from hf_mp.models.positions import with_position_ids
from hf_mp.scale_boundary import cast_to_output
from hf_mp.step.profiling import profiled
from hf_mp.step.runtime import StepRuntime
from hf_mp.weights.attached_autocast import AttachedAutocast
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.fp32_reads import as_stored


class AttachedForward(ReplacedForward):
    """Replaces ``model.forward``, or another method that the loop calls, while the model is attached."""

    def __init__(self, runtime: StepRuntime, module: nn.Module, name: str = "forward") -> None:
        super().__init__(module, name)
        self.runtime = runtime
        runtime.forwards.append(weakref.ref(self))
        self.alias_cache = runtime.weights.alias_cache()  # read by WeightStore.prepare_forward()
        counts_positions = runtime.policy.exact_generation and name == "forward"
        self.inner_forward = with_position_ids(self) if counts_positions else self.original
        functools.update_wrapper(self, self.original, updated=())  # without the attributes of a nested attached forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside another attached forward, this one is a part of its scaled graph.
        return self._run(args, kwargs) if state.forward is None else self.inner_forward(*args, **kwargs)

    # torch.compile skips this frame and compiles the model's own forward as one graph.
    @disable_compile("hf_mp scales gradients outside the graph of an attached model: leave fullgraph=True out")
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.runtime.model
        if model is None:  # detached, but another library has wrapped this forward
            return self.original(*args, **kwargs)
        with profiled("forward"):
            context, args, kwargs = self._begin(model, args, kwargs)
            with context:
                forward = context.autocast.with_module_rules(self.module(), self.inner_forward)
                outputs = forward(*args, **kwargs)
            return self._finish(context, outputs)  # not if the forward raised

    @torch.compiler.disable
    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[ForwardContext, Any, Any]:
        """Return the context of a forward, and its arguments with aliases of external tensors."""
        with as_stored():  # a read of a split parameter would make its FP32 value
            weights = self.runtime.begin_forward(model, self)
        context = ForwardContext(self.runtime, weights)
        if weights is not None and weights.slots.has_grad:
            hooks = [one.on_forward_begin(self, args, kwargs) for one in self.runtime.observers]
            context.output_hooks = [hook for hook in hooks if hook]
            if weights.slots.aliases_fp32_weights:
                args, kwargs = apply_to_tensors(weights.external.alias_argument, (args, kwargs))
        return context, args, kwargs

    @torch.compiler.disable
    def _finish(self, context: ForwardContext, outputs: Any) -> Any:
        """Cast the outputs to FP32, add unscale hooks, and call the observers."""
        weights = context.weights
        scale_provider = self.runtime.scale_provider if weights is not None and weights.slots.has_grad else None
        may_defer = can_defer_casts(outputs)
        results: list[Tensor] = []

        def cast(output: Tensor) -> Tensor:
            wrap = DeferredOutput if may_defer and can_be_deferred(output) else None
            results.append(cast_to_output(output, scale_provider, wrap))
            return results[-1]

        outputs = apply_to_tensors(cast, outputs, objects=True)
        if weights is not None:
            weights.finish(results)
        for hook in context.output_hooks:
            hook(outputs)
        return outputs

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> AttachedForward:
        return AttachedForward(self.runtime.copy_for(memo), module, self.name)


class ForwardContext:
    """Context manager of one forward of an attached model, or of the recomputation of a part of it, in one thread.

    It fills the parameter slots, enters autocast, and sets ``state.forward`` (:mod:`hf_mp.casting.autocast_stack`) to
    itself. :class:`hf_mp.casting.plan_entry.Forward` is its interface for readers of ``state.forward``.

    Args:
        weights: of the forward; None leaves the slots unchanged.
        recomputes: the forward with the recomputed part; default None.

    Attributes:
        graph_task: number of the backward around the forward, or -1. The dispatcher kernels do not cast in another
            backward, which runs inside the forward.
        began_without_grad: whether gradients are disabled and no call observer is active. If gradients are enabled
            later, :class:`AttachedAutocast` and the kernels cast weights again, with a graph.
        lowers_caches: whether key/value caches store 16-bit keys and values (:mod:`hf_mp.casting.kv_cache`).
        is_dispatched: whether the dispatcher kernels make the calls, instead of the function mode.
        output_hooks: of observers, called with the outputs.
    """

    def __init__(
        self, runtime: StepRuntime, weights: ForwardWeights | None, recomputes: ForwardContext | None = None
    ) -> None:
        self.runtime, self.weights, self.is_recomputing = runtime, weights, recomputes is not None
        # A new attachment or rule replaces the autocast of the runtime.
        autocast = runtime.autocast if recomputes is None else recomputes.autocast
        self.autocast: AttachedAutocast = autocast
        self.graph_task = current_graph_task()
        self.began_without_grad = autocast.call_override is None and not torch.is_grad_enabled()
        self.lowers_caches = self.began_without_grad and autocast.lowers_attention()
        # Sharded layouts, which store no copies, fill the slots while the forward runs.
        keeps_copies = weights is not None and runtime.weights.layout.keeps_copies
        self.is_dispatched = keeps_copies and autocast.may_be_dispatched()
        self.output_hooks: list[Callable[[Any], None]] = []

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
        store, ident = self.runtime.weights, threading.get_ident()
        outer, state.forward = state.forward, self
        store.threads.append(ident)  # for WeightStore.check_single_thread()
        # Active already if a backward inside this forward recomputes a part of it, maybe in another thread.
        slots = nullcontext() if self.weights is None or self.weights.slots.is_active else self.weights.slots
        kernels = kernels_enabled(self) if self.is_dispatched else nullcontext()
        try:
            with slots:
                # With FSDP2, autograd recomputes copies instead of saving them.
                with store.layout.saving_for_backward(), kernels, self.autocast:
                    yield
                if self.is_dispatched:  # drop code that torch.compile made in this forward: it contains the casts
                    self.autocast.discard_compiled_frames()
        finally:
            store.threads.remove(ident)
            state.forward = outer

    @contextmanager
    def for_recompute(self, args: tuple[Any, ...] | None) -> Iterator[None]:
        """Return a context manager for the recomputation of a part, with arguments ``args`` (None if unknown)."""
        recomputing = nullcontext() if self.weights is None else self.weights.external.recomputing(args)
        with ForwardContext(self.runtime, self.weights, recomputes=self), recomputing:
            yield


def entry_points(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a forward to attach.

    These are ``model``, Transformers models inside it, which PEFT calls, and of a container its children.
    """
    called = [m for m in _callable_modules(model) if m is not model]
    transformers_models = sys.modules.get("transformers.modeling_utils")
    if transformers_models is not None:
        called += [m for m in model.modules() if m is not model and isinstance(m, transformers_models.PreTrainedModel)]
    return [model, *dict.fromkeys(called)]


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module``, or of a container, the nearest modules inside it with a ``forward``."""
    in_instance = vars(module).get("forward")
    is_set_by_user = in_instance is not None and not isinstance(in_instance, ReplacedForward)
    if is_set_by_user or getattr(type(module), "forward", None) is not nn.Module.forward:  # None if scripted
        yield module
    else:
        for child in module.children():
            yield from _callable_modules(child)


def methods_of(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Return ``(module, method name)`` for each of ``names``, as in ``"vision.features"``.

    Raises:
        TypeError: for a string.
        ValueError: for a name that is no method of the model or a submodule, and for a generator.
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
