"""Folds equal layers into one line: ``transformer.h.0 - h.11.attn.c_attn.weight``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from hf_mp.memory.footprint import Kind, MemoryFootprint, ModuleBytes, TensorRow
from hf_mp.memory.precisions import PRECISIONS


@dataclass(frozen=True)
class FoldedRow:
    name: str  # as `transformer.h.0 - h.11.ln_1.weight`; the plain name for a single one
    count: int
    dtype: str
    device: str
    shape: tuple[int, ...]
    total_bytes: int  # of all together


def fold_parameters(rows: Iterable[TensorRow], kind: Kind = Kind.PARAMETER) -> tuple[FoldedRow, ...]:
    """Fold the tensors of one kind: consecutive layers of equal dtype, device and shape become one line.

    The layer is the first number in a name. A tensor that shares the memory of an earlier one has no line.
    """
    runs: list[list[TensorRow]] = []
    latest: dict[tuple[object, ...], tuple[int | None, list[TensorRow]]] = {}
    for row in rows:
        if row.kind is not kind or row.shared_with is not None:
            continue
        before, layer, after = _split(row.name)
        key = (before, after, row.dtype, row.device, row.shape, row.place)
        last, run = latest.get(key, (None, []))
        # A run ends where a layer is missing or unlike the one before.
        if layer is None or last != layer - 1:
            run = []
            runs.append(run)
        run.append(row)
        latest[key] = layer, run
    return tuple(map(_folded, runs))


def _split(name: str) -> tuple[str, int | None, str]:
    found = re.match(r"((?:[^.]+\.)*?)(\d+)(\..+)$", name)
    return (found.group(1), int(found.group(2)), found.group(3)) if found else (name, None, "")


def _folded(run: list[TensorRow]) -> FoldedRow:
    row = run[0]
    name = row.name
    if len(run) > 1:
        before, first, after = _split(row.name)
        layers = before.rstrip(".").rpartition(".")[2]
        name = f"{before}{first} - {f'{layers}.' if layers else ''}{_split(run[-1].name)[1]}{after}"
    return FoldedRow(name, len(run), row.dtype, row.device, row.shape, sum(one.tensor_bytes for one in run))


def left_in_16_bits(footprints: Mapping[str, MemoryFootprint]) -> dict[str, list[FoldedRow]]:
    """By quantized precision, the parameters that bitsandbytes leaves as they were: those of no linear layer."""
    return {
        precision: [row for row in fold_parameters(found.rows) if getattr(torch, row.dtype).is_floating_point]
        for precision, found in footprints.items()
        if PRECISIONS[precision].quantization
    }


def kept_sentences(footprints: Mapping[str, MemoryFootprint]) -> list[str]:
    """One sentence for each quantized precision that leaves stacked weights, of three dimensions, as they were."""
    sentences = []
    for precision, rows in left_in_16_bits(footprints).items():
        if kept := [row for row in rows if len(row.shape) > 2]:
            share = sum(row.total_bytes for row in kept) / footprints[precision].total_bytes
            names = ", ".join(row.name for row in kept[:4]) + (f" and {len(kept) - 4} more" if len(kept) > 4 else "")
            sentences.append(
                f"{PRECISIONS[precision].label}: {share:.0%} of these bytes stay in {kept[0].dtype}. bitsandbytes "
                f"quantizes the weights of linear layers, and these are stacked experts or the like: {names}"
            )
    return sentences


def fold_tree(tree: ModuleBytes) -> ModuleBytes:
    """The tree with consecutive equal children as one, named ``0 - 11``."""
    folded: list[ModuleBytes] = []
    for child in map(fold_tree, tree.children):
        previous = folded[-1] if folded else None
        # Frozen dataclasses compare by value: equal modules have equal children.
        if previous and child.name.isdigit() and child == replace(previous, name=child.name, count=child.count):
            first = previous.name.partition(" - ")[0]
            folded[-1] = replace(previous, name=f"{first} - {child.name}", count=previous.count + 1)
        else:
            folded.append(child)
    return replace(tree, children=tuple(folded))
