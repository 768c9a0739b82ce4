"""Check the first backward of a run for scale leaks: gradients must be equal at several loss scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import TrainingArguments

from hf_mp.diagnostics.scale_leaks import raise_on_leaks
from hf_mp.step.mixed_precision import MixedPrecision


def replace_first_backward(runtime: MixedPrecision, args: TrainingArguments, accelerator: Any) -> Callable[[], None]:
    """Make the next ``accelerator.backward`` check for scale leaks; return a function that undoes this."""
    restore_earlier: Any = getattr(accelerator.backward, "restore", None)
    if restore_earlier is not None:  # an earlier run failed before its first backward
        restore_earlier()
    modules = () if runtime.model is None else runtime.model.modules()
    is_compiled = args.torch_compile or any(module._compiled_call_impl is not None for module in modules)
    # DDP would reduce the gradients of each backward, and a compiled backward does not retain its graph.
    if args.world_size > 1 or is_compiled:
        return lambda: None
    return _FirstBackward(runtime, accelerator).restore


class _FirstBackward:
    """Replacement of ``accelerator.backward`` for its next call.

    It runs five more backwards with a retained graph, and restores weights, buffers, RNG states and gradients: training
    is unchanged, bit for bit.
    """

    def __init__(self, runtime: MixedPrecision, accelerator: Any) -> None:
        self._runtime, self._accelerator = runtime, accelerator
        self._backward = accelerator.backward
        self._set_before = vars(accelerator).get("backward")
        self._is_first = True  # other code may store this object, and call it again
        # Set on the instance: accelerate has no hook for backward.
        accelerator.backward = self

    def restore(self) -> None:
        if vars(self._accelerator).get("backward") is self:
            del self._accelerator.backward
            if self._set_before is not None:
                self._accelerator.backward = self._set_before

    def __call__(self, loss: Tensor, **kwargs: Any) -> None:
        self.restore()
        model = self._runtime.model
        # A failed step may have left gradients, which the check would compare too.
        has_no_gradients = model is not None and all(parameter.grad is None for parameter in model.parameters())
        is_checked = self._is_first and has_no_gradients
        self._is_first = False
        if is_checked:
            raise_on_leaks(self._runtime, lambda: self._backward(loss, **{**kwargs, "retain_graph": True}))
        self._backward(loss, **kwargs)
