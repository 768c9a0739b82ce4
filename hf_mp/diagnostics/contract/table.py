"""Data of the precision contract, and its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hf_mp.casting.text_table import format_columns

HEADER = ("parameters", "elements", "stored", "computed", "gradient", "reduced", "moments", "saved")
NOT_SEEN, NONE = "?", "-"
_SHOWN_MODULES = 2  # of a row


@dataclass(frozen=True)
class ContractRow:
    """Parameters of one kind with the same dtypes.

    A dtype is ``"fp32"``, ``"bf16"``, ``"fp16"`` or torch's name. ``"a/b"`` means several, ``"a+b"`` a value in two
    parts, ``"-"`` none, and ``"?"`` not recorded yet.

    Attributes:
        kind: ``linear``, ``embeddings``, ``norms``, ``experts``, ``adapters``, ``frozen`` or ``other``.
        elements: on this process.
        stored: ``"bf16+16"`` is a BF16 weight with a 16-bit remainder, ``"bf16+fp32"`` one with an FP32 master in the
            optimizer.
        computed: of module outputs in the first forward.
        gradient: after backward.
        reduced: of the tensors sent to reduce gradients.
        moments: of optimizer state of the parameter's size.
        saved: of the weight that ``save_model`` writes; ``"-"`` for frozen weights under adapters.
        names: as in ``named_parameters()``.
    """

    kind: str
    elements: int
    stored: str
    computed: str
    gradient: str
    reduced: str
    moments: str
    saved: str
    names: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.stored, self.computed, self.gradient, self.reduced, self.moments, self.saved


@dataclass(frozen=True)
class PrecisionContract:
    """The dtypes in which a training stores, computes, reduces and saves; ``print`` shows a table.

    Attributes:
        rows: one for each kind of parameter and set of dtypes, largest first.
    """

    rows: tuple[ContractRow, ...]

    @classmethod
    def of(cls, rows: Iterable[ContractRow]) -> PrecisionContract:
        """Merge the rows with the same kind and dtypes."""
        groups: dict[tuple[str, ...], list[ContractRow]] = {}
        for row in rows:
            groups.setdefault((row.kind, *row.dtypes), []).append(row)
        merged = [
            replace(
                group[0],
                elements=sum(row.elements for row in group),
                names=tuple(name for row in group for name in row.names),
            )
            for group in groups.values()
        ]
        return cls(tuple(sorted(merged, key=lambda row: -row.elements)))

    @property
    def lacks_masters(self) -> bool:
        """Whether any 16-bit weight is trained without an FP32 master."""
        return any(row.stored in ("fp16", "bf16") and row.kind != "frozen" for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the cells, one line for all kinds with the same dtypes."""
        by_dtypes: dict[tuple[str, ...], list[ContractRow]] = {}
        for row in self.rows:
            by_dtypes.setdefault(row.dtypes, []).append(row)
        return [
            (", ".join(map(self._label, rows)), f"{sum(row.elements for row in rows):,}", *dtypes)
            for dtypes, rows in by_dtypes.items()
        ]

    def _label(self, row: ContractRow) -> str:
        """Return the kind, with names of modules if other rows have it too."""
        others = [other for other in self.rows if other.kind == row.kind and other is not row]
        if not others or not row.names:
            return row.kind
        in_others = {_module(name) for other in others for name in other.names}
        modules = list(dict.fromkeys(map(_module, row.names)))
        # Full paths if layers of one name differ.
        own = [one for one in modules if one not in in_others] or [name.rpartition(".")[0] for name in row.names]
        more = ["..."] if len(own) > _SHOWN_MODULES else []
        return f"{row.kind} ({', '.join(own[:_SHOWN_MODULES] + more)})"

    def __str__(self) -> str:
        return format_columns([HEADER, *self.cells()], numbers={1})


def _module(name: str) -> str:
    return name.split(".")[-2] if "." in name else name
