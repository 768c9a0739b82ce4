"""``OverflowReport``: the origin of the first inf or NaN of a skipped step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hf_mp.diagnostics.values import TensorRange

Phase = Literal["input", "weight", "forward", "backward", "loss outside of the model", "not found"]


@dataclass(frozen=True)
class OverflowReport:
    """The origin of the first inf or NaN of a skipped step, or of a gradient of 2**64 or more.

    FP32 cannot hold the square of such a gradient, and Adam's second moment would stay inf.

    Attributes:
        step: number of the optimizer step, from 1.
        micro_batch: number of the backward within the step, from 1.
        micro_batches: number of backwards in the step.
        rank: the process in distributed training; else 0.
        phase: the origin. ``"input"``: the batch. ``"weight"``: a parameter or buffer, or its FP16 rounding.
            ``"forward"``, ``"backward"``: an op, from finite values. ``"loss outside of the model"``: the gradient of a
            model output. ``"not found"``: the replay showed none; see ``notes``.
        module: name of the module in the attached model; ``""`` is the model itself.
        op: torch's name of the function that the module called, or whose backward it is.
        tensor: name of the input, weight or output; ``""`` for an op.
        inputs: the range of each input tensor of the op.
        outputs: the range of each output tensor.
        nonfinite_gradients: names of the parameters whose gradient is inf, NaN or too large in this micro-batch.
        loss_scale: the loss scale of the step.
        smaller_scale_helps: whether the same backward is finite at a smaller loss scale; None if not tried.
        largest_finite_scale: the largest such power of two, by trial; None if not tried.
        finite_in_fp32: whether the same micro-batch is finite without autocast; None if not tried.
        skips_until_stop: consecutive skipped steps, including this one, until ``LossScaleError``; None for never.
        notes: further observations.
    """

    step: int
    micro_batch: int
    micro_batches: int
    rank: int
    phase: Phase
    module: str = ""
    op: str = ""
    tensor: str = ""
    inputs: tuple[TensorRange, ...] = ()
    outputs: tuple[TensorRange, ...] = ()
    nonfinite_gradients: tuple[str, ...] = ()
    loss_scale: float = 1.0
    smaller_scale_helps: bool | None = None
    largest_finite_scale: float | None = None
    finite_in_fp32: bool | None = None
    skips_until_stop: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def culprit(self) -> tuple[str, str, str, str]:
        """Equal for reports about the same origin."""
        return self.phase, self.module, self.op, self.tensor

    @property
    def headline(self) -> str:
        """The origin in one sentence, without a full stop."""
        module = f"module {self.module!r}" if self.module else "the model itself"
        return {
            "input": f"The batch contains inf or NaN: {self.tensor!r}, as it enters the model",
            "weight": f"The weight or buffer {self.tensor!r} is not finite{self._in_16_bits}",
            "forward": f"The first {self._what} was produced by {self.op!r} in {module}, in the forward pass",
            "backward": f"The first {self._what} was produced by the gradient of {self.op!r} in {module}, in the "
            "backward pass",
            "loss outside of the model": "The loss is computed outside the model, and its gradient with respect to the "
            f"output {self.tensor!r} has {self._what}, although that output is finite",
            "not found": "A replay did not find the origin of the inf or NaN",
        }[self.phase]

    @property
    def is_too_large(self) -> bool:
        """Whether the gradient is finite but too large to be squared."""
        return bool(self.outputs) and not any(found.inf_count or found.nan_count for found in self.outputs)

    @property
    def _what(self) -> str:
        return "magnitude of 2**64 or more" if self.is_too_large else "inf or NaN"

    @property
    def _in_16_bits(self) -> str:
        """Whether only the FP16 rounding of a weight is not finite."""
        is_finite = all(found.inf_count == found.nan_count == 0 for found in self.inputs[:1])
        return " in FP16" if is_finite and self.inputs else ""

    @property
    def advice(self) -> str:
        """What to do; empty if nothing."""
        if self.phase == "not found":
            return ""
        if self.smaller_scale_helps:
            until = "" if self.largest_finite_scale is None else f", up to {self.largest_finite_scale:g}"
            return f"A smaller loss scale helps: the same backward is finite{until}, and the scaler goes there."
        is_fp16 = any(found.dtype == "float16" for found in (*self.inputs, *self.outputs))
        rule = f"rules={{{self.module!r}: 'fp32'}}" if self.module else "a rule for that op"
        in_fp32 = f"Compute it in FP32 ({rule}){' or train in bf16' if is_fp16 else ''}."
        what = {
            "input": "Clean the data.",
            "weight": in_fp32 if self._in_16_bits else "Go back to an earlier checkpoint, or load other weights.",
            "loss outside of the model": "Scale the loss down."
            if self.is_too_large
            else "Look for a division by zero, or a logarithm or root of zero, in the loss.",
        }.get(self.phase, f"FP32 was not tried; it may be finite there. {in_fp32}")
        if self.finite_in_fp32:
            what = f"In FP32 the same micro-batch is finite. {in_fp32}"
        elif self.finite_in_fp32 is not None:
            what = "In FP32 the same micro-batch is not finite either: the cause is the model or its data."
        stops = ""
        if self.skips_until_stop is not None:
            stops = f" Training stops after {self.skips_until_stop} such steps in a row, this one included."
        return f"No smaller loss scale helps. {what}{stops}"

    def to_text(self) -> str:
        rank = f", rank {self.rank}" if self.rank else ""
        where = f"micro-batch {self.micro_batch} of {self.micro_batches}{rank}"
        lines = [f"Step {self.step} ({where}) was skipped at loss scale {self.loss_scale:g}. {self.headline}."]
        lines += [f"  in:  {found}" for found in self.inputs]
        lines += [f"  out: {found}" for found in self.outputs]
        if self.nonfinite_gradients:
            names, more = self.nonfinite_gradients[:5], len(self.nonfinite_gradients) - 5
            what = "gradients whose square leaves FP32" if self.is_too_large else "gradients not finite"
            lines.append(f"  {what}: {', '.join(names)}{f' and {more} more' if more > 0 else ''}")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])

    __str__ = to_text

    def to_json(self) -> str:
        """All fields, as a JSON object."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OverflowReport:
        """The report of the fields that :meth:`to_json` wrote."""
        ranges = {
            name: tuple(TensorRange(**{**found, "shape": tuple(found["shape"])}) for found in values[name])
            for name in ("inputs", "outputs")
        }
        texts = {name: tuple(values[name]) for name in ("nonfinite_gradients", "notes")}
        return cls(**{**values, **ranges, **texts})
