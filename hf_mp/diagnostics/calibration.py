"""``calibrate``: rules that keep a model in FP16's range."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.diagnostics.batches import call_model, check_batches, find_loss
from hf_mp.diagnostics.overflow import attached_runtime
from hf_mp.diagnostics.overflow_diagnosis import find_rules
from hf_mp.diagnostics.range_report import CLOSE_DOUBLINGS, RangeReport
from hf_mp.diagnostics.ranges import RANGE_DTYPE, OpRange, RangeRecorder
from hf_mp.diagnostics.step_snapshot import (
    compile_disabled,
    restoring_module_state,
    restoring_weights,
    without_gradients,
)
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
    """Find the ops of ``model`` that leave FP16's range, and the rules that keep them in range.

    Batches run forward and, if there is a loss, backward, in BF16, which has FP32's range. Rules are added, and the
    forwards repeated, until no value comes within 2 doublings of 65504. The model and RNG states are restored.

    Args:
        model: a model that is not attached, in the mode (training or evaluation) that the rules are for.
        batches: one batch (a mapping of arguments or a tensor), or an iterable of batches, each a mapping, a tuple of
            arguments, or a tensor.
        precision: a policy that computes in FP16; default ``"fp16"``.
        rules, tables: of the autocast in training; default none and ``"compact"``.

    Returns:
        A :class:`RangeReport`; add its ``rules`` to those that you passed.

    Raises:
        TypeError: for anything but a module.
        ValueError: without a batch, for a precision without FP16, or an attached model.
        CannotHealError: if no rules help.
    """
    policy, given = PrecisionPolicy.parse(precision), check_batches(batches)
    if not needs_loss_scale(policy.compute):
        raise ValueError(f"precision={str(policy)!r} has FP32's range: calibrate is for FP16")
    if attached_runtime(model) is not None:
        raise ValueError("mixed precision is attached to this model: call hf_mp.detach(model), or calibrate it before")
    # Nothing overflows in BF16: one forward shows all ops out of FP16's range.
    measured_policy = replace(
        policy, compute=RANGE_DTYPE, params=RANGE_DTYPE if policy.is_lean else policy.params, loss_scale=None
    )
    runtime = MixedPrecision(measured_policy, rules=rules, tables=tables)
    with (
        restoring_module_state(model),
        without_gradients(model.parameters()),
        restoring_weights(model),
        compile_disabled(),
    ):
        try:
            runtime.attach(model)
            ops = _measure_ranges(runtime, model, given, {}, backward=True)
            is_finite = not any(math.isnan(op.largest) for op in ops)
            if is_finite:
                find_rules(runtime, ops, functools.partial(_measure_ranges, runtime, model, given, backward=False))
        finally:
            runtime.detach()
    notes = [] if is_finite else ["some of it is inf or NaN in FP32's range, too: the cause is the model or its data"]
    if all(op.fp16_gradient is None for op in ops):
        notes.append("the batches give no loss: there was no backward")
    return RangeReport(type(model).__name__, str(policy), len(given), tuple(ops), dict(runtime.remedies), tuple(notes))


def _measure_ranges(
    runtime: MixedPrecision, model: nn.Module, batches: Sequence[Any], rules: dict[str, str], *, backward: bool
) -> Sequence[OpRange]:
    """Return the ranges of all ops after ``rules`` were added to ``runtime``."""
    runtime.add_rules(rules)
    recorder = RangeRecorder(FP16_MAX / 2**CLOSE_DOUBLINGS, backward=backward)
    for batch in batches:
        with recorder.recording(runtime.autocast, model), torch.set_grad_enabled(backward):
            outputs = call_model(model, batch)
        loss = find_loss(outputs)
        if loss is not None:
            loss.backward()
            model.zero_grad()
    return recorder.ranges()
