"""The precision contract as data, as lines for a console, and as a table of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from hf_mp.casting.columns import aligned

HEADER = ("parameters", "elements", "stored", "computed", "gradient", "reduced", "moments", "saved")
NOT_SEEN, NONE = "?", "-"


@dataclass(frozen=True)
class ContractRow:
    """Parameters of one kind that a training treats alike.

    A dtype is ``"fp32"``, ``"bf16"``, ``"fp16"`` or torch's own word; ``"a/b"`` where there are several, ``"a+b"``
    where both together are the value, ``"-"`` where there is none, and ``"?"`` where nothing has shown it yet.

    Attributes:
        kind: ``linear``, ``embeddings``, ``norms``, ``experts``, ``adapters``, ``frozen`` or ``other``.
        elements: how many parameters these are, on this process.
        stored: of the parameter; ``"bf16+16"`` is a BF16 weight and the 16 bits that it lacks of FP32, ``"bf16+fp32"``
            one with an FP32 master in the optimizer.
        computed: of what the modules gave in their first forward.
        gradient: of what the backward left.
        reduced: of what travelled between the processes to sum the gradients.
        moments: of the optimizer's state that has an element for each of the parameter's.
        saved: of the weight that ``save_model`` writes; a frozen one under adapters is not written.
    """

    kind: str
    elements: int
    stored: str
    computed: str
    gradient: str
    reduced: str
    moments: str
    saved: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All but kind and elements."""
        return astuple(self)[2:]


@dataclass(frozen=True)
class PrecisionContract:
    """The dtypes in which a training stores, computes, sums and saves; ``print`` shows a table.

    Attributes:
        rows: one for each kind of parameter and treatment, the largest first.
    """

    rows: tuple[ContractRow, ...]

    @classmethod
    def of(cls, rows: Iterable[ContractRow]) -> PrecisionContract:
        """Make it from rows of single parameters, which it merges where they are alike."""
        # A model has hundreds of parameters and a handful of treatments: those are what a reader compares.
        elements: Counter[tuple[str, ...]] = Counter()
        for row in rows:
            elements[row.kind, *row.dtypes] += row.elements
        found = [ContractRow(kind, count, *dtypes) for (kind, *dtypes), count in elements.items()]
        return cls(tuple(sorted(found, key=lambda row: -row.elements)))

    @property
    def lacks_masters(self) -> bool:
        """Whether any 16-bit weight is trained without an FP32 master."""
        return any(row.stored in ("fp16", "bf16") and row.kind != "frozen" for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """The rows to show, in the order of :data:`HEADER`; kinds that are treated alike share one."""
        # Kinds that are treated alike share a line, or an FP32 run would say one thing five times.
        together: dict[tuple[str, ...], list[ContractRow]] = {}
        for row in self.rows:
            together.setdefault(row.dtypes, []).append(row)
        return [
            (", ".join(dict.fromkeys(row.kind for row in rows)), f"{sum(row.elements for row in rows):,}", *dtypes)
            for dtypes, rows in together.items()
        ]

    def __str__(self) -> str:
        return aligned([HEADER, *self.cells()], numbers={1})
