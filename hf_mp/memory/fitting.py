"""Searches the largest batch that fits, and ways to train that fit where none of those asked for does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_mp.memory.models import ModelLike, find_model
from hf_mp.memory.sizes import parse_size
from hf_mp.memory.training import TrainingMemory, step_of

LARGEST_TRIED = 2**20
_GROWTH = 8  # from a batch that fits to the next, where no line through two tells more


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        batch_size: the largest that fits; 0 if not even one sequence does.
        peak_bytes: its peak; None for 0.
        next_peak_bytes: the peak with one more sequence, which does not fit.
        memory_bytes: the memory to fit in.
    """

    batch_size: int
    peak_bytes: int | None
    next_peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Way:
    """A way to train, and its peak.

    Attributes:
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`.
        batch_size: as for :func:`hf_mp.estimate_training_memory`.
        gradient_checkpointing: as for :func:`hf_mp.estimate_training_memory`.
        peak_bytes: of its training step.
    """

    precision: str
    batch_size: int
    gradient_checkpointing: bool
    peak_bytes: int


def largest_batch_size(
    model: ModelLike, memory: str | int, precision: str | torch.dtype = "fp16", **settings: Any
) -> LargestBatch:
    """Find the largest batch whose training step fits in ``memory``: that it fits, and the next one does not, is
    estimated.

    Args:
        model: as for :func:`hf_mp.estimate_training_memory`.
        memory: a size such as ``"24GiB"`` or ``"24GB"`` (the same), or bytes as an int. CUDA's context and
            fragmentation take part of a card, too.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        settings: of :func:`hf_mp.estimate_training_memory`, except ``batch_size``.

    Raises:
        ValueError: for an invalid size, and as :func:`hf_mp.estimate_training_memory`.
    """
    with step_of(find_model(model), precision, batch_size=1, **settings) as predict:
        return largest_batch(predict, parse_size(memory))


def largest_batch(predict: Callable[[int], TrainingMemory], memory_bytes: int) -> LargestBatch:
    """As :func:`largest_batch_size`, with ``predict`` of :func:`hf_mp.memory.training.step_of`."""

    @functools.cache
    def peak(batch_size: int) -> int:
        return predict(batch_size).peak_bytes

    found = search_largest(peak, memory_bytes)
    return LargestBatch(found, peak(found) if found else None, peak(found + 1), memory_bytes)


def search_largest(peak: Callable[[int], int], memory_bytes: int) -> int:
    """The largest n from 1 to :data:`LARGEST_TRIED` with ``peak(n) <= memory_bytes``, or 0.

    ``peak`` must be non-decreasing. Memory is nearly linear in the batch size, so the line through two known points
    mostly finds the answer at once; if another part of the step becomes the peak, the search continues from there.
    """
    # Bisection alone would need twice as many estimates.
    before, fits, exceeds = 0, 0, LARGEST_TRIED + 1
    while exceeds - fits > 1:
        other = exceeds if exceeds <= LARGEST_TRIED else before
        slope = (peak(other) - peak(fits)) / (other - fits) if other and fits else 0.0
        # A slope of 0 is what small batches have where the update, not the activations, is the peak.
        guess = fits + int((memory_bytes - peak(fits)) / slope) if slope > 0 else _GROWTH * fits
        tried = max(fits + 1, min(guess, exceeds - 1, _GROWTH**2 * fits))
        if peak(tried) <= memory_bytes:
            before, fits = fits, tried
        else:
            exceeds = tried
    return fits


# From the least to the most that they change: with and without gradient checkpointing.
_LEANER = (("bf16-lean", False), ("bf16-lean", True), ("fp16-lean-adamw8bit", True), ("nf4-lora", True))


def ways_that_fit(
    peaks: Mapping[str, int],
    largest: Mapping[str, LargestBatch],
    predict: Callable[[str, int, bool], int | None],
    *,
    batch_size: int,
    checkpointing: bool,
) -> tuple[Way, ...]:
    """Find ways to train that fit: with a smaller batch, and with a leaner preset or checkpointing.

    If none fits, the leanest of those that were tried.

    Args:
        peaks: of each preset asked for, larger than the memory.
        largest: the largest batch of each, and the memory.
        predict: the peak of a preset, a batch size, and with checkpointing or without; None where it cannot be trained.
        batch_size: that asked for.
        checkpointing: whether it was asked for.
    """
    memory_bytes = next(iter(largest.values())).memory_bytes
    preset, most = max(largest.items(), key=lambda entry: entry[1].batch_size)
    found = [Way(preset, most.batch_size, checkpointing, most.peak_bytes)] if most.peak_bytes is not None else []
    leanest = min(peaks, key=lambda name: peaks[name])
    tries = dict.fromkeys([(leanest, True), *((name, checkpointing or leaner) for name, leaner in _LEANER)])
    tried = [Way(leanest, batch_size, checkpointing, peaks[leanest])]
    for size in dict.fromkeys([batch_size, 1]):
        for name, recomputes in tries:
            if name in peaks and (size, recomputes) == (batch_size, checkpointing):
                continue
            if (peak := predict(name, size, recomputes)) is not None:
                tried.append(Way(name, size, recomputes, peak))
                if peak <= memory_bytes:
                    return *found, tried[-1]
        if found:
            return tuple(found)
    return (min(tried, key=lambda way: way.peak_bytes),)
