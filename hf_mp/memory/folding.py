"""Folds equal layers into one line: ``transformer.h.0 - h.11.attn.c_attn.weight``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from hf_mp.memory.footprint import Kind, MemoryFootprint, TensorRow
from hf_mp.memory.precisions import PRECISIONS


def fold_parameters(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Fold parameters: consecutive layers of equal dtype, device and shape become one row, with the bytes of all.

    The layer is the first number in a name. A parameter that shares the memory of an earlier one has no row.
    """
    runs: dict[tuple[object, ...], list[TensorRow]] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        if row.kind is not Kind.PARAMETER or row.shared_with is not None:
            continue
        before, layer, after = _split(row.name)
        key = before, after, row.dtype, row.device, row.shape
        # As long as no layer is missing or unlike the others, its number grows as their count does.
        runs.setdefault((*key, layer - seen[key]), []).append(row)
        seen[key] += 1
    return [_folded(run) for run in runs.values()]


def _split(name: str) -> tuple[str, int, str]:
    """What stands before the number of the layer, the number, and what stands after; without a number all before."""
    found = re.match(r"((?:[^.]+\.)*?)(\d+)(\..+)$", name)
    return (found[1], int(found[2]), found[3]) if found else (name, 0, "")


def _folded(run: list[TensorRow]) -> TensorRow:
    name = run[0].name
    if len(run) > 1:
        before, first, after = _split(name)
        layers = before.rstrip(".").rpartition(".")[2]
        name = f"{before}{first} - {f'{layers}.' if layers else ''}{_split(run[-1].name)[1]}{after}"
    return replace(run[0], name=name, tensor_bytes=sum(row.tensor_bytes for row in run))


def left_in_16_bits(footprints: Mapping[str, MemoryFootprint]) -> dict[str, list[TensorRow]]:
    """By quantized precision, the parameters that bitsandbytes leaves as they were: those of no linear layer."""
    return {
        # Quantized weights are int8, or uint8 with two of them in a byte.
        precision: [row for row in fold_parameters(found.rows) if getattr(torch, row.dtype).is_floating_point]
        for precision, found in footprints.items()
        if PRECISIONS[precision].quantization
    }


def kept_sentences(footprints: Mapping[str, MemoryFootprint]) -> list[str]:
    """One sentence for each quantized precision that leaves stacked weights, of three dimensions, as they were."""
    sentences = []
    for precision, rows in left_in_16_bits(footprints).items():
        if kept := [row for row in rows if len(row.shape) > 2]:
            share = sum(row.tensor_bytes for row in kept) / footprints[precision].total_bytes
            names = ", ".join(row.name for row in kept[:4]) + (f" and {len(kept) - 4} more" if len(kept) > 4 else "")
            sentences.append(
                f"{PRECISIONS[precision].label}: {share:.0%} of these bytes stay in {kept[0].dtype}. bitsandbytes "
                f"quantizes the weights of linear layers, and these are stacked experts or the like: {names}"
            )
    return sentences
