"""Folds equal layers into one line: ``transformer.h.0 - h.11.attn.c_attn.weight``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hf_mp.memory.footprint import Kind, ModuleBytes, TensorRow


@dataclass(frozen=True)
class FoldedRow:
    """A parameter, or the same parameter of several layers."""

    name: str  # as `transformer.h.0 - h.11.ln_1.weight`; the plain name for a single one
    count: int
    dtype: str
    device: str
    shape: tuple[int, ...]
    total_bytes: int  # of all together


@dataclass
class _Run:
    first: int
    last: int
    rows: list[TensorRow]


def fold_parameters(rows: Iterable[TensorRow], kind: Kind = Kind.PARAMETER) -> tuple[FoldedRow, ...]:
    """Fold the tensors of one kind: consecutive layers of equal dtype, device and shape become one line.

    The layer is the first number in a name. A tensor that shares the memory of an earlier one has no line.
    """
    runs: dict[tuple[object, ...], list[_Run]] = {}
    order: list[tuple[tuple[object, ...], _Run]] = []
    for row in rows:
        if row.kind is not kind or row.shared_with is not None:
            continue
        before, layer, after = _split(row.name)
        key = (before, after, row.dtype, row.device, row.shape, row.place)
        found = runs.setdefault(key, [])
        if layer is not None and found and found[-1].last + 1 == layer:
            found[-1].last = layer
            found[-1].rows.append(row)
        else:
            found.append(_Run(layer or 0, layer or 0, [row]))
            order.append((key, found[-1]))
    return tuple(_folded(run) for _, run in order)


def _split(name: str) -> tuple[str, int | None, str]:
    found = re.match(r"((?:[^.]+\.)*?)(\d+)(\..+)$", name)
    return (found.group(1), int(found.group(2)), found.group(3)) if found else (name, None, "")


def _folded(run: _Run) -> FoldedRow:
    row = run.rows[0]
    name = row.name
    if run.last > run.first:
        before, _, after = _split(row.name)
        layers = before.rstrip(".").rpartition(".")[2]
        name = f"{before}{run.first} - {f'{layers}.' if layers else ''}{run.last}{after}"
    total = sum(one.tensor_bytes for one in run.rows)
    return FoldedRow(name, len(run.rows), row.dtype, row.device, row.shape, total)


def fold_tree(tree: ModuleBytes) -> ModuleBytes:
    """The tree with consecutive equal children as one, named ``0 - 11``."""
    folded: list[ModuleBytes] = []
    for child in map(fold_tree, tree.children):
        previous = folded[-1] if folded else None
        if previous is not None and child.name.isdigit() and _what_it_is(child) == _what_it_is(previous):
            first = previous.name.partition(" - ")[0]
            folded[-1] = replace(previous, name=f"{first} - {child.name}", count=previous.count + 1)
        else:
            folded.append(child)
    return replace(tree, children=tuple(folded))


def _what_it_is(node: ModuleBytes) -> tuple[object, ...]:
    return node.class_name, node.total_bytes, node.children
