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
    """``TrainingArguments`` plus precision; ``HfArgumentParser`` reads them from a command line or a YAML/JSON file.

    Raises:
        ValueError: for an unknown precision or loss scale, settings that the loss scaler does not have, and settings
            that switch on another mixed precision (``fp16``, ``bf16``, ``ACCELERATE_MIXED_PRECISION``). Also from
            ``train()`` of a Trainer that would ignore the precision: it is no :class:`MixedPrecisionTrainer` and has no
            :class:`MixedPrecisionCallback`.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "loss_scaler_settings",
    ]

    def __post_init__(self) -> None:
        # TrainingArguments are written as JSON, which has no torch.dtype.
        if isinstance(self.precision, torch.dtype):
            self.precision = spell(self.precision)
        super().__post_init__()
        if not torch.accelerator.is_available():
            # Without an accelerator torch pins nothing, and warns at each DataLoader.
            self.dataloader_pin_memory = False
        # All that a session would refuse is refused here, before a model is loaded.
        settings = SessionSettings.of(self, {})
        if settings.policy.is_mixed:
            # For its errors: wrong settings are refused before a model is loaded.
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
        """The stock property. Every training reads it, so a Trainer that would ignore ``precision`` is stopped here."""
        # A stock Trainer reads no precision and calls no hook of its arguments but this property, in each train().
        caller = sys._getframe(1).f_locals.get("self")
        # The attribute is set late in Trainer.__init__, which reads the device before.
        if isinstance(caller, Trainer) and getattr(caller, "is_in_train", False):
            is_ours = any(isinstance(one, SessionProperties) for one in (caller, *caller.callback_handler.callbacks))
            if not is_ours and self.precision_policy.is_mixed:
                # train() has set it and does not end as usual: evaluate() would take the model for one in training.
                caller.is_in_train = False
                raise ValueError(
                    f"{type(caller).__name__} does not read precision={self.precision!r}, and would train in FP32: use "
                    "MixedPrecisionTrainer, or give it callbacks=[hf_mp.MixedPrecisionCallback()]; if FP32 is what you "
                    "want, say precision='fp32'"
                )
        return super().device
