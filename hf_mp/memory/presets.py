"""The training presets to compare: ours, FP32, the Trainer's own mixed precision, pure BF16, INT8 + LoRA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_mp.policy import mixed_presets


@dataclass(frozen=True)
class TrainingPreset:
    label: str
    loaded: str = "fp32"  # the precision of the loaded model (memory.precisions.PRECISIONS)
    policy: str | None = None  # the PrecisionPolicy preset to attach; None for none
    autocast: torch.dtype | None = None  # of torch.autocast around the forward, as with fp16=True and bf16=True
    optimizer: str | None = None  # the preset's optimizer; None for any
    lora: bool = False  # whether only LoRA adapters (peft) over a frozen model are trained


TRAINING_PRESETS: dict[str, TrainingPreset] = {
    "fp32": TrainingPreset("FP32"),
    **{name: TrainingPreset(f"hf_mp {name}", policy=name) for name in mixed_presets()},
    "trainer-fp16": TrainingPreset("Trainer, fp16=True", autocast=torch.float16),
    "trainer-bf16": TrainingPreset("Trainer, bf16=True", autocast=torch.bfloat16),
    "pure-bf16": TrainingPreset("pure BF16", loaded="bf16"),
    "fp16-adamw8bit": TrainingPreset("hf_mp fp16, 8-bit AdamW", policy="fp16", optimizer="adamw_bnb_8bit"),
    "fp16-lean-adamw8bit": TrainingPreset(
        "hf_mp fp16-lean, 8-bit AdamW", policy="fp16-lean", optimizer="adamw_bnb_8bit"
    ),
    "int8-lora": TrainingPreset("INT8 + LoRA, hf_mp fp16", loaded="int8", policy="fp16", lora=True),
}
"""What can be estimated and measured, by the value of ``precision``."""


def parse_preset(name: str) -> TrainingPreset:
    """The entry of :data:`TRAINING_PRESETS`; raises ValueError with the allowed names."""
    if name not in TRAINING_PRESETS:
        raise ValueError(f"precision={name!r} is not known for training: use one of {', '.join(TRAINING_PRESETS)}")
    return TRAINING_PRESETS[name]
