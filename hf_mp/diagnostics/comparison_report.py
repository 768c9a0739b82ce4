"""``PrecisionComparison``: how far the precisions of a model are from FP32, as a table, data and a picture."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WIDTH = 80  # of the tables
SHOWN_LAYERS = 12  # of a table; the others are in the data
_COLOURS = ("#5e81ac", "#d08770", "#a3be8c", "#b48ead", "#bf616a", "#4c566a")


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
        return f"{self.precision}, {_listed(self.rules)}" if self.rules else self.precision


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
        found: dict[str, Any] = _plain(asdict(self))
        return found

    def to_json(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_text(self, *, every_layer: bool = False) -> str:
        """The tables: the precisions, and the layers (where there are many, those with the largest errors)."""
        from rich.console import Console  # printing alone needs it

        console = Console(width=WIDTH, highlight=False, markup=False)
        with console.capture() as text:
            console.print(f"{self.model}: how far from FP32 ({self.batches} batches, {self.positions:,} positions)")
            console.print(self._table_of_precisions())
            if shown := self._shown_layers(every_layer):
                console.print("\nRelative error of a layer's output: what arises there, and in all")
                console.print(self._table_of_layers(shown))
            for note in self.notes:
                console.print(note)
        return text.get()

    __str__ = to_text

    def save_plot(self, path: str | Path) -> Path:
        """Draw the errors of the precisions and of the layers; returns the path.

        Args:
            path: of the picture; its suffix says which kind matplotlib writes (``.png``, ``.svg``).

        Raises:
            ImportError: without matplotlib.
            OSError: if it cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("save_plot draws with matplotlib: pip install matplotlib, or use to_dict()") from error
        figure = Figure(figsize=(11, max(4.0, 0.4 * len(self.errors))), layout="constrained")
        bars, lines = figure.subplots(1, 2, width_ratios=(1, 2))
        colours = {one.precision: _COLOURS[n % len(_COLOURS)] for n, one in enumerate(self._without_rules())}
        for place, one in enumerate(reversed(self.errors)):
            bars.barh(place, one.error, color=colours[one.precision], alpha=0.55 if one.rules else 1.0)
        bars.set_yticks(range(len(self.errors)), [one.name for one in reversed(self.errors)])
        bars.xaxis.set_major_formatter("{x:.1e}")
        bars.locator_params("x", nbins=4)
        bars.set_xlabel(f"{'log-probability' if self.chosen else 'logits'}, RMS of the difference to FP32")
        for one in self._without_rules():
            names, colour = [layer.layer for layer in one.layers], colours[one.precision]
            # No error has no place on a logarithmic axis.
            lines.plot(names, [layer.total or math.nan for layer in one.layers], color=colour, label=one.precision)
            lines.plot(names, [layer.own or math.nan for layer in one.layers], "o", color=colour, markersize=4)
        lines.set_yscale("log")
        lines.set_ylabel("relative error of a layer's output")
        lines.set_title("lines: in all; dots: what arises there", loc="left", fontsize="medium")
        lines.tick_params(axis="x", rotation=90, labelsize=7)
        for axes in (bars, lines):
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=6, frameon=False)
        figure.savefig(path, dpi=100)
        return Path(path)

    def _without_rules(self) -> list[PrecisionError]:
        return [one for one in self.errors if not one.rules]

    def _table_of_precisions(self) -> Any:
        table = _table()
        table.add_column("precision", overflow="fold")
        table.add_column("rules", overflow="fold", min_width=13)
        table.add_column("logits RMS", justify="right")
        table.add_column("largest", justify="right")
        if self.chosen:
            for heading in ("log-p RMS", "largest", "KL"):
                table.add_column(heading, justify="right")
        table.add_column("rules buy", justify="right")
        for one in self.errors:
            numbers = [one.logits_rms, one.logits_maximum]
            if self.chosen:
                numbers += [one.log_probability_rms, one.log_probability_maximum, one.kl]  # type: ignore[list-item]
            change = self.change(one)
            bought = "" if change is None else f"{change:+.0%}"
            table.add_row(one.precision, _listed(one.rules), *map(_short, numbers), bought)
        return table

    def _shown_layers(self, every_layer: bool) -> list[str]:
        largest: dict[str, float] = {}
        for one in self._without_rules():
            for layer in one.layers:
                own = math.inf if layer.own is not None and math.isnan(layer.own) else layer.own or 0.0
                largest[layer.layer] = max(own, largest.get(layer.layer, 0.0))
        kept = set(sorted(largest, key=lambda name: -largest[name])[: None if every_layer else SHOWN_LAYERS])
        return [name for name in largest if name in kept]

    def _table_of_layers(self, shown: list[str]) -> Any:
        plain = self._without_rules()
        table = _table()
        table.add_column("layer", overflow="fold", min_width=max(8, min(24, WIDTH - 18 * len(plain))))
        for one in plain:
            table.add_column(f"{one.precision}\nthere", justify="right")
            table.add_column("in\nall", justify="right")
        by_name = [{layer.layer: layer for layer in one.layers} for one in plain]
        for name in shown:
            found = [layers[name] for layers in by_name if name in layers]
            table.add_row(name, *(_short(error) for one in found for error in (one.own, one.total)))
        return table


def _table() -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, padding=0, show_edge=False)


def _listed(rules: dict[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in rules.items())


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "inf/NaN"
    return f"{value:.1e}" if value else "0"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
