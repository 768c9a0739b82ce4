"""``RangeReport``: the result of :func:`hf_mp.calibrate`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from hf_mp.casting.text_table import format_columns
from hf_mp.diagnostics.as_json import for_json
from hf_mp.diagnostics.ranges import OpRange

RULES_NAME = "precision_rules.json"
CLOSE_DOUBLINGS = 2.0


@dataclass(frozen=True)
class RangeReport:
    """Ranges of a model's values by op. ``print`` shows those that overflow in FP16 or come close.

    Attributes:
        model: class name.
        precision: the policy.
        batches: number of batches.
        ops: every op by module, in the order of the forward.
        rules: for any ``rules=`` of hf_mp: they keep all ops in range with 2 doublings to spare.
        notes: further observations.
    """

    model: str
    precision: str
    batches: int
    ops: tuple[OpRange, ...]
    rules: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def overflows(self) -> tuple[OpRange, ...]:
        return tuple(op for op in self.ops if op.overflows)

    @property
    def close(self) -> tuple[OpRange, ...]:
        """The ops that come within 2 doublings of FP16's largest number."""
        return tuple(op for op in self.ops if op.is_within(CLOSE_DOUBLINGS))

    def save(self, path: str | Path) -> Path:
        """Write all fields as JSON, NaN as null; return the path.

        Args:
            path: a file, or a directory for ``precision_rules.json``.

        Raises:
            OSError: if it cannot be written.
        """
        file = Path(path) / RULES_NAME if Path(path).is_dir() else Path(path)
        file.write_text(json.dumps(for_json(self), indent=2) + "\n", encoding="utf-8")
        return file

    def __str__(self) -> str:
        header = ("module", "op", "largest", "headroom", "largest gradient", "in FP16")
        rows = [(op.module, op.op, *_cells(op)) for op in self.ops if op.overflows or op.is_within(CLOSE_DOUBLINGS)]
        title = f"{self.model} in {self.precision}, {self.batches} batches"
        lines = [title, format_columns([header, *rows], range(2, 5))] if rows else []
        lines.append(f"{len(self.overflows)} of {len(self.ops)} ops overflow in FP16, {len(self.close)} come close.")
        needed = "" if self.overflows else "No rules are needed."
        lines += [*self.notes, f"rules={self.rules}" if self.rules else needed]
        return "".join(f"{line}\n" for line in lines if line)


def _cells(op: OpRange) -> tuple[str, str, str, str]:
    largest = "inf or NaN" if math.isnan(op.largest) else f"{op.largest:.4g}"
    headroom = f"{op.headroom:+.1f}" if op.is_fp16 and math.isfinite(op.headroom) else ""
    gradient = "" if op.fp16_gradient is None else f"{op.fp16_gradient:.3g}"
    state = "overflows" if op.overflows else "close" if op.is_within(CLOSE_DOUBLINGS) else ""
    return largest, headroom, gradient, state if op.is_fp16 else "FP32"
