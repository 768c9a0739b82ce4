"""Check the first backward of a run for scale leaks: gradients must be equal at several loss scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import TrainingArguments

from hf_mp.diagnostics.scale_leaks import raise_on_leaks
from hf_mp.step.mixed_precision import MixedPrecision


def replace_first_backward(runtime: MixedPrecision, args: TrainingArguments, accelerator: Any) -> Callable[[], None]:
    """Replace ``accelerator.backward``, for its next call, by a function that checks for scale leaks first.

    The check runs five more backwards with a retained graph. Weights, buffers, RNG states and gradients are restored,
    so training is unchanged, bit for bit. ``runtime`` is attached, with a loss scale.

    Returns:
        A function that restores ``accelerator.backward``; it may be called several times.
    """

    restore_earlier: Any = getattr(accelerator.backward, "restore", None)
    if restore_earlier is not None:  # an earlier run failed before its first backward
        restore_earlier()
    modules = () if runtime.model is None else runtime.model.modules()
    is_compiled = args.torch_compile or any(module._compiled_call_impl is not None for module in modules)
    # DDP would reduce the gradients of each backward, and a compiled backward does not retain its graph.
    if args.world_size > 1 or is_compiled:
        return lambda: None
    backward, own = accelerator.backward, vars(accelerator).get("backward")
    is_first = True

    def restore() -> None:
        # Unless other code has replaced it since.
        if vars(accelerator).get("backward") is checked:
            del accelerator.backward
            if own is not None:
                accelerator.backward = own

    def checked(loss: Tensor, **kwargs: Any) -> None:
        nonlocal is_first
        restore()
        model = runtime.model
        # A failed step may have left gradients, which the check would compare too.
        has_no_gradients = model is not None and all(parameter.grad is None for parameter in model.parameters())
        check_now, is_first = is_first and has_no_gradients, False
        if check_now:
            raise_on_leaks(runtime, lambda: backward(loss, **{**kwargs, "retain_graph": True}))
        backward(loss, **kwargs)

    # Set on the instance: accelerate has no hook for backward.
    checked.restore = restore  # type: ignore[attr-defined]
    accelerator.backward = checked
    return restore
