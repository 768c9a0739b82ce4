"""The precision contract as data, as lines for a console, and as a table of Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hf_mp.casting.text_table import format_columns

HEADER = ("parameters", "elements", "stored", "computed", "gradient", "reduced", "moments", "saved")
NOT_SEEN, NONE = "?", "-"
_SHOWN_MODULES = 2  # of a row


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
        names: of these parameters, as in ``named_parameters()``.
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
        """The columns of dtypes, as they are shown."""
        return self.stored, self.computed, self.gradient, self.reduced, self.moments, self.saved


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
        alike: dict[tuple[str, ...], list[ContractRow]] = {}
        for row in rows:
            alike.setdefault((row.kind, *row.dtypes), []).append(row)
        found = [
            replace(
                merged[0],
                elements=sum(row.elements for row in merged),
                names=tuple(name for row in merged for name in row.names),
            )
            for merged in alike.values()
        ]
        return cls(tuple(sorted(found, key=lambda row: -row.elements)))

    @property
    def lacks_masters(self) -> bool:
        """Whether any 16-bit weight is trained without an FP32 master."""
        return any(row.stored in ("fp16", "bf16") and row.kind != "frozen" for row in self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """The rows to show, in the order of :data:`HEADER`; kinds that are treated alike share one.

        Names of modules follow a kind that is in several of them.
        """
        # Kinds that are treated alike share a line, or an FP32 run would say one thing five times.
        together: dict[tuple[str, ...], list[ContractRow]] = {}
        for row in self.rows:
            together.setdefault(row.dtypes, []).append(row)
        return [
            (", ".join(map(self._label, rows)), f"{sum(row.elements for row in rows):,}", *dtypes)
            for dtypes, rows in together.items()
        ]

    def _label(self, row: ContractRow) -> str:
        """The kind of a row, with modules that no other row of this kind has."""
        others = [other for other in self.rows if other.kind == row.kind and other is not row]
        if not others or not row.names:
            return row.kind
        elsewhere = {_module(name) for other in others for name in other.names}
        modules = list(dict.fromkeys(map(_module, row.names)))
        # Layers of the same name may be treated in different ways.
        own = [one for one in modules if one not in elsewhere] or [name.rpartition(".")[0] for name in row.names]
        return f"{row.kind} ({', '.join(own[:_SHOWN_MODULES])}{', ...' if len(own) > _SHOWN_MODULES else ''})"

    def __str__(self) -> str:
        return format_columns([HEADER, *self.cells()], numbers={1})


def _module(name: str) -> str:
    """The last word of a parameter's module, as in ``named_modules()``."""
    return name.split(".")[-2] if "." in name else name
