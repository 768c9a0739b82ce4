"""``OverflowReport``: the origin of the first inf or NaN of a skipped step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_mp.diagnostics.values import TensorRange
from hf_mp.scaling.rules import scale_text

Phase = Literal["input", "weight", "forward", "backward", "loss outside of the model", "not found"]


@dataclass(frozen=True)
class OverflowReport:
    """Origin of the first inf or NaN of a skipped step, or of a gradient of 2**64 or more.

    The square of 2**64 is inf in FP32: Adam's second moment would become inf, and stay inf.

    Attributes:
        step: number of the optimizer step, from 1.
        micro_batch: number of the backward within the step, from 1.
        micro_batches: backwards in the step.
        rank: the rank in distributed training; else 0.
        phase: kind of origin. ``"input"``: the batch. ``"weight"``: a parameter or buffer, or its FP16 rounding.
            ``"forward"``, ``"backward"``: an op with finite inputs. ``"loss outside of the model"``: the gradient of a
            model output. ``"not found"``: see ``notes``.
        module: name of the module in the attached model; ``""`` is the model itself.
        op: torch's name of the function that the module called, also in a backward.
        tensor: name of the input, weight or output; ``""`` for an op.
        inputs, outputs: ranges of the input and output tensors of the op.
        nonfinite_gradients: names of the parameters with a gradient of inf, NaN or 2**64 in this micro-batch.
        loss_scale: loss scale of the step.
        smaller_scale_helps: whether the backward is finite at a smaller loss scale; None if not tried.
        largest_finite_scale: largest power of two at which it is finite; None if not tried or if there is none.
        smallest_scale: lower bound of the loss scale.
        finite_in_fp32: whether the micro-batch is finite without autocast; None if not tried.
        finite_in_bf16: whether it is finite in BF16; None if not tried.
        rules: rules that ``on_overflow="heal"`` would add. Empty if none is needed or none helps; None if not tried.
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
    smallest_scale: float = 0.0
    finite_in_fp32: bool | None = None
    finite_in_bf16: bool | None = None
    rules: dict[str, str] | None = None
    notes: tuple[str, ...] = ()

    @property
    def culprit(self) -> tuple[str, str, str, str]:
        """Key of the origin, equal for reports with the same one."""
        return self.phase, self.module, self.op, self.tensor

    @property
    def headline(self) -> str:
        """Origin in one sentence, without a full stop."""
        module = f"module {self.module!r}" if self.module else "the model itself"
        return {
            "input": f"The batch contains inf or NaN: {self.tensor!r}, as it enters the model",
            "weight": f"The weight or buffer {self.tensor!r} is not finite{self._in_16_bits}",
            "forward": f"The first inf or NaN was produced by {self.op!r} in {module}, in the forward pass",
            "backward": f"The first inf or NaN was produced by the gradient of {self.op!r} in {module}, in the "
            "backward pass",
            "loss outside of the model": "The loss is computed outside the model, and its gradient with respect to the "
            f"output {self.tensor!r} has inf, NaN or a magnitude of 2**64 or more, although that output is finite",
            "not found": "A replay did not find the origin of the inf or NaN",
        }[self.phase]

    @property
    def _in_16_bits(self) -> str:
        """``" in FP16"`` if only the rounding of a weight is not finite, else ``""``."""
        # The first range is that of the weight itself, the second that of its cast.
        is_finite = all(found.inf_count == found.nan_count == 0 for found in self.inputs[:1])
        return " in FP16" if is_finite and self.inputs else ""

    @property
    def advice(self) -> str:
        """Advice for the user; empty if no origin was found."""
        if self.phase == "not found":
            return ""
        if not self.smaller_scale_helps:
            return f"No smaller loss scale helps. {self._remedy}"
        until, ends = self.largest_finite_scale or 0.0, "and the scaler goes there"
        if until < self.smallest_scale:
            ends = f"and the scaler goes no lower than {scale_text(self.smallest_scale)}: give it a smaller one"
        return f"A smaller loss scale helps: the same backward is finite, up to {scale_text(until)}, {ends}."

    @property
    def _remedy(self) -> str:
        if self.finite_in_fp32 is False:
            return "In FP32 the same micro-batch is not finite either: the cause is the model or its data."
        if self.finite_in_fp32:
            return f"In FP32 the same micro-batch is finite. {self._way_out}"
        other_weight = "Go back to an earlier checkpoint, or load other weights."
        return {
            "input": "Clean the data.",
            "weight": self._way_out if self._in_16_bits else other_weight,
            "loss outside of the model": "Look for a division by zero, a logarithm or root of zero, or too large a "
            "factor in the loss.",
        }.get(self.phase, f"FP32 was not tried; it may be finite there. {self._way_out}")

    @property
    def _way_out(self) -> str:
        """Advice to keep values in FP16's range, without precisions that failed."""
        rules = {self.module: "fp32"} if self.rules is None else self.rules
        found = f"Pass rules={rules}" if rules else "Let on_overflow='heal' keep it in range"
        # BF16 holds a weight beyond FP16's range, without a trial.
        if self.finite_in_bf16 or self.phase == "weight":
            found += ", or train in bf16"
        return f"{found}. In BF16 it is not finite." if self.finite_in_bf16 is False else f"{found}."

    @property
    def findings(self) -> str:
        """The report without the advice."""
        rank = f", rank {self.rank}" if self.rank else ""
        lines = [
            f"Step {self.step} (micro-batch {self.micro_batch} of {self.micro_batches}{rank}) was skipped at loss "
            f"scale {scale_text(self.loss_scale)}. {self.headline}."
        ]
        lines += [f"  in:  {found}" for found in self.inputs]
        lines += [f"  out: {found}" for found in self.outputs]
        if self.nonfinite_gradients:
            names, more = self.nonfinite_gradients[:5], len(self.nonfinite_gradients) - 5
            lines.append(f"  spoiled gradients: {', '.join(names)}{f' and {more} more' if more > 0 else ''}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def __str__(self) -> str:
        return f"{self.findings}\n  {self.advice}" if self.advice else self.findings

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OverflowReport:
        """Make a report from the fields of ``dataclasses.asdict`` in JSON, which has lists instead of tuples."""
        ranges = {
            name: tuple(TensorRange(**{**found, "shape": tuple(found["shape"])}) for found in values[name])
            for name in ("inputs", "outputs")
        }
        texts = {name: tuple(values[name]) for name in ("nonfinite_gradients", "notes")}
        return cls(**{**values, **ranges, **texts})
