"""``OverflowReport``: the origin of an overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_mp.diagnostics.values import TensorRange
from hf_mp.scaling.rules import scale_text

DIVERGED = 100.0  # growth of weights; a whole training from scratch reaches 30 (GPT-2)

Phase = Literal["input", "weight", "forward", "backward", "loss outside of the model", "not found"]


@dataclass(frozen=True)
class OverflowReport:
    """Origin of the first inf or NaN of a skipped step, or of a gradient of 2**64 or more.

    The square of 2**64 is inf in FP32: Adam's second moment would become inf, and stay inf.

    Fields about FP32, BF16, rules and smaller scales are None if that was not tried.

    Attributes:
        step: number of the optimizer step, from 1.
        micro_batch: number of the backward in the step, from 1.
        micro_batches: backwards in the step.
        rank: in distributed training; else 0.
        phase: kind of origin. ``"input"``: the batch. ``"weight"``: a parameter or buffer, or its FP16 rounding.
            ``"forward"``, ``"backward"``: an op with finite inputs. ``"loss outside of the model"``: the gradient of a
            model output. ``"not found"``: see ``notes``.
        module: its name in the attached model; ``""`` is the model itself.
        op: torch's name of the called function, also in a backward.
        tensor: name of the input, weight or output; ``""`` for an op.
        inputs, outputs: ranges of the op's tensors.
        nonfinite_gradients: parameters with a gradient of inf, NaN or 2**64.
        loss_scale: of the step.
        smaller_scale_helps: whether the backward is finite at a smaller loss scale.
        largest_finite_scale: largest power of two at which it is finite; None also if there is none.
        smallest_scale: lower bound of the loss scale.
        finite_in_fp32, finite_in_bf16: whether the micro-batch is finite without autocast, and in BF16.
        rules: those that ``on_overflow="heal"`` would add. Empty if none is needed or none helps.
        notes: further observations.
        weight_growth: median factor by which the largest magnitudes of trained matrices have grown since the first
            forward; None if not measured.
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
    weight_growth: float | None = None

    @property
    def culprit(self) -> tuple[str, str, str, str]:
        return self.phase, self.module, self.op, self.tensor

    @property
    def headline(self) -> str:
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
        # The first range is that of the weight, the second of its cast.
        is_weight_finite = bool(self.inputs) and self.inputs[0].inf_count == self.inputs[0].nan_count == 0
        return " in FP16" if is_weight_finite else ""

    @property
    def advice(self) -> str:
        return " ".join(filter(None, (self._advice_on_divergence, self._advice_on_origin)))

    @property
    def _advice_on_divergence(self) -> str:
        if self.phase == "input" or (self.weight_growth or 0.0) < DIVERGED:
            return ""
        return (
            f"The weights have diverged: they are {self.weight_growth:.3g} times as large as at the first forward. "
            "Lower the learning rate first."
        )

    @property
    def _advice_on_origin(self) -> str:
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
        return {
            "input": "Clean the data.",
            "weight": self._way_out if self._in_16_bits else "Go back to an earlier checkpoint, or load other weights.",
            "loss outside of the model": "Look for a division by zero, a logarithm or root of zero, or too large a "
            "factor in the loss.",
        }.get(self.phase, f"FP32 was not tried; it may be finite there. {self._way_out}")

    @property
    def _way_out(self) -> str:
        """Advice without precisions that failed."""
        rules = {self.module: "fp32"} if self.rules is None else self.rules
        way_out = f"Pass rules={rules}" if rules else "Let on_overflow='heal' keep it in range"
        if self.finite_in_bf16 is False:
            return f"{way_out}. In BF16 it is not finite."
        # BF16 holds a weight beyond FP16's range, without a trial.
        fits_bf16 = self.finite_in_bf16 or self.phase == "weight"
        return f"{way_out}, or train in bf16." if fits_bf16 else f"{way_out}."

    @property
    def findings(self) -> str:
        rank = f", rank {self.rank}" if self.rank else ""
        lines = [
            f"Step {self.step} (micro-batch {self.micro_batch} of {self.micro_batches}{rank}) was skipped at loss "
            f"scale {scale_text(self.loss_scale)}. {self.headline}."
        ]
        lines += [*(f"  in:  {found}" for found in self.inputs), *(f"  out: {found}" for found in self.outputs)]
        if self.nonfinite_gradients:
            names, more = self.nonfinite_gradients[:5], len(self.nonfinite_gradients) - 5
            lines.append(f"  spoiled gradients: {', '.join(names)}{f' and {more} more' if more > 0 else ''}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def __str__(self) -> str:
        return f"{self.findings}\n  {self.advice}" if self.advice else self.findings

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OverflowReport:
        """Make a report from the JSON of ``dataclasses.asdict``."""
        ranges = {
            name: tuple(TensorRange(**{**found, "shape": tuple(found["shape"])}) for found in values[name])
            for name in ("inputs", "outputs")
        }
        texts = {name: tuple(values[name]) for name in ("nonfinite_gradients", "notes")}
        return cls(**{**values, **ranges, **texts})
