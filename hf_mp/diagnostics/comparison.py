"""``compare_precisions``: differences of a model's outputs in 16 bits from FP32."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.casting.autocast_stack import active_autocast
from hf_mp.casting.rules import Rules, parse_rules
from hf_mp.casting.tables import TABLES, TableName, op_name
from hf_mp.diagnostics.batches import call_model, check_batches
from hf_mp.diagnostics.comparison_report import PrecisionComparison, PrecisionError
from hf_mp.diagnostics.fp32_reference import Reference, logits_of, run_in_fp32
from hf_mp.diagnostics.overflow import attached_runtime
from hf_mp.diagnostics.ranges import MASK, max_of
from hf_mp.diagnostics.step_snapshot import (
    compile_disabled,
    restoring_module_state,
    restoring_weights,
    without_gradients,
)
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.gradient_scan import largest_magnitude
from hf_mp.policy import PrecisionPolicy
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.attach_checks import detach

Precision = PrecisionPolicy | torch.dtype | str
ROWS_ELEMENTS = 2**22  # logits that are compared at once


@torch.no_grad()
def compare_precisions(
    model: nn.Module,
    batches: Mapping[str, Any] | Tensor | Iterable[Any],
    precisions: Sequence[Precision | tuple[Precision, Rules]] = ("bf16", "fp16"),
    *,
    tables: TableName = "compact",
) -> PrecisionComparison:
    """Measure the differences of a model's outputs from FP32, in each precision and with each set of rules.

    Batches run forward without dropout, in FP32 without TF32 and in each precision. One rule worth trying keeps the
    head in FP32 (``{"lm_head": "fp32"}``; MiniMax-M1, arXiv 2506.13585).

    Of ``logits`` of several classes, the log-probabilities of the tokens (or classes) that are most likely in FP32 are
    compared too, without positions hidden by ``attention_mask`` and masked logits. Without ``logits``, the first
    floating output is compared.

    Args:
        model: any module; it is not changed. Of an attached model, a copy with its FP32 masters and without its rules
            is compared, with 16-bit weights in FP32.
        batches: one batch (a mapping of arguments or a tensor), or an iterable of batches, each a mapping, a tuple of
            arguments, or a tensor.
        precisions: presets, policies or dtypes, or pairs of one and its rules; default ``"bf16"`` and ``"fp16"``.
        tables: of autocast; default ``"compact"``.

    Returns:
        A :class:`PrecisionComparison`.

    Raises:
        TypeError: for anything but a module and a sequence of precisions.
        ValueError: without a batch or a precision; for an unknown precision or rule; for outputs of inf or NaN in FP32,
            or without a floating tensor.
        RuntimeError: inside an autocast.
    """
    if (outer := active_autocast()) is not None and outer.enabled:
        raise RuntimeError(f"inside hf_mp.autocast({outer.dtype}) nothing is plain FP32: compare precisions outside")
    variants = [_Differences(*one) for one in _variants(precisions, tables)]
    given = check_batches(batches)
    positions = 0
    with _plain_model(model) as plain:
        for number, batch in enumerate(given, 1):
            reference = run_in_fp32(plain, batch, number)
            positions += int(reference.is_compared.sum())
            for variant in variants:
                variant.add(_logits_in(variant, plain, batch, tables), reference)
    errors = tuple(variant.error() for variant in variants)
    return PrecisionComparison(type(model).__name__, len(given), positions, errors, _notes(reference.output, errors))


def _notes(output: str, errors: Iterable[PrecisionError]) -> tuple[str, ...]:
    notes = []
    if output != "logits":
        notes.append(f"The model returns no logits: its first floating output, {output!r}, is compared.")
    if not all(math.isfinite(one.logits_rms) for one in errors):
        notes.append("Where FP16 gives inf or NaN, hf_mp.calibrate finds the rules that keep the model in range.")
    return tuple(notes)


def _variants(precisions: Any, tables: TableName) -> list[tuple[PrecisionPolicy, Rules]]:
    if isinstance(precisions, (str, torch.dtype, PrecisionPolicy)):
        raise TypeError(f"precisions must be a list: write [{str(precisions)!r}]")
    found: list[tuple[PrecisionPolicy, Rules]] = []
    for one in precisions:
        variant = _parse_variant(one, tables)
        if variant not in found:
            found.append(variant)
    if not found:
        raise ValueError("precisions is empty: give at least one, such as 'fp16'")
    return found


def _parse_variant(given: Any, tables: TableName) -> tuple[PrecisionPolicy, Rules]:
    pair = given if isinstance(given, tuple) else (given, {})
    if len(pair) != 2 or not isinstance(pair[1], Mapping):
        raise TypeError(f"{given!r} is no precision with rules: write ('fp16', {{'lm_head': 'fp32'}})")
    variant = PrecisionPolicy.parse(pair[0]), pair[1]
    parse_rules(pair[1], TABLES[tables])  # raises before the reference runs, which takes minutes
    return variant


@contextmanager
def _plain_model(model: nn.Module) -> Iterator[nn.Module]:
    """Yield ``model``, or a copy if it is attached, in evaluation mode and FP32; restore it on exit."""
    if attached_runtime(model) is not None:
        model = detach(copy.deepcopy(model))
    with (
        without_gradients(model.parameters()),
        restoring_module_state(model),
        restoring_weights(model),
        compile_disabled(),
    ):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype in LOWER_PRECISION_DTYPES:
                tensor.data = tensor.data.float()
        model.eval()
        yield model


def _logits_in(variant: _Differences, model: nn.Module, batch: Any, tables: TableName) -> Tensor:
    """Return the logits of shape (positions, classes) in the precision of ``variant``."""
    runtime = MixedPrecision(variant.policy, rules=variant.rules, tables=tables)
    with restoring_weights(model):  # a lean layout in FP16 rounds some masters
        try:
            runtime.attach(model)
            with restoring_module_state(model):
                return logits_of(call_model(model, batch))[1]
        finally:
            runtime.detach()


@dataclass
class _Sum:
    """Sums over values; ``maximum``, their largest magnitude, is NaN for inf and NaN."""

    count: int = 0
    squares: float = 0.0
    maximum: float = 0.0

    def add(self, values: Tensor) -> None:
        self.count += values.numel()
        self.squares += values.square().sum().item()
        self.maximum = max_of([self.maximum, largest_magnitude([values]).item()])

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / max(self.count, 1))


@dataclass
class _Differences:
    policy: PrecisionPolicy
    rules: Rules
    logits: _Sum = field(default_factory=_Sum)
    likeliest: _Sum = field(default_factory=_Sum)  # of log-probabilities
    divergence: float = 0.0

    def add(self, logits: Tensor, reference: Reference) -> None:
        found, expected = logits[reference.is_compared], reference.logits[reference.is_compared]
        # In parts: FP64 logits of a batch would be the largest tensors of all.
        size = max(ROWS_ELEMENTS // expected.shape[-1], 1)
        for rows in zip(found.split(size), expected.split(size), strict=True):
            self._add_rows(rows[0].double(), rows[1].double(), reference.output)

    def _add_rows(self, found: Tensor, expected: Tensor, output: str) -> None:
        # Masked logits differ by 1e38.
        self.logits.add((found - expected)[expected > MASK])
        is_distribution = output == "logits" and expected.shape[-1] > 1  # neither features nor a regression
        if not is_distribution:
            return
        found, expected = found.log_softmax(-1), expected.log_softmax(-1)
        # Not the labels, which models shift in different ways.
        self.likeliest.add((found - expected).gather(-1, expected.argmax(-1, keepdim=True)))
        # p log(p/q) is 0 for p = 0, but computed as NaN.
        probability = expected.exp()
        self.divergence += (probability * (expected - found)).masked_fill(probability == 0.0, 0.0).sum().item()

    def error(self) -> PrecisionError:
        rules = {key if isinstance(key, str) else op_name(key): value for key, value in self.rules.items()}
        error = PrecisionError(str(self.policy), rules, self.logits.rms, self.logits.maximum)
        if not self.likeliest.count:
            return error
        return replace(
            error,
            log_probability_rms=self.likeliest.rms,
            log_probability_maximum=self.likeliest.maximum,
            kl=self.divergence / self.likeliest.count,
        )
