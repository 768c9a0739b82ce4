"""The first backward of a run, at several loss scales: a gradient past a border is seen before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import TrainingArguments

from hf_mp.diagnostics.scale_leaks import raise_on_leaks
from hf_mp.step.mixed_precision import MixedPrecision


def replace_first_backward(runtime: MixedPrecision, args: TrainingArguments, accelerator: Any) -> Callable[[], None]:
    """Have the next ``accelerator.backward`` run at several loss scales first, and compare what it leaves.

    The graph of the first micro-batch is kept for five backwards, each as long as a usual one; weights, buffers, random
    numbers and gradients are then as if there had been none, so that training is the same bit for bit. In memory, the
    gradients come on top of the activations, at a time when the optimizer's moments are not there yet.

    Args:
        runtime: attached, with a loss that is scaled.
        args: of the Trainer.
        accelerator: of accelerate; its ``backward`` is replaced until it is called.

    Returns:
        What gives ``accelerator.backward`` back, where it was not called or has been.
    """

    left: Any = getattr(accelerator.backward, "restore", None)
    if left is not None:  # by a run that failed before its first backward
        left()
    modules = () if runtime.model is None else runtime.model.modules()
    is_compiled = args.torch_compile or any(module._compiled_call_impl is not None for module in modules)
    # Each backward would be reduced over the processes; a compiled one frees what it has used.
    if args.world_size > 1 or is_compiled:
        return lambda: None
    backward, own = accelerator.backward, vars(accelerator).get("backward")
    is_first = True

    def restore() -> None:
        # Not where somebody else has replaced it since.
        if vars(accelerator).get("backward") is checked:
            del accelerator.backward
            if own is not None:
                accelerator.backward = own

    def checked(loss: Tensor, **kwargs: Any) -> None:
        nonlocal is_first
        restore()
        was_first, is_first, model = is_first, False, runtime.model
        # Gradients that are there already, of a step that failed before, would be compared along.
        if was_first and model is not None and all(parameter.grad is None for parameter in model.parameters()):
            raise_on_leaks(runtime, lambda: backward(loss, **{**kwargs, "retain_graph": True}))
        backward(loss, **kwargs)

    # On the instance: Trainer.training_step calls accelerator.backward, for which accelerate has no hook.
    checked.restore = restore  # type: ignore[attr-defined]
    accelerator.backward = checked
    return restore
