"""``TrainingSettings``: settings of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_mp.dtypes import spell
from hf_mp.memory.models import class_of, longest_sequence
from hf_mp.memory.precisions import parse_preset
from hf_mp.policy import PrecisionPolicy
from hf_mp.step.observers import FreeGradients, check_options

Parallel = Literal["ddp", "fsdp2", "hsdp", "tp"]
_MOST_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of a training step; with ``"tp"`` all ranks have the same sequences."""

    ranks: int = 1
    parallel: Parallel = "fsdp2"
    node_size: int = 8  # ranks on one machine
    precision: str  # one of hf_mp.memory.precisions.TRAINING_PRESETS
    seq_len: int | None  # tokens in a sequence; None for a model without token ids
    batch_size: int = 1  # sequences, images, ... in one forward
    accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    optimizer: str = "adamw_torch_fused"  # default of TrainingArguments(optim=...)
    free_gradients: FreeGradients = "step"  # as for MixedPrecision
    offload: str | None = None  # as for MixedPrecision

    def __post_init__(self) -> None:
        _check_count("ranks", self.ranks, 1, _MOST_RANKS)
        for name in ("node_size", "batch_size", "accumulation_steps"):
            _check_count(name, getattr(self, name), 1)
        if self.seq_len is not None:
            _check_count("seq_len", self.seq_len, 2)
        if self.parallel not in get_args(Parallel):
            raise ValueError(f"parallel={self.parallel!r} is not known: use one of {', '.join(get_args(Parallel))}")
        if self.parallel == "hsdp" and self.ranks % self.node_size:
            raise ValueError(
                f"hsdp shards within a machine and replicates over machines: ranks={self.ranks} is not a multiple of "
                f"node_size={self.node_size}"
            )
        if self.free_gradients == "backward" and self.accumulation_steps > 1:
            raise ValueError(
                f"accumulation_steps={self.accumulation_steps} adds gradients up, and free_gradients='backward' leaves "
                "none: use accumulation_steps=1"
            )

    def __str__(self) -> str:
        text = f"{self.batch_size} x {self.seq_len} tokens" if self.seq_len else f"batch of {self.batch_size}"
        text += f", {self.accumulation_steps} micro-batches" if self.accumulation_steps > 1 else ""
        text += ", gradient checkpointing" if self.gradient_checkpointing else ""
        text += f", offload={self.offload!r}" if self.offload else ""
        return text + (f", one of {self.ranks} ranks, {self.parallel}" if self.ranks > 1 else "")


def _check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or value > (most or value):
        end = "on" if most is None else f"to {most}"
        raise ValueError(f"{name}={value!r} is not possible: use a whole number from {least} {end}")


def make_settings(
    source: PreTrainedConfig | nn.Module,
    precision: str | torch.dtype,
    *,
    seq_len: int | None = None,
    optimizer: str | None = None,
    gradient_checkpointing: bool = False,
    **settings: Any,
) -> TrainingSettings:
    """Validate the settings of a training step, and choose defaults by model and precision.

    Args:
        source: of :func:`hf_mp.memory.models.find_model`.
        precision, seq_len, optimizer: as for :func:`hf_mp.estimate_training_memory`.
        gradient_checkpointing: also True if the model has it enabled.
        settings: other fields of :class:`TrainingSettings`.
    """
    preset, longest = parse_preset(precision), longest_sequence(source)
    if seq_len is None:
        seq_len = None if longest is None else int(min(longest, 1024))
    elif longest is None:
        kind = class_of(source)
        raise ValueError(
            f"seq_len={seq_len} is for token ids, and {kind.__name__} reads {kind.main_input_name}: leave it out"
        )
    # A fused update does not mix DTensors and plain tensors.
    default = "adamw_torch" if settings.get("parallel") == "tp" else TrainingSettings.optimizer
    chosen = TrainingSettings(
        precision=spell(precision),
        seq_len=seq_len,
        optimizer=optimizer or preset.optimizer or default,
        gradient_checkpointing=gradient_checkpointing or getattr(source, "is_gradient_checkpointing", False),
        **settings,
    )
    # An embedding of fake tensors does not check positions.
    if longest is not None and seq_len is not None and seq_len > longest:
        raise ValueError(
            f"seq_len={seq_len} is longer than the {longest} positions that the model has: use at most {longest}"
        )
    if preset.optimizer not in (None, chosen.optimizer):
        raise ValueError(
            f"precision={precision!r} sets optimizer={preset.optimizer!r}: leave optimizer out, or choose another "
            "precision"
        )
    check_options(PrecisionPolicy.parse(preset.policy or "fp32"), chosen.free_gradients, offload=chosen.offload)
    if chosen.offload is not None and chosen.ranks > 1 and chosen.parallel != "ddp":
        raise ValueError(
            f"offload={chosen.offload!r} needs whole weights on each rank, and parallel={chosen.parallel!r} shards "
            "them: use 'ddp'"
        )
    return chosen


def check_device(settings: TrainingSettings, device: str) -> None:
    if settings.offload is not None and device == "cpu":
        raise ValueError(
            f"offload={settings.offload!r} moves memory from a GPU to the host, and device='cpu' has the host's alone: "
            "use 'cuda', or leave offload out"
        )
