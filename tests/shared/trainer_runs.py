"""Runs of one Trainer as three contenders: stock, our subclass in its place, our callback added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import same as same
from tiny import weights as weights
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

from hf_mp import MixedPrecisionCallback, MixedPrecisionTrainer

Rows = list[dict[str, Any]]

VOCABULARY = 199
# Log entries that differ from run to run.
CLOCK = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_tokens_per_second"}
CLOCK |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
OURS = {"loss_scale", "skipped_steps", "headroom"}


def token_rows(count: int = 32, length: int = 24) -> Rows:
    ids = torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def uneven_rows(count: int = 32) -> Rows:
    """Rows of several lengths, for a collator that pads."""
    return [{"input_ids": row["input_ids"][: 8 + index % 13]} for index, row in enumerate(token_rows(count))]


def tiny_gpt2(dtype: torch.dtype = torch.float32, **settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    config = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 48, "use_cache": False}
    config |= {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**config, **settings})).to(dtype)


def quick_arguments(path: Path, cls: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    """Of a run on the CPU that writes no checkpoint and tells of each step."""
    defaults: dict[str, Any] = {
        "output_dir": str(path),
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return cls(**{**defaults, **settings})


def arguments(path: Path, cls: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    """Of a short run with SGD: AdamW hardly notices a wrong factor on all gradients."""
    return quick_arguments(path, cls, **{"max_steps": 4, "optim": "sgd", "learning_rate": 0.5, **settings})


def make_trainer(
    contender: str, precision: str, model: nn.Module | None, args: Any, base: type[Trainer] = Trainer, **named: Any
) -> Trainer:
    """``base`` as it is (``stock``), with our subclass before it (``subclass``) or with our callback (``callback``)."""
    if contender == "callback":
        callbacks = [*named.pop("callbacks", []), MixedPrecisionCallback(precision)]
        trainer = base(model=model, args=args, callbacks=callbacks, **named)
    elif contender == "subclass":
        ours = MixedPrecisionTrainer if base is Trainer else type("Ours", (MixedPrecisionTrainer, base), {})
        trainer = ours(model=model, args=args, precision=precision, **named)
    else:
        trainer = base(model=model, args=args, **named)
    trainer.remove_callback(PrinterCallback)
    return trainer


def callback_of(trainer: Trainer) -> MixedPrecisionCallback:
    (callback,) = (cb for cb in trainer.callback_handler.callbacks if isinstance(cb, MixedPrecisionCallback))
    return callback


def history(trainer: Trainer, without: set[str] = CLOCK) -> list[str]:
    """The log as text, where NaN (the norm of a skipped step) equals itself."""
    return [repr(sorted((k, v) for k, v in entry.items() if k not in without)) for entry in trainer.state.log_history]


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def difference(left: list[Tensor], right: list[Tensor], start: list[Tensor]) -> float:
    """How far ``left`` ended from ``right``, relative to the way that ``right`` went from ``start``."""
    distance = sum((a.double() - b.double()).square().sum() for a, b in zip(left, right, strict=True))
    way = sum((b.double() - c.double()).square().sum() for b, c in zip(right, start, strict=True))
    return float((distance / way).sqrt())


def poisoned(base: type[Trainer], steps: tuple[int, ...]) -> type[Trainer]:
    """``base`` with a loss so large at ``steps`` that its gradients overflow FP16."""

    class Poisoned(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * 1e30 if self.state.global_step in steps and self.model.training else loss

    return Poisoned


Make = Callable[..., Trainer]
