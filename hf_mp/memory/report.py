"""The memory report of a model, loaded and trained, as data."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from hf_mp.environment.machine import describe_hardware, package_versions
from hf_mp.memory.fitting import LargestBatch, largest_batch_size
from hf_mp.memory.footprint import MemoryFootprint, memory_footprint
from hf_mp.memory.measuring import measure_training_memory
from hf_mp.memory.models import ModelLike, find_config, load, model_class, skeleton
from hf_mp.memory.parallel import Bandwidth
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS, parse_preset
from hf_mp.memory.training import TrainingMemory, estimate_training_memory
from hf_mp.policy import spell

Progress = Callable[[str], None]


@dataclass(frozen=True)
class TrainingRow:
    estimate: TrainingMemory
    measurement: TrainingMemory | None = None  # the same step measured on this machine, if requested
    largest_batch: LargestBatch | None = None  # for the report's GPU, if given


@dataclass(frozen=True)
class MemoryReport:
    model: str  # as named by the user
    architecture: str
    parameters: int
    counted_from: str  # "loaded weights" or "configuration"
    footprints: dict[str, MemoryFootprint]
    training: dict[str, TrainingRow] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)  # the reason for each missing precision
    gpu_bytes: int | None = None  # memory of the GPU, if given
    bandwidth: Bandwidth | None = None  # between ranks, if given


def gather_report(
    model: ModelLike,
    *,
    config_only: bool = False,
    train: bool = False,
    measure: bool = False,
    gpu_bytes: int | None = None,
    bandwidth: Bandwidth | None = None,
    precisions: Sequence[str] = tuple(PRECISIONS),
    presets: Sequence[str] = tuple(TRAINING_PRESETS),
    progress: Progress = lambda step: None,
    **settings: Any,
) -> MemoryReport:
    """Count, estimate and measure.

    A precision whose package is missing (bitsandbytes, peft), or that several ranks cannot train, is left out, with the
    reason in ``unavailable``.

    Raises:
        ValueError: where several ranks cannot train in any of ``presets``, and as :func:`estimate_training_memory`.
    """
    # First of all: loading takes minutes, a misspelt preset should not.
    labels = {spell(name): parse_preset(name).label for name in (TRAINING_PRESETS if "all" in presets else presets)}
    config = find_config(model)
    ranks = settings.get("ranks", 1)
    if measure and ranks > 1:
        raise ValueError(f"measure=True takes a step in this process alone, not on {ranks} ranks: leave out one")
    unavailable: dict[str, str] = {}
    footprints: dict[str, MemoryFootprint] = {}
    for precision in precisions:
        progress(f"counting the bytes of {PRECISIONS[precision].label}")
        try:
            footprints[precision] = _footprint(model, config, precision, config_only)
        except ImportError as error:
            unavailable[precision] = str(error)
    training: dict[str, TrainingRow] = {}
    for number, preset in enumerate(labels if train or measure else (), start=1):
        progress(f"taking a training step in {labels[preset]} ({number} of {len(labels)})")
        try:
            training[preset] = _training_row(model, preset, measure, gpu_bytes, settings)
        except ImportError as error:
            unavailable[preset] = str(error)
        except (ValueError, RuntimeError) as error:
            # Several ranks train in some presets only. What none of them can do is wrong in the settings.
            if ranks == 1 or (number == len(labels) and not training):
                raise
            unavailable[preset] = f"not on several ranks: {error}"
    planned = skeleton(config, "fp32")
    return MemoryReport(
        model=model if isinstance(model, str) else getattr(model, "name", type(planned).__name__),
        architecture=model_class(config).__name__,
        parameters=planned.num_parameters(),
        counted_from="configuration" if config_only else "loaded weights",
        footprints=footprints,
        training=training,
        unavailable=unavailable,
        gpu_bytes=gpu_bytes,
        bandwidth=bandwidth,
    )


def _footprint(model: ModelLike, config: Any, precision: str, config_only: bool) -> MemoryFootprint:
    if config_only:
        return memory_footprint(skeleton(config, precision), as_if_loaded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the tables say it
        found = memory_footprint(load(model, precision))  # type: ignore[arg-type]
    # The next precision must not be loaded beside this one.
    gc.collect()
    return found


def _training_row(
    model: ModelLike, preset: str, measure: bool, gpu_bytes: int | None, settings: dict[str, Any]
) -> TrainingRow:
    asked = dict(settings)
    if TRAINING_PRESETS[preset].optimizer is not None:  # the preset is about its own
        asked.pop("optimizer", None)
    estimate = estimate_training_memory(model, preset, **asked)
    measurement = measure_training_memory(model, preset, **{"device": "cuda", **asked}) if measure else None
    # The batch is what the search varies.
    if gpu_bytes is None:
        return TrainingRow(estimate, measurement)
    asked.pop("batch_size", None)
    return TrainingRow(estimate, measurement, largest_batch_size(model, gpu_bytes, preset, **asked))


def as_json(report: MemoryReport) -> dict[str, Any]:
    """The report as plain values for JSON; all sizes are bytes."""
    return {
        "model": report.model,
        "architecture": report.architecture,
        "parameters": report.parameters,
        "counted_from": report.counted_from,
        "units": "bytes",
        "gpu_bytes": report.gpu_bytes,
        "bandwidth": report.bandwidth and report.bandwidth._asdict(),
        "loaded": {precision: _footprint_json(footprint) for precision, footprint in report.footprints.items()},
        "training": {preset: _training_json(row) for preset, row in report.training.items()},
        "unavailable": report.unavailable,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": dict(package_versions()),
        "device": dict(describe_hardware()),
    }


def _footprint_json(footprint: MemoryFootprint) -> dict[str, Any]:
    return {
        "total_bytes": footprint.total_bytes,
        "bytes_by_kind": footprint.by_kind,
        "bytes_by_dtype": footprint.by_dtype,
        "bytes_by_device": footprint.by_device,
        "get_memory_footprint_bytes": footprint.transformers_bytes,
        "differences": footprint.differences,
        "tensors": [vars(row) for row in footprint.rows],
        "modules": asdict(footprint.tree),
    }


def _training_json(row: TrainingRow) -> dict[str, Any]:
    return {
        "label": TRAINING_PRESETS[row.estimate.settings.precision].label,
        "estimate": row.estimate.as_dict(),
        "measurement": row.measurement and row.measurement.as_dict(),
        "largest_batch_size": row.largest_batch and row.largest_batch.batch_size,
        "largest_batch_peak_bytes": row.largest_batch and row.largest_batch.peak_bytes,
    }
