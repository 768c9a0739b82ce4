"""The attached forward: the model's own, in autocast, with a border around every way in and out."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.borders import output_border
from hf_mp.casting.active import state as autocasts
from hf_mp.casting.deferred_output import DeferredOutput, can_be_deferred, may_stay_unread
from hf_mp.casting.uncompiled import outside_of_graphs
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.models.base import ReplacedForward
from hf_mp.models.positions import counting_positions
from hf_mp.step.profiling import profiled
from hf_mp.step.runtime import StepRuntime
from hf_mp.weights.attached_autocast import AttachedAutocast
from hf_mp.weights.outside_reads import as_stored


class AttachedForward(ReplacedForward):
    """Takes the place of ``model.forward`` while attached."""

    def __init__(self, runtime: StepRuntime, module: nn.Module) -> None:
        super().__init__(module)
        self.runtime = runtime
        runtime.forwards.append(weakref.ref(self))
        self.borders = runtime.weights.lasting_borders()
        self.inner_forward = counting_positions(self) if runtime.policy.exact_generation else self.original
        functools.update_wrapper(self, self.original, updated=())  # not the attributes of an attached forward below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Nested in another attached forward, this one belongs to its graph: the borders are the outer one's.
        is_nested = any([isinstance(mode, AttachedAutocast) for mode in autocasts.active])
        return self.inner_forward(*args, **kwargs) if is_nested else self._run(args, kwargs)

    # torch.compile leaves this frame alone and compiles the model's own forward, in the region, as one graph.
    @outside_of_graphs("hf_mp's borders are outside of the graph of an attached model: leave fullgraph=True out")
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The model was detached or is gone, and a library that has wrapped this forward still calls it.
        if (model := self.runtime.model) is None:
            return self.original(*args, **kwargs)
        with profiled("forward"):
            with _AttachedCall(self, model, args, kwargs) as call:
                outputs = call.forward(*call.args, **call.kwargs)
            return call.bring_out(outputs)

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> AttachedForward:
        return AttachedForward(self.runtime.copy_for(memo), module)


class _AttachedCall:
    """One call of an attached forward: what comes in, what goes out, and the region between."""

    # Not @uncompiled: Python 3.13 enters an __init__ without asking Dynamo, which then compiles what that calls.
    @torch.compiler.disable
    def __init__(self, forward: AttachedForward, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._runtime = runtime = forward.runtime
        with as_stored():
            self._weights = weights = runtime.begin_forward(model, forward)
        has_grad = weights is not None and weights.has_grad
        observers = runtime.observers if has_grad else []
        self._output_hooks = [hook for one in observers if (hook := one.forward_began(forward, args, kwargs))]
        self._crossings = runtime if has_grad else None
        if weights is not None and weights.has_borders:
            args, kwargs = apply_to_tensors(weights.bring_in_argument, (args, kwargs))
        self.args, self.kwargs, self._attached = args, kwargs, forward
        self._inside = runtime.region.running(weights)

    @torch.compiler.disable
    def __enter__(self) -> _AttachedCall:
        self._inside.__enter__()
        self.forward = self._runtime.region.autocast.under_rules(self._attached.module(), self._attached.inner_forward)
        return self

    @torch.compiler.disable
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._inside.__exit__(kind, error, traceback)
        if self._weights is not None:
            self._runtime.weights.note_nodes(self._weights)

    @torch.compiler.disable
    def bring_out(self, outputs: Any) -> Any:
        """The outputs, each through its border."""
        may_defer = may_stay_unread(outputs)
        crossed: list[Tensor] = []

        def cross(output: Tensor) -> Tensor:
            wrap = DeferredOutput if may_defer and can_be_deferred(output) else None
            crossed.append(output_border(output, self._crossings, wrap))
            return crossed[-1]

        outputs = apply_to_tensors(cross, outputs, objects=True)
        if self._weights is not None:
            # Here and not in __exit__(): a forward that raised has not shown all of its calls.
            self._weights.finish(crossed)
        for hook in self._output_hooks:
            hook(outputs)
        return outputs


def entry_points(model: nn.Module) -> list[nn.Module]:
    """The modules whose call is a forward of ``model``: itself, and Transformers models inside (PEFT calls those)."""
    transformers_models = sys.modules.get("transformers.modeling_utils")
    if transformers_models is None:
        return [model]
    inner = [m for m in model.modules() if m is not model and isinstance(m, transformers_models.PreTrainedModel)]
    return [model, *inner]
