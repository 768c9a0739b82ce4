"""``prepare``: mixed precision for a plain loop in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp.policy import PrecisionPolicy
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.update import AttachedOptimizer

_Model = TypeVar("_Model", bound=nn.Module)


def prepare(
    model: _Model,
    optimizer: Optimizer,
    precision: PrecisionPolicy | torch.dtype | str = "fp16",
    *,
    methods: Sequence[str] = (),
    **settings: Any,
) -> tuple[_Model, AttachedOptimizer]:
    """Attach mixed precision to a model and its optimizer, for a plain loop with the code of FP32.

    Step an LR scheduler only if ``optimizer.step_was_skipped`` is False. :func:`hf_mp.detach` undoes it. For several
    models of one optimizer, call it once for each model::

        first, optimizer = hf_mp.prepare(first, optimizer, precision="fp16")
        second, optimizer = hf_mp.prepare(second, optimizer, precision="fp16")

    Args:
        model: any ``nn.Module``. FP16/BF16 parameters become FP32 masters.
        optimizer: an optimizer of its parameters.
        precision, settings: as for :class:`MixedPrecision`; ``"fp32"`` changes nothing, and no step is skipped.
        methods: names of methods that the loop calls besides the model itself (:meth:`MixedPrecision.attach`).

    Returns:
        The same model, and the optimizer to use from now on (see :meth:`MixedPrecision.attach_optimizer`).

    Raises:
        TypeError: if ``model`` is no module or ``optimizer`` no optimizer.
        Others: as ``attach`` and ``attach_optimizer``.
    """
    runtime = MixedPrecision(precision, **settings)  # first, so that a misspelt precision is always reported
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}. "
            "Without an optimizer, or with several: MixedPrecision(...).attach(model), then "
            "attach_optimizer(optimizer) for each. For several models of one optimizer, prepare one after the other: "
            "first, optimizer = prepare(first, optimizer); second, optimizer = prepare(second, optimizer)"
        )
    try:
        runtime.attach(model, methods)
        return model, runtime.attach_optimizer(optimizer)
    except BaseException:
        runtime.detach()
        raise
