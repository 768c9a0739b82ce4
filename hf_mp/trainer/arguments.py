"""``MixedPrecisionArguments``: ``TrainingArguments`` plus precision."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import Trainer, TrainingArguments

from hf_mp.dtypes import spell
from hf_mp.trainer.checks import check_no_other_precision
from hf_mp.trainer.session import SessionProperties
from hf_mp.trainer.settings import PrecisionOptions, SessionSettings


@dataclass
class MixedPrecisionArguments(PrecisionOptions, TrainingArguments):
    """``TrainingArguments`` plus precision, for ``HfArgumentParser`` (command line, YAML, JSON) or code.

    Raises:
        ValueError: for an unknown precision or loss scale, unknown loss scaler settings, and another mixed precision
            (``fp16``, ``bf16``, ``ACCELERATE_MIXED_PRECISION``). Also from ``train()`` of a Trainer that is no
            :class:`MixedPrecisionTrainer` and has no :class:`MixedPrecisionCallback`.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "loss_scaler_settings",
    ]

    def __post_init__(self) -> None:
        # TrainingArguments are saved as JSON.
        if isinstance(self.precision, torch.dtype):
            self.precision = spell(self.precision)
        super().__post_init__()
        if not torch.accelerator.is_available():
            # Without an accelerator, each DataLoader would only warn.
            self.dataloader_pin_memory = False
        # Raise errors before a model is loaded.
        settings = SessionSettings.of(self, {})
        if settings.policy.is_mixed:
            settings.make_scaler()
        if self.free_gradients == "backward" and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} adds gradients up, and "
                "free_gradients='backward' leaves none: use free_gradients='step', or larger batches with "
                "gradient_checkpointing=True"
            )
        check_no_other_precision(self, settings.policy)

    @property
    def device(self) -> torch.device:
        """Stock property; raises a ValueError in the ``train()`` of a Trainer that ignores ``precision``."""
        # It is the only property that each train() of a stock Trainer reads.
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, Trainer) and _trains_in_fp32(caller) and self.precision_policy.is_mixed:
            # train() does not reset it after an error, and evaluate() reads it.
            caller.is_in_train = False
            raise ValueError(
                f"{type(caller).__name__} does not read precision={self.precision!r}, and would train in FP32: use "
                "MixedPrecisionTrainer, or give it callbacks=[hf_mp.MixedPrecisionCallback()]; if FP32 is what you "
                "want, say precision='fp32'"
            )
        return super().device


def _trains_in_fp32(trainer: Trainer) -> bool:
    # Trainer.__init__ reads the device before it sets is_in_train.
    is_training = getattr(trainer, "is_in_train", False)
    return is_training and not any(
        isinstance(user, SessionProperties) for user in (trainer, *trainer.callback_handler.callbacks)
    )
