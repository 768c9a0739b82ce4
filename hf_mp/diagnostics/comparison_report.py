"""``PrecisionComparison``: how far the precisions of a model are from FP32, as a table and data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hf_mp.diagnostics.tables import for_json, listed, printed, table

WIDTH = 80  # of the tables
SHOWN_LAYERS = 12  # of a table; the others are in the data


@dataclass(frozen=True)
class LayerError:
    """The error of one layer's output, relative to FP32's: the norm of the difference over the norm.

    Attributes:
        layer: name of the module.
        own: what arises in it, given FP32's inputs; None where those do not fit. NaN for inf or NaN.
        total: with what its inputs brought.
    """

    layer: str
    own: float | None
    total: float


@dataclass(frozen=True)
class PrecisionError:
    """How far one precision is from FP32.

    Attributes:
        precision: the policy.
        rules: of autocast.
        logits_rms, logits_maximum: of the differences of all logits: root of their mean square, and largest magnitude.
            NaN where the precision gives inf or NaN, as everything below.
        log_probability_rms, log_probability_maximum: of the differences of the chosen tokens' (or classes')
            log-probabilities, natural; None where the batches choose none.
        kl: the mean over them of the Kullback-Leibler divergence of this precision's distribution from FP32's, in nats.
        layers: the errors by layer, in the order of the forward.
    """

    precision: str
    rules: dict[str, str]
    logits_rms: float
    logits_maximum: float
    log_probability_rms: float | None = None
    log_probability_maximum: float | None = None
    kl: float | None = None
    layers: tuple[LayerError, ...] = ()

    @property
    def error(self) -> float:
        """What precisions are compared by: ``log_probability_rms``, or ``logits_rms`` where there is none."""
        return self.logits_rms if self.log_probability_rms is None else self.log_probability_rms

    @property
    def name(self) -> str:
        """The precision and its rules."""
        return f"{self.precision}, {listed(self.rules)}" if self.rules else self.precision

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """Those of the table."""
        found = self.logits_rms, self.logits_maximum
        return found if self.kl is None else (*found, self.log_probability_rms, self.log_probability_maximum, self.kl)


@dataclass(frozen=True)
class PrecisionComparison:
    """What :func:`hf_mp.compare_precisions` found; prints as a table of 80 columns.

    Attributes:
        model: name of the model's class.
        batches: number of batches that were run.
        positions: number of tokens (or samples) whose logits were compared.
        chosen: number of tokens (or classes) whose log-probabilities were.
        errors: one for each precision and its rules: first without rules, then with each rule alone, then with all.
        notes: further observations.
    """

    model: str
    batches: int
    positions: int
    chosen: int
    errors: tuple[PrecisionError, ...]
    notes: tuple[str, ...] = ()

    def change(self, error: PrecisionError) -> float | None:
        """What the rules of ``error`` buy: its error over that of its precision without rules, less 1.

        -0.25 is a quarter less. None without rules, and where either is inf, NaN or without an error.
        """
        plain = next((one for one in self._without_rules() if one.precision == error.precision), error)
        if error is plain or not plain.error > 0.0 or not math.isfinite(plain.error + error.error):
            return None
        return error.error / plain.error - 1.0

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON; inf and NaN are None."""
        found: dict[str, Any] = for_json(asdict(self))
        return found

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_text(self, *, every_layer: bool = False) -> str:
        """The tables: the precisions, and the layers (where there are many, those with the largest errors)."""
        parts = [
            f"{self.model}: how far from FP32 ({self.batches} batches, {self.positions:,} positions)",
            self._table_of_precisions(),
        ]
        if shown := self._shown_layers(every_layer):
            parts.append("\nRelative error of a layer's output: what arises there, and in all")
            parts.append(self._table_of_layers(shown))
        return printed(*parts, *self.notes, width=WIDTH)

    __str__ = to_text

    def _without_rules(self) -> list[PrecisionError]:
        return [one for one in self.errors if not one.rules]

    def _table_of_precisions(self) -> Any:
        chosen = ("log-p RMS", "largest", "KL") if self.chosen else ()
        header = ("precision", "rules", "logits RMS", "largest", *chosen, "rules buy")
        rows = []
        for one in self.errors:
            change = self.change(one)
            bought = "" if change is None else f"{change:+.0%}"
            rows.append((one.precision, listed(one.rules), *map(_short, one.numbers), bought))
        return table(header, rows, names=2)

    def _shown_layers(self, every_layer: bool) -> list[str]:
        largest: dict[str, float] = {}
        for layer in (layer for one in self._without_rules() for layer in one.layers):
            own = math.inf if layer.own is not None and math.isnan(layer.own) else layer.own or 0.0
            largest[layer.layer] = max(own, largest.get(layer.layer, 0.0))
        kept = sorted(largest, key=lambda name: -largest[name])[: None if every_layer else SHOWN_LAYERS]
        return [name for name in largest if name in kept]

    def _table_of_layers(self, shown: Iterable[str]) -> Any:
        plain = self._without_rules()
        header = ["layer", *(heading for one in plain for heading in (f"{one.precision}\nthere", "in\nall"))]
        by_name = [{layer.layer: layer for layer in one.layers} for one in plain]
        rows = []
        for name in shown:
            found = [layers[name] for layers in by_name if name in layers]
            rows.append((name, *(_short(error) for one in found for error in (one.own, one.total))))
        return table(header, rows, least_width=max(8, min(24, WIDTH - 18 * len(plain))))


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "inf/NaN"
    return f"{value:.1e}" if value else "0"
