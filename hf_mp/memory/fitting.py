"""Searches the largest batch that fits, with few estimates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_mp.memory.models import ModelLike, find_config
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


def largest_batch_size(
    model: ModelLike, memory: str | int, precision: str | torch.dtype = "fp16", **settings: Any
) -> LargestBatch:
    """Find the largest batch whose training step fits in ``memory``: that it fits, and the next one does not, is
    estimated.

    Args:
        model: as for :func:`hf_mp.estimate_training_memory`.
        memory: a size such as ``"24GiB"``, or bytes. CUDA's context and fragmentation take part of a card, too.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        settings: of :func:`hf_mp.estimate_training_memory`, except ``batch_size``.

    Raises:
        ValueError: for an invalid size, and as :func:`hf_mp.estimate_training_memory`.
    """
    with step_of(find_config(model), precision, batch_size=1, **settings) as predict:
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
