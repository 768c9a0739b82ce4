"""Options of a training in mixed precision, for ``MixedPrecisionArguments`` and ``MixedPrecisionCallback``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import TrainingArguments

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.policy import PRESETS, SWITCHES, PrecisionPolicy
from hf_mp.scaling.rules import RULES, StaticRule, parse_loss_scale, whole
from hf_mp.scaling.scalers import OF_ALL_SCALERS, LossScaler, make_loss_scaler
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.step.observers import OFFLOAD, ON_OVERFLOW, FreeGradients, check_options
from hf_mp.trainer.checks import fsdp_version

SAVE_FAILURES = ("continue", "stop")
SAVE_DTYPES = {"fp32": torch.float32, "original": None, **{e.name: e.dtype for e in LOWER_PRECISION_DTYPES.values()}}

# Options without effect in FP32.
OF_MIXED = ("loss_scale", "loss_scaler_settings", "rules", "histogram_steps", "precision_report")


class Default(str):
    """String that marks a default: a value in the arguments of the Trainer has priority."""

    __slots__ = ()

    def __str__(self) -> str:  # argparse converts defaults with str()
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # training_args.bin is loaded with few classes allowed
        return str, (self[:],)


DEFAULT_PRECISION = Default("fp16")


# HfArgumentParser reads help and choices from the metadata of a field.
def _option(default: Any, says: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": says, **more})


@dataclass
class PrecisionOptions:
    """Options with their defaults; the ``help`` of each field describes it."""

    precision: str = _option(
        DEFAULT_PRECISION,
        f"{', '.join(PRESETS)} (lean: the model is stored in 16 bits; fp32: the stock Trainer), or "
        "'params=fp32,compute=fp16,loss_scale=dynamic'.",
    )
    loss_scale: str | None = _option(
        None,
        f"{', '.join(f'{rule.name} ({rule.summary})' for rule in RULES.values())}, none, or a number "
        f"({StaticRule.summary}). Default: that of the precision.",
    )
    loss_scaler_settings: dict[str, Any] | str | None = _option(  # noqa: RUF009
        None, 'Settings of the loss scaler as JSON, e.g. \'{"init_scale": 4096, "headroom": 4}\'.'
    )
    fp32_head: bool = _option(False, "Run the output embedding in FP32, in training and in generate().")
    exact_generation: bool = _option(
        False,
        "Sum matmuls and attention in FP64, so that generate() and training compute the same log-probabilities, bit "
        "for bit; slow.",
    )
    free_gradients: FreeGradients = _option(  # noqa: RUF009
        "step",
        "When a lean layout frees a gradient: step (the update has used it) or backward (each parameter is updated "
        "inside backward; with max_grad_norm or a loss scale, backward runs twice).",
    )
    offload: str | None = _option(
        None,
        "What a lean layout has in host memory: optimizer (the optimizer's state, and 16 bits of each weight) or all "
        "(the gradients, too). Updates are the same, bit for bit. Default: nothing.",
        choices=OFFLOAD,
    )
    on_overflow: str = _option(
        "skip",
        "What to do when a forward leaves FP16's range: skip the step, or heal (find rules of autocast that keep the "
        "values in range, and run the step again).",
        choices=tuple(ON_OVERFLOW),
    )
    save_failure: str = _option(
        "continue",
        "What to do when a checkpoint cannot be saved (disk full, read-only): continue (training goes on, the next "
        "save tries again) or stop.",
        choices=SAVE_FAILURES,
    )
    handle_preemption: bool = _option(True, "On SIGTERM and SIGUSR1, save a checkpoint and exit with code 75.")
    explain_overflows: bool = _option(
        True, "Replay the micro-batch of a skipped step and log which module made the first inf or NaN."
    )
    check_gradients: bool = _option(
        True,
        "Compare the gradients of the first micro-batch at several loss scales: they must be equal. It takes five more "
        "backwards, once a run.",
    )
    histogram_steps: int = _option(
        0,
        "Record the magnitudes of activations, gradients, weights and updates of each layer in "
        "OUTPUT_DIR/precision_log.jsonl each time this many steps were taken, such as 50. 0 means never.",
    )
    precision_report: bool = _option(
        False, "Record each step's loss scale, and write OUTPUT_DIR/precision_report.html at the end."
    )

    precision_contract: bool = _option(
        True, "After the first step, print in which dtypes weights are stored, computed, summed and saved."
    )

    save_dtype: str = _option(
        "fp32",
        "In which dtype save_model and the push to the hub write the trained weights, rounded to nearest: fp32 (as "
        "they are), original (what each was loaded in), fp16 or bf16. Checkpoints keep FP32.",
        choices=tuple(SAVE_DTYPES),
    )

    @property
    def precision_policy(self) -> PrecisionPolicy:
        policy = PrecisionPolicy.parse(self.precision, **{name: getattr(self, name) for name in SWITCHES})
        return policy if self.loss_scale is None else replace(policy, loss_scale=parse_loss_scale(self.loss_scale))


@dataclass
class SessionSettings(PrecisionOptions):
    """Options of one Trainer, with those that only code can set."""

    tables: TableName = "compact"
    rules: Rules | None = None

    @classmethod
    def of(cls, args: TrainingArguments | None, given: Mapping[str, Any]) -> SessionSettings:
        """Merge options: those in ``given`` have priority over ``args``, if these are ``MixedPrecisionArguments``.

        None in ``given`` is ignored, except for ``precision``, where it is an error.
        """
        has_options = isinstance(args, PrecisionOptions)
        in_args = (
            {option.name: getattr(args, option.name) for option in fields(PrecisionOptions)} if has_options else {}
        )
        without_none = {name: value for name, value in given.items() if value is not None or name == "precision"}
        chosen = {name: value for name, value in without_none.items() if not isinstance(value, Default)}
        return cls(**{**in_args, **chosen})

    def __post_init__(self) -> None:
        self.policy = self.precision_policy
        whole(0)(histogram_steps=self.histogram_steps)
        check_options(self.policy, self.free_gradients, self.on_overflow, offload=self.offload)
        if self.on_overflow == "heal":
            from hf_mp.diagnostics.healing import check_healing

            check_healing(self.policy, in_backward=self.free_gradients == "backward")
        for name, choices in (("save_failure", SAVE_FAILURES), ("save_dtype", SAVE_DTYPES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")

    def make_scaler(self) -> LossScaler[Any]:
        settings: Any = self.loss_scaler_settings or {}
        if self.policy.loss_scale is None and not settings.keys() <= OF_ALL_SCALERS:
            names = ", ".join(sorted(settings.keys() - OF_ALL_SCALERS))
            raise ValueError(
                f"loss_scaler_settings ({names}) have no effect: precision={str(self.policy)!r} has no loss scale. "
                "Leave them out, or add one: loss_scale='headroom' or 'dynamic'"
            )
        return make_loss_scaler(self.policy.loss_scale, self.policy.compute, **settings)

    def make_runtime(self, args: TrainingArguments) -> MixedPrecision:
        policy = self.policy
        if self.offload is not None and fsdp_version(args) is not None:
            raise ValueError(
                f"offload={self.offload!r} needs whole weights on each process, and FSDP shards them: leave offload "
                "out, or use DDP (no fsdp=)"
            )
        if policy.is_lean and fsdp_version(args) == 2:
            # accelerate requires that the optimizer has the parameters of the model. FSDP2 shards of a lean model are
            # FP32 anyway.
            policy = replace(policy, params=torch.float32, reduce=policy.reduce_dtype)
        return MixedPrecision(
            policy,
            loss_scaler=self.make_scaler(),
            tables=self.tables,
            rules=self.rules,
            free_gradients=self.free_gradients,
            max_grad_norm=(args.max_grad_norm or None) if self.free_gradients == "backward" else None,
            offload=self.offload,
        )
