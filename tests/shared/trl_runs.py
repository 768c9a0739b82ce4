"""Short runs of TRL's Trainers on a tiny Qwen, as the contenders of ``trainer_runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from trainer_runs import make_trainer, quick_arguments
from trl_tasks import KINDS, load_default, named_for, save_tiny_qwen, shares_moved, tokenizer

__all__ = ["KINDS", "load_default", "named_for", "save_tiny_qwen", "shares_moved", "tokenizer", "trl_trainer"]


def trl_trainer(
    kind: str, contender: str, precision: str, model: nn.Module, path: Path, peft_config: Any = None, **settings: Any
) -> Any:
    """The Trainer of ``kind`` over ``model``, without TRL's gradient checkpointing, which doubles the time."""
    import trl

    name = KINDS[kind].trainer
    named = named_for(kind) | {key: settings.pop(key) for key in ("ref_model",) if key in settings}
    defaults = {"bf16": False, "gradient_checkpointing": False, "max_steps": 3, **KINDS[kind].settings}
    args = quick_arguments(path / contender, getattr(trl, f"{name}Config"), **{**defaults, **settings})
    if peft_config is not None:
        named["peft_config"] = peft_config
    if "eval_strategy" in settings:
        named["eval_dataset"] = named["train_dataset"]
    torch.manual_seed(7)
    return make_trainer(contender, precision, model, args, getattr(trl, f"{name}Trainer"), **named)
