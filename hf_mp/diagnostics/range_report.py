"""``RangeReport``: how a model's numbers lie in FP16's range, and the rules that keep them in it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_mp.diagnostics.ranges import OpRange
from hf_mp.diagnostics.tables import for_json, printed, table

RULES_NAME = "precision_rules.json"
CLOSE_DOUBLINGS = 2.0
_KIND = "hf_mp range report"
_VERSION = 1


@dataclass(frozen=True)
class RangeReport:
    """How the numbers of a model lie in FP16's range, op by op; prints as a table.

    Attributes:
        model: name of the model's class.
        precision: the policy that was asked for.
        batches: number of batches that were run.
        ops: every op by module, in the order of the forward.
        rules: what keeps them in range with 2 doublings to spare, for ``rules=`` of anything here; empty where nothing
            is needed.
        fp32_share: share of the forward's floating point operations that ``rules`` take out of 16 bits.
        notes: further observations.
    """

    model: str
    precision: str
    batches: int
    ops: tuple[OpRange, ...]
    rules: dict[str, str]
    fp32_share: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def overflows(self) -> tuple[OpRange, ...]:
        """What FP16 makes inf of."""
        return tuple(op for op in self.ops if op.overflows)

    @property
    def close(self) -> tuple[OpRange, ...]:
        """What comes within 2 doublings of FP16's end."""
        return tuple(op for op in self.ops if op.is_within(CLOSE_DOUBLINGS))

    def to_json(self) -> str:
        """All fields, as a JSON object; NaN is written as null."""
        return json.dumps({"kind": _KIND, "version": _VERSION, **for_json(asdict(self))}, indent=2, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write ``precision_rules.json``; returns its path.

        Args:
            path: a directory, such as the model's, or a file.

        Raises:
            OSError: if it cannot be written.
        """
        file = _file(path)
        # A plain file, without a rename: whoever reads half of it is told that it is no report.
        file.write_text(self.to_json() + "\n", encoding="utf-8")
        return file

    @classmethod
    def load(cls, path: str | Path) -> RangeReport:
        """Read what :meth:`save` wrote.

        Args:
            path: the file, or its directory.

        Raises:
            OSError: if there is no such file.
            ValueError: for a file that is no such report. Attaching a model names rules that match none of its modules.
        """
        file = _file(path)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            # The folder is often a model's, where other programs have JSON of their own.
            if values.pop("kind") != _KIND or values.pop("version") != _VERSION:
                raise ValueError("another kind of file, or another version")
            # JSON has no NaN; null of a gradient means that there is none.
            fields: list[dict[str, Any]] = [
                {key: math.nan if value is None and key != "fp16_gradient" else value for key, value in op.items()}
                for op in values["ops"]
            ]
            ops = tuple(OpRange(**one) for one in fields)
            checked = {"rules": dict(values["rules"]), "fp32_share": float(values["fp32_share"])}
            return cls(**{**values, **checked, "ops": ops, "notes": tuple(values["notes"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is no range report as hf_mp.calibrate(...).save() writes it: {error}") from error

    def to_text(self, *, every_op: bool = False, width: int = 150) -> str:
        """A table of what overflows and what comes close, or of every op, and the rules."""
        shown = self.ops if every_op else [op for op in self.ops if op.overflows or op.is_within(CLOSE_DOUBLINGS)]
        header = ("module or expert", "op", "largest", "headroom", "largest gradient", "in FP16")
        rows = [(op.expert or op.module, op.op, *_cells(op)) for op in shown]
        title = f"{self.model} in {self.precision}, {self.batches} batches"
        text = printed(title, table(header, rows, names=2), width=width) if rows else ""
        return text + "".join(f"{sentence}\n" for sentence in self.sentences())  # rules are to be copied: no line ends

    __str__ = to_text

    def sentences(self) -> list[str]:
        """What was found, and the rules."""
        held = [op for op in self.ops if op.is_fp16 and math.isfinite(op.headroom)]
        # What is inf has no headroom to tell; the rows of the table name it.
        least = min(held, key=lambda op: op.headroom, default=None)
        lines = [f"{len(self.overflows)} of {len(self.ops)} ops overflow in FP16, {len(self.close)} come close."]
        if least is not None and not self.overflows:
            where = f"{least.op} in {least.module or 'the model itself'}"
            lines.append(
                f"The largest magnitude is {least.largest:.4g} ({where}): {least.headroom:.1f} doublings left."
            )
        lines += self.notes
        if not self.rules:
            return [*lines, "No rules are needed."]
        rules = ", ".join(f"{key!r}: {value!r}" for key, value in self.rules.items())
        return [*lines, f"rules={{{rules}}}", f"They take {self.fp32_share:.2%} of the forward's FLOPs out of 16 bits."]


def _file(path: str | Path) -> Path:
    return Path(path) / RULES_NAME if Path(path).is_dir() else Path(path)


def _cells(op: OpRange) -> tuple[str, str, str, str]:
    largest = "inf or NaN" if math.isnan(op.largest) else f"{op.largest:.4g}"
    headroom = f"{op.headroom:+.1f}" if op.is_fp16 and math.isfinite(op.headroom) else ""
    gradient = "" if op.fp16_gradient is None else f"{op.fp16_gradient:.3g}"
    verdict = "overflows" if op.overflows else "close" if op.is_within(CLOSE_DOUBLINGS) else ""
    return largest, headroom, gradient, verdict if op.is_fp16 else "FP32"
