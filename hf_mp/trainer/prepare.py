"""``prepare``: mixed precision for a plain loop, which has no Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp.policy import PrecisionPolicy
from hf_mp.step.mixed_precision import MixedPrecision


def prepare(
    model: nn.Module, optimizer: Optimizer, precision: PrecisionPolicy | torch.dtype | str = "fp16", **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """Mixed precision for a plain loop: attach a policy to a model and its optimizer.

    The loop stays as it is for FP32; ``optimizer.step_was_skipped`` tells when to hold an LR scheduler back.

    Args:
        model: any ``nn.Module``; one loaded in FP16/BF16 is given FP32 masters.
        optimizer: over parameters of ``model``.
        precision: as ``policy`` of :class:`MixedPrecision`; ``"fp32"`` changes nothing.
        settings: as for :class:`MixedPrecision`.

    Returns:
        The same model, and what :meth:`MixedPrecision.attach_optimizer` returns: the optimizer to use from now on.

    Raises:
        TypeError: for anything but a module and an optimizer; others as ``attach`` and ``attach_optimizer``.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}; "
            "several optimizers: MixedPrecision(...).attach(model), then attach_optimizer(optimizer) for each"
        )
    runtime = MixedPrecision(precision, **settings)
    try:
        return runtime.attach(model), runtime.attach_optimizer(optimizer)
    except BaseException:
        runtime.detach()
        raise
