"""Predicts the memory of a run's training step by category, from its model and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_mp.memory.ledger import Category, Moment, Phase
from hf_mp.memory.training import TrainingMemory, estimate_training_memory
from hf_mp.policy import PrecisionPolicy, mixed_presets
from hf_mp.weights.distributed import is_sharded


class CannotPredictError(ValueError):
    """The memory of this training cannot be predicted."""


@dataclass(frozen=True)
class PredictedMemory:
    """A predicted training step."""

    batch_size: int
    seq_len: int
    device: str  # "cpu" or "cuda"
    peak_bytes: int
    peak_phase: Phase
    timeline: tuple[Moment, ...]  # the memory in use, in the order of allocations


def predict_memory(
    model: nn.Module | None, policy: PrecisionPolicy, batch_shape: tuple[int, ...] | None, **settings: Any
) -> PredictedMemory:
    """Predict the memory of a step of a live run; the model is not changed."""
    if not isinstance(model, PreTrainedModel) or not all(p.requires_grad for p in model.parameters()):
        raise CannotPredictError("it is predicted for whole models of Transformers alone")
    if is_sharded(model):
        raise CannotPredictError("it is predicted for one process, not for parameters that FSDP shards")
    if str(policy) not in mixed_presets():
        raise CannotPredictError(f"it is predicted for precision {', '.join(mixed_presets())}, not {policy}")
    if batch_shape is None or len(batch_shape) != 2:
        raise CannotPredictError("it is predicted for batches of input_ids")
    try:
        memory = estimate_training_memory(
            model, str(policy), batch_size=batch_shape[0], seq_len=batch_shape[1], **settings
        )
    except Exception as error:  # a custom model may do anything on fake tensors, and the run is over
        raise CannotPredictError(f"{type(error).__name__}: {error}") from error
    return _of(memory)


def _of(memory: TrainingMemory) -> PredictedMemory:
    settings = memory.settings
    return PredictedMemory(
        settings.batch_size, settings.seq_len, memory.device, memory.peak_bytes, memory.peak_phase, memory.timeline
    )


def as_record(predicted: PredictedMemory) -> dict[str, Any]:
    """For JSON."""
    timeline = [
        [round(m.position, 4), m.phase.value, {c.value: size for c, size in m.bytes_by_category.items() if size}]
        for m in predicted.timeline
    ]
    return {**vars(predicted), "peak_phase": predicted.peak_phase.value, "timeline": timeline}


def from_record(record: Mapping[str, Any]) -> PredictedMemory:
    """What :func:`as_record` gave."""
    timeline = tuple(
        Moment(float(position), Phase(phase), {c: _bytes(sizes.get(c.value, 0)) for c in Category})
        for position, phase, sizes in record["timeline"]
    )
    peak_bytes = _bytes(record["peak_bytes"])
    if not timeline or not all(0.0 <= moment.position <= 1.0 for moment in timeline) or not peak_bytes:
        raise ValueError("no timeline")
    return PredictedMemory(
        int(record["batch_size"]),
        int(record["seq_len"]),
        str(record["device"]),
        peak_bytes,
        Phase(record["peak_phase"]),
        timeline,
    )


def _bytes(value: Any) -> int:
    size = max(0, int(value))
    if size >= 2**63:
        raise ValueError(f"no memory has {value} bytes")
    return size
