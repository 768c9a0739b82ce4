"""``MixedPrecisionArguments``: ``TrainingArguments`` plus precision."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from hf_mp.diagnostics.healing import MAX_FP32_SHARE
from hf_mp.policy import PRESETS, SWITCHES, PrecisionPolicy, parse_loss_scale, spell
from hf_mp.scaling.events import ON_OVERFLOW
from hf_mp.scaling.rules import RULES, StaticRule
from hf_mp.trainer.checkpoints.crash_safe_trainer import SAVE_FAILURES
from hf_mp.trainer.refusals import refuse_other_precision
from hf_mp.trainer.session import OfSession
from hf_mp.trainer.settings import SAVE_DTYPES, SessionSettings
from hf_mp.weights.lean.optimizer_in_backward import FreeGradients

logger = logging.get_logger(__name__)


def _option(default: Any, says: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": says, **more})


@dataclass
class MixedPrecisionArguments(TrainingArguments):
    """``TrainingArguments`` plus precision; for ``HfArgumentParser``, from a command line or a YAML/JSON file.

    Raises:
        ValueError: for an unknown precision or loss scale, settings that the loss scaler does not have, and settings
            that switch another mixed precision on (``fp16``, ``bf16``, ``ACCELERATE_MIXED_PRECISION``). From the
            ``train()`` of a Trainer that would train in FP32 all the same: neither a :class:`MixedPrecisionTrainer`,
            nor with a :class:`MixedPrecisionCallback`.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "loss_scaler_settings",
    ]

    precision: str = _option(
        "fp16",
        f"{', '.join(PRESETS)} (lean: the model is stored in 16 bits; fp32: the stock Trainer), or "
        "'params=fp32,compute=fp16,loss_scale=dynamic'.",
    )
    loss_scale: str | None = _option(
        None,
        f"{', '.join(f'{rule.name} ({rule.summary})' for rule in RULES.values())}, none, or a number "
        f"({StaticRule.summary}). Not given: what the precision says.",
    )
    loss_scaler_settings: dict[str, Any] | str | None = _option(  # noqa: RUF009
        None, 'Settings of the loss scaler as JSON, e.g. \'{"init_scale": 4096, "headroom": 4}\'.'
    )
    fp32_head: bool = _option(False, "Run the output embedding in FP32, in training and in generate().")
    exact_generation: bool = _option(
        False,
        "Sum products and attention in FP64, so that generate() and training compute the same log-probabilities, bit "
        "for bit; slow.",
    )
    log_probability_gap_steps: int = _option(
        0,
        "Every how many steps the tokens of a batch are generated again, one by one, for the log entries logp_gap, "
        "logp_gap_clipped and logp_gap_beta; 0 is never.",
    )
    free_gradients: str = _option(
        "step",
        "When a lean layout frees a gradient: step (the update has used it) or backward (each parameter is updated "
        "inside backward; with max_grad_norm or a loss scale, backward runs twice).",
        choices=get_args(FreeGradients),
    )
    on_overflow: str = _option(
        "skip",
        "When a forward leaves FP16's range: skip the step, or heal (keep in range what left it, by rules of autocast, "
        "and run the step again).",
        choices=tuple(ON_OVERFLOW),
    )
    max_fp32_share: float = _option(
        MAX_FP32_SHARE, "Of the forward's FLOPs, the share that on_overflow='heal' may take out of 16 bits."
    )
    save_failure: str = _option(
        "continue",
        "What to do when a checkpoint cannot be saved (disk full, read-only): continue (training goes on, the next "
        "save tries again) or stop.",
        choices=SAVE_FAILURES,
    )
    save_in_background: bool = _option(
        False,
        "Once the files of a checkpoint are written, sync them and write the manifest (their checksums) in a thread, "
        "while training goes on; the next save and the end of training wait for it.",
    )
    handle_preemption: bool = _option(True, "Have SIGTERM and SIGUSR1 end the run in a checkpoint, with exit code 75.")
    # On by default: good steps pay nothing for it, and the need for it shows only after the overflow.
    explain_overflows: bool = _option(
        True, "Replay the micro-batch of a skipped step and log which module made the first inf or NaN."
    )
    keep_overflow_batches: bool = _option(
        False, "Keep failing batches and their reports in OUTPUT_DIR/overflows (safetensors and JSON)."
    )
    check_gradients: bool = _option(
        True,
        "Compare the gradients of the first micro-batch at several loss scales, between which they must not differ: "
        "five backwards more, once a run.",
    )
    histogram_steps: int = _option(
        0,
        "Every how many steps the magnitudes of activations, gradients, weights and updates are taken, by layer, for "
        "OUTPUT_DIR/precision_log.jsonl and TensorBoard; 50 is a good number, 0 is never.",
    )
    histogram_layers: list[str] | None = _option(  # noqa: RUF009
        None, "Name patterns of their layers ('transformer.h.*.mlp.*'). Not given: all with parameters."
    )
    precision_report: bool = _option(
        False, "Record each step's loss scale, and write OUTPUT_DIR/precision_report.html at the end."
    )

    precision_contract: bool = _option(
        True, "Print, after the first step, what is stored, computed, summed and saved in which dtype."
    )

    save_dtype: str = _option(
        "fp32",
        "In which dtype save_model and the push to the hub write the trained weights, rounded to nearest: fp32 (as "
        "they are), original (what each was loaded in), fp16 or bf16. Checkpoints keep FP32.",
        choices=tuple(SAVE_DTYPES),
    )

    def __post_init__(self) -> None:
        if isinstance(self.precision, torch.dtype):  # it is saved as text
            self.precision = spell(self.precision)
        super().__post_init__()
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # torch warns, and pins nothing
        settings = SessionSettings.of(self, None, {})
        if self.save_failure not in SAVE_FAILURES:
            raise ValueError(f"save_failure={self.save_failure!r}: choose one of {', '.join(SAVE_FAILURES)}")
        policy = self.precision_policy
        if policy.is_mixed:
            settings.make_scaler()  # refuse wrong settings now
        else:
            if self.loss_scale is not None or self.loss_scaler_settings:
                logger.warning("loss_scale has no effect with precision='fp32': nothing is scaled")
            if settings.records:
                logger.warning("histogram_steps and precision_report have no effect with precision='fp32'")
        if self.free_gradients == "backward" and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} adds gradients up, and "
                "free_gradients='backward' leaves none: use free_gradients='step', or larger batches with "
                "gradient_checkpointing=True"
            )
        refuse_other_precision(self, policy)

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """The policy that ``precision`` and ``loss_scale`` name."""
        policy = PrecisionPolicy.parse(self.precision, **{name: getattr(self, name) for name in SWITCHES})
        return policy if self.loss_scale is None else replace(policy, loss_scale=parse_loss_scale(self.loss_scale))

    @property
    def device(self) -> torch.device:
        """As the stock property, which every training reads: one that would not be in mixed precision ends here."""
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, Trainer) and getattr(caller, "is_in_train", False):  # which it has not from the start
            self._refuse_fp32(caller)
        return super().device

    def _refuse_fp32(self, trainer: Trainer) -> None:
        is_ours = any(isinstance(one, OfSession) for one in (trainer, *trainer.callback_handler.callbacks))
        if is_ours or not self.precision_policy.is_mixed:
            return
        trainer.is_in_train = False  # it can still evaluate
        raise ValueError(
            f"{type(trainer).__name__} does not read precision={self.precision!r}, and would train in FP32: use "
            "MixedPrecisionTrainer, or give it callbacks=[hf_mp.MixedPrecisionCallback()]; if FP32 is what you want, "
            "say precision='fp32'"
        )
