"""The memory report of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig

from hf_mp.dtypes import spell
from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.memory.footprint import MemoryFootprint, memory_footprint
from hf_mp.memory.largest_batch import LargestBatch, Way, largest_batch, ways_that_fit
from hf_mp.memory.models import ModelLike, find_model, meta_model
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS, parse_preset
from hf_mp.memory.training import TrainingMemory, memory_predictor

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingRow:
    estimate: TrainingMemory
    largest_batch: LargestBatch | None = None  # for the report's GPU, if given


@dataclass(frozen=True)
class MemoryReport:
    model: str  # as given by the user
    architecture: str
    parameters: int
    footprints: dict[str, MemoryFootprint]
    training: dict[str, TrainingRow]
    unavailable: dict[str, str]
    gpu_bytes: int | None  # memory of the GPU, if given
    ways: tuple[Way, ...] = ()  # if no preset fits into it: settings that fit, or the leanest


def gather_report(
    model: ModelLike,
    *,
    gpu_bytes: int | None = None,
    presets: Sequence[str] = (),
    progress: Callable[[str], None] = lambda step: None,
    **settings: Any,
) -> MemoryReport:
    """Count and estimate the memory of a model from its configuration.

    ``presets`` are training presets or ``"all"``; ``progress(text)`` is called before each step. Precisions that lack a
    package or do not support the settings are in ``unavailable``.
    """
    # Raises for unknown names before the estimates, which take minutes.
    labels = {spell(name): parse_preset(name).label for name in (TRAINING_PRESETS if "all" in presets else presets)}
    source = find_model(model)

    def count(precision: str) -> MemoryFootprint:
        progress(f"counting the bytes of {PRECISIONS[precision].label}")
        return memory_footprint(meta_model(source, precision), as_if_loaded=True)

    def train(preset: str) -> TrainingRow:
        progress(f"taking a training step in {labels[preset]} ({list(labels).index(preset) + 1} of {len(labels)})")
        return _training_row(source, preset, gpu_bytes, **settings)

    footprints, not_loaded = _results_and_errors(PRECISIONS, count)
    training, not_trained = _results_and_errors(labels, train)
    meta = meta_model(source, "fp32")
    ways: tuple[Way, ...] = ()
    if gpu_bytes is not None and all(row.estimate.peak_bytes > gpu_bytes for row in training.values()):
        progress("searching what would fit")
        ways = _ways_that_fit(source, training, **settings)
    return MemoryReport(
        model=model if isinstance(model, str) else getattr(model, "name", type(meta).__name__),
        architecture=type(meta).__name__,
        parameters=meta.num_parameters(),
        footprints=footprints,
        training=training,
        unavailable={**not_loaded, **not_trained},
        gpu_bytes=gpu_bytes,
        ways=ways,
    )


def _results_and_errors(names: Iterable[str], compute: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Return results of ``compute`` and error messages by name. Raise if all calls fail."""
    results: dict[str, T] = {}
    errors: dict[str, Exception] = {}
    for name in names:
        try:
            results[name] = compute(name)
        except (ImportError, ValueError) as error:
            errors[name] = error
    if errors and not results:
        raise next(iter(errors.values()))
    return results, {name: str(error) for name, error in errors.items()}


def _training_row(
    source: PreTrainedConfig | nn.Module, preset: str, gpu_bytes: int | None, batch_size: int = 1, **settings: Any
) -> TrainingRow:
    if TRAINING_PRESETS[preset].optimizer is not None:
        settings.pop("optimizer", None)
    with memory_predictor(source, preset, batch_size=batch_size, **settings) as predict:
        cached_predict = functools.cache(predict)
        largest = None if gpu_bytes is None else largest_batch(cached_predict, gpu_bytes)
        return TrainingRow(cached_predict(batch_size), largest)


def _ways_that_fit(
    source: PreTrainedConfig | nn.Module,
    training: Mapping[str, TrainingRow],
    *,
    batch_size: int = 1,
    gradient_checkpointing: bool = False,
    **settings: Any,
) -> tuple[Way, ...]:
    def predict(preset: str, size: int, checkpointing: bool) -> int | None:
        try:
            row = _training_row(source, preset, None, size, gradient_checkpointing=checkpointing, **settings)
        except (ImportError, ValueError):  # missing package, or a model without gradient checkpointing
            return None
        return row.estimate.peak_bytes

    return ways_that_fit(
        {name: row.estimate.peak_bytes for name, row in training.items()},
        {name: row.largest_batch for name, row in training.items() if row.largest_batch is not None},
        predict,
        batch_size=batch_size,
        checkpointing=gradient_checkpointing,
    )


def as_json(report: MemoryReport) -> dict[str, Any]:
    """Return a report for JSON; all sizes are in bytes."""
    return {
        "model": report.model,
        "architecture": report.architecture,
        "parameters": report.parameters,
        "units": "bytes",
        "gpu_bytes": report.gpu_bytes,
        "loaded": {
            precision: {
                "total_bytes": footprint.total_bytes,
                "bytes_by_kind": footprint.by_kind,
                "bytes_by_dtype": footprint.by_dtype,
                "get_memory_footprint_bytes": footprint.transformers_bytes,
                "tensors": [vars(row) for row in footprint.rows],
            }
            for precision, footprint in report.footprints.items()
        },
        "training": {
            preset: {
                "label": TRAINING_PRESETS[preset].label,
                "estimate": asdict(row.estimate),
                "largest_batch_size": row.largest_batch and row.largest_batch.batch_size,
                "largest_batch_peak_bytes": row.largest_batch and row.largest_batch.peak_bytes,
            }
            for preset, row in report.training.items()
        },
        "would_fit": [asdict(way) for way in report.ways if way.peak_bytes <= (report.gpu_bytes or 0)],
        "unavailable": report.unavailable,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "device": describe_hardware(),
    }
