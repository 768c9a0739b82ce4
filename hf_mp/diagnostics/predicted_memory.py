"""Predicts the memory of a run's training step by category, from its model and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_mp.memory.ledger import Category, Moment, Phase
from hf_mp.memory.training import estimate_training_memory
from hf_mp.policy import PrecisionPolicy, mixed_presets
from hf_mp.weights.ranks.placement import is_sharded


@dataclass(frozen=True)
class PredictedMemory:
    batch_size: int
    seq_len: int
    device: str  # "cpu" or "cuda"
    peak_bytes: int
    peak_phase: Phase
    timeline: tuple[Moment, ...]  # the memory in use, in the order of allocations


def predicted_record(
    model: nn.Module | None, policy: PrecisionPolicy, batch_shape: tuple[int, ...] | None, **settings: Any
) -> dict[str, Any]:
    """The step of a live run as a record for its log, or the reason why it is not predicted."""
    if not isinstance(model, PreTrainedModel) or not all(p.requires_grad for p in model.parameters()):
        return {"reason": "it is predicted for whole models of Transformers alone"}
    if is_sharded(model):
        return {"reason": "it is predicted for one process, not for parameters that FSDP shards"}
    if str(policy) not in mixed_presets():
        return {"reason": f"it is predicted for precision {', '.join(mixed_presets())}, not {policy}"}
    if batch_shape is None or len(batch_shape) != 2:
        return {"reason": "it is predicted for batches of input_ids"}
    batch_size, seq_len = batch_shape
    try:
        found = estimate_training_memory(model, str(policy), batch_size=batch_size, seq_len=seq_len, **settings)
    except Exception as error:  # a custom model may do anything on fake tensors, and the run is over
        return {"reason": f"{type(error).__name__}: {error}"}
    timeline = [
        (round(moment.position, 4), moment.phase, {c: size for c, size in moment.bytes_by_category.items() if size})
        for moment in found.timeline
    ]
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "peak_bytes": found.peak_bytes}
    return {**sizes, "device": found.device, "peak_phase": found.peak_phase, "timeline": timeline}


def from_record(record: Mapping[str, Any]) -> PredictedMemory:
    """What a record of :func:`predicted_record` says."""
    timeline = tuple(
        Moment(position, Phase(phase), {category: sizes.get(category, 0) for category in Category})
        for position, phase, sizes in record["timeline"]
    )
    values = {name: record[name] for name in ("batch_size", "seq_len", "device", "peak_bytes")}
    return PredictedMemory(**values, peak_phase=Phase(record["peak_phase"]), timeline=timeline)
