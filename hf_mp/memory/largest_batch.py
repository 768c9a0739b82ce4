"""The largest batch that fits into memory, and leaner settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_mp.memory.models import ModelLike, find_model
from hf_mp.memory.sizes import parse_size
from hf_mp.memory.training import TrainingMemory, memory_predictor

LARGEST_TRIED = 2**20
_GROWTH = 8  # factor of the next batch size before there is a slope


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        batch_size: the largest that fits; 0 if none does.
        peak_bytes: its peak; None for 0.
        next_peak_bytes: the peak with one more sequence, which does not fit.
        memory_bytes: available memory.
    """

    batch_size: int
    peak_bytes: int | None
    next_peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Way:
    """Settings of a training and the peak of its step."""

    precision: str
    batch_size: int
    gradient_checkpointing: bool
    peak_bytes: int


def largest_batch_size(
    model: ModelLike, memory: str | int, precision: str | torch.dtype = "fp16", **settings: Any
) -> LargestBatch:
    """Find the largest batch with a training step that fits in ``memory``, by estimates.

    Args:
        model: as for :func:`hf_mp.estimate_training_memory`.
        memory: a size like ``"24GiB"`` or ``"24GB"`` (the same), or bytes as an int; CUDA's context and fragmentation
            need some more.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        settings: of :func:`hf_mp.estimate_training_memory`, except ``batch_size``.

    Raises:
        ValueError: for an invalid size, and as :func:`hf_mp.estimate_training_memory`.
    """
    with memory_predictor(find_model(model), precision, batch_size=1, **settings) as predict:
        return largest_batch(predict, parse_size(memory))


def largest_batch(predict: Callable[[int], TrainingMemory], memory_bytes: int) -> LargestBatch:
    peak = functools.cache(lambda batch_size: predict(batch_size).peak_bytes)
    found = search_largest(peak, memory_bytes)
    return LargestBatch(found, peak(found) if found else None, peak(found + 1), memory_bytes)


def search_largest(peak: Callable[[int], int], memory_bytes: int) -> int:
    """Return the largest n from 1 to :data:`LARGEST_TRIED` with ``peak(n) <= memory_bytes``, or 0.

    ``peak`` must be non-decreasing. It is nearly linear: lines through two points need half as many calls as
    bisection.
    """
    previous_fit, fits, exceeds = 0, 0, LARGEST_TRIED + 1
    while exceeds - fits > 1:
        other = exceeds if exceeds <= LARGEST_TRIED else previous_fit
        slope = (peak(other) - peak(fits)) / (other - fits) if other and fits else 0.0
        # The slope is 0 if small batches have their peak in the update.
        guess = fits + int((memory_bytes - peak(fits)) / slope) if slope > 0 else _GROWTH * fits
        tried = max(fits + 1, min(guess, exceeds - 1, _GROWTH**2 * fits))
        if peak(tried) <= memory_bytes:
            previous_fit, fits = fits, tried
        else:
            exceeds = tried
    return fits


# Preset and gradient checkpointing, most similar first.
_LEANER = (("bf16-lean", False), ("bf16-lean", True), ("fp16-lean-adamw8bit", True), ("nf4-lora", True))


def ways_that_fit(
    peaks: Mapping[str, int],
    largest: Mapping[str, LargestBatch],
    predict: Callable[[str, int, bool], int | None],
    *,
    batch_size: int,
    checkpointing: bool,
) -> tuple[Way, ...]:
    """Return a smaller batch of a requested preset, and a leaner preset or checkpointing, that fit.

    If none fits, return the tried settings with the lowest peak.

    Args:
        peaks: of each requested preset, larger than the memory.
        largest: largest batch of each, and the memory.
        predict: ``predict(preset, batch_size, checkpointing)`` returns the peak, or None if it cannot be trained.
        batch_size, checkpointing: as requested.
    """
    memory_bytes = next(iter(largest.values())).memory_bytes
    preset, most = max(largest.items(), key=lambda entry: entry[1].batch_size)
    smaller_batch = () if most.peak_bytes is None else (Way(preset, most.batch_size, checkpointing, most.peak_bytes),)
    leanest = min(peaks, key=lambda name: peaks[name])
    candidates = dict.fromkeys([(leanest, True), *((name, checkpointing or leaner) for name, leaner in _LEANER)])
    tried = [Way(leanest, batch_size, checkpointing, peaks[leanest])]
    for size in dict.fromkeys([batch_size, 1]):
        for name, recomputes in candidates:
            was_requested = name in peaks and (size, recomputes) == (batch_size, checkpointing)
            peak = None if was_requested else predict(name, size, recomputes)
            if peak is None:
                continue
            tried.append(Way(name, size, recomputes, peak))
            if peak <= memory_bytes:
                return *smaller_batch, tried[-1]
        if smaller_batch:
            return smaller_batch
    return (min(tried, key=lambda way: way.peak_bytes),)
