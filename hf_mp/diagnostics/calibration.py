"""``calibrate``: finds where a model leaves FP16's range, and the rules that keep it in range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.diagnostics.cures import find_rules
from hf_mp.diagnostics.given_batches import call, checked, loss_of
from hf_mp.diagnostics.kept_state import eagerly, gradients_set_aside, untouched, weights_kept
from hf_mp.diagnostics.overflow import attached_runtime
from hf_mp.diagnostics.range_report import CLOSE_DOUBLINGS, RangeReport
from hf_mp.diagnostics.ranges import STAND_IN, OpRange, RangeRecorder
from hf_mp.dtypes import needs_loss_scale
from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.rules import FP16_MAX
from hf_mp.step.mixed_precision import MixedPrecision


def calibrate(
    model: nn.Module,
    batches: Mapping[str, Any] | Tensor | Iterable[Any],
    precision: PrecisionPolicy | str = "fp16",
    *,
    rules: Rules | None = None,
    tables: TableName = "compact",
) -> RangeReport:
    """Find where ``model`` leaves FP16's range, and the rules that keep it in range.

    Each batch runs through a forward and, if the model returns a loss, a backward, in BF16 instead of FP16, because
    BF16 has FP32's range. Rules are added, and the forwards repeated with them, until no value comes within 2 doublings
    of 65504. Weights, gradients, buffers and random generators are restored afterwards.

    Args:
        model: a model that is not attached, in the mode (training or evaluation) that the rules are for.
        batches: the arguments of its calls. A mapping of arguments, or one tensor, is one batch. Anything else is a
            list (or other iterable) of batches, each a mapping, a tuple of arguments, or one tensor.
        precision: a policy that computes in FP16; default ``"fp16"``.
        rules, tables: those of the autocast that you will use; default none and ``"compact"``.

    Returns:
        A :class:`RangeReport`; add its ``rules`` to those that you passed.

    Raises:
        TypeError: for anything but a module.
        ValueError: without a batch, for a precision without FP16, or an attached model.
        CannotHealError: if no rules help.
    """
    policy, given = PrecisionPolicy.parse(precision), checked(batches)
    if not needs_loss_scale(policy.compute):
        raise ValueError(f"precision={str(policy)!r} has FP32's range: calibrate is for FP16")
    if attached_runtime(model) is not None:
        raise ValueError("mixed precision is attached to this model: call hf_mp.detach(model), or calibrate it before")
    # BF16 has FP32's exponents: nothing overflows there, so all places are seen at once with their magnitudes.
    stand_in = replace(policy, compute=STAND_IN, params=STAND_IN if policy.is_lean else policy.params, loss_scale=None)
    runtime = MixedPrecision(stand_in, rules=rules, tables=tables)
    with untouched(model), gradients_set_aside(model.parameters()), weights_kept(model), eagerly():
        try:
            runtime.attach(model)
            # Once with gradients, which tell where a loss scale would overflow; looks for rules need none.
            ops = _look(runtime, model, given)
            notes = ["some of it is inf or NaN in FP32's range, too: the cause is the model or its data"]
            if not any(math.isnan(op.largest) for op in ops):
                notes = []
                find_rules(runtime, ops, lambda rules: _look(runtime, model, given, rules))
        finally:
            runtime.detach()
    if all(op.fp16_gradient is None for op in ops):
        notes.append("the batches give no loss: there was no backward")
    return RangeReport(type(model).__name__, str(policy), len(given), tuple(ops), dict(runtime.remedies), tuple(notes))


def _look(
    runtime: MixedPrecision, model: nn.Module, batches: Sequence[Any], rules: dict[str, str] | None = None
) -> Sequence[OpRange]:
    """What the batches show, with a backward; or, given further ``rules``, in the forward alone."""
    backward = rules is None
    runtime.add_rules(rules or {})
    recorder = RangeRecorder(FP16_MAX / 2**CLOSE_DOUBLINGS, backward=backward)
    for batch in batches:
        with recorder.recording(runtime.autocast, model), torch.set_grad_enabled(backward):
            outputs = call(model, batch)
        # Without labels there is none, and the forward alone is told of.
        if (loss := loss_of(outputs)) is not None:
            loss.backward()
            model.zero_grad()
    return recorder.ranges()
