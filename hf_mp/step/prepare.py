"""``prepare``: mixed precision for a plain loop in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp.policy import PrecisionPolicy
from hf_mp.step.mixed_precision import MixedPrecision


def prepare(
    model: nn.Module,
    optimizer: Optimizer,
    precision: PrecisionPolicy | torch.dtype | str = "fp16",
    *,
    methods: Sequence[str] = (),
    **settings: Any,
) -> tuple[nn.Module, Optimizer]:
    """Mixed precision for a plain loop: attach a policy to a model and its optimizer.

    The loop stays as it is in FP32. Step an LR scheduler only if ``optimizer.step_was_skipped`` is False. To undo it,
    call :func:`hf_mp.detach`.

    Args:
        model: any ``nn.Module``; one loaded in FP16/BF16 gets FP32 masters.
        optimizer: an optimizer over its parameters.
        precision, settings: as for :class:`MixedPrecision`; ``"fp32"`` changes nothing.
        methods: names of methods that the loop calls besides the model itself (:meth:`MixedPrecision.attach`).

    Returns the same model, and the optimizer to use from now on (see :meth:`MixedPrecision.attach_optimizer`).
    Raises TypeError for anything but a module and an optimizer, and as ``attach`` and ``attach_optimizer`` do.
    """
    runtime = MixedPrecision(precision, **settings)  # first: a misspelt precision is told whatever else is wrong
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}; "
            "without an optimizer, or with several: MixedPrecision(...).attach(model), then "
            "attach_optimizer(optimizer) for each"
        )
    try:
        return runtime.attach(model, methods), runtime.attach_optimizer(optimizer)
    except BaseException:
        runtime.detach()
        raise
