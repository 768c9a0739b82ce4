"""``MixedPrecisionTrainer`` and ``MixedPrecisionArguments``: the Trainer subclass over the runtime."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.diagnostics.overflow import explain_overflows
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.policy import PrecisionPolicy, parse_loss_scale
from hf_mp.scaling.scalers import LossScaleError, make_loss_scaler
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.callback import MixedPrecisionCallback
from hf_mp.trainer.checkpoints.crash_safe_trainer import SAVE_FAILURES, CrashSafeTrainer
from hf_mp.trainer.relative_step import read_learning_rate_from_state
from hf_mp.trainer.reporting import ReportSettings, TrainerReporting
from hf_mp.trainer.session import (
    STATE_NAME,
    asks_for_explanation,
    load_runtime_state,
    make_runtime,
    overflow_directory,
    policy_of,
    refuse_other_precision,
    tell_accelerate,
)
from hf_mp.weights.attachable import check_attachable
from hf_mp.weights.optimizer import MasterWeightOptimizer
from hf_mp.weights.optimizer_in_backward import FreeGradients, OptimizerInBackward, check_free_gradients

logger = logging.get_logger(__name__)


@dataclass
class MixedPrecisionArguments(TrainingArguments):
    """``TrainingArguments`` plus precision; for ``HfArgumentParser``, from a command line or a YAML/JSON file.

    Raises:
        ValueError: for an unknown precision or loss scale, settings that the loss scaler does not have, and settings
            that switch another mixed precision on (``fp16``, ``bf16``, ``ACCELERATE_MIXED_PRECISION``).
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "loss_scale_kwargs",
    ]

    precision: str = field(
        default="fp16",
        metadata={
            "help": "fp16, bf16, fp16-lean, bf16-lean (which store the model in 16 bits), fp32 (the stock Trainer), or "
            "'params=fp32,compute=fp16,loss_scale=dynamic'."
        },
    )
    loss_scale: str | None = field(
        default=None,
        metadata={
            "help": "headroom (fp16's default: follows the gradients), dynamic (torch's algorithm), none, or a number "
            "(constant). Not given: what the precision says."
        },
    )
    loss_scale_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Settings of the loss scaler as JSON, e.g. \'{"init_scale": 4096, "headroom": 4}\'.'},
    )
    free_gradients: str = field(
        default="step",
        metadata={
            "help": "When a lean layout frees a gradient: step (the update has used it) or backward (each parameter is "
            "updated inside of backward; with max_grad_norm or a loss scale, backward runs twice).",
            "choices": get_args(FreeGradients),
        },
    )
    save_failure: str = field(
        default="continue",
        metadata={
            "help": "What to do when a checkpoint cannot be saved (disk full, read-only): continue (training goes on, "
            "the next save tries again) or stop.",
            "choices": SAVE_FAILURES,
        },
    )
    handle_preemption: bool = field(
        default=True,
        metadata={"help": "Have SIGTERM and SIGUSR1 end the run in a checkpoint, with exit code 75."},
    )

    # On: good steps pay nothing for it, and whoever needs the answer did not know so beforehand.
    explain_overflows: bool = field(
        default=True,
        metadata={"help": "Replay the micro-batch of a skipped step and log which module made the first inf or NaN."},
    )
    keep_overflow_batches: bool = field(
        default=False,
        metadata={"help": "Keep failing batches and their reports in OUTPUT_DIR/overflows (safetensors and JSON)."},
    )

    histogram_steps: int = field(
        default=0,
        metadata={
            "help": "Every how many steps the magnitudes of activations, gradients, weights and updates are taken, by "
            "layer, for OUTPUT_DIR/precision_log.jsonl and TensorBoard; 50 is a good number, 0 is never."
        },
    )
    histogram_layers: list[str] | None = field(
        default=None,
        metadata={"help": "Name patterns of their layers ('transformer.h.*.mlp.*'). Not given: all with parameters."},
    )
    precision_report: bool = field(
        default=False,
        metadata={"help": "Record each step's loss scale, and write OUTPUT_DIR/precision_report.html at the end."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        report = ReportSettings.of(self)
        if self.save_failure not in SAVE_FAILURES:
            raise ValueError(f"save_failure={self.save_failure!r}: choose one of {', '.join(SAVE_FAILURES)}")
        policy = self.precision_policy
        if policy.is_mixed:
            make_loss_scaler(policy.loss_scale, **self.loss_scaler_settings)  # refuse wrong settings now
        else:
            if self.loss_scale is not None or self.loss_scale_kwargs:
                logger.warning("loss_scale has no effect with precision='fp32': nothing is scaled")
            if report.is_asked:
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
        policy = PrecisionPolicy.parse(self.precision)
        return policy if self.loss_scale is None else replace(policy, loss_scale=parse_loss_scale(self.loss_scale))

    @property
    def loss_scaler_settings(self) -> dict[str, Any]:
        """Keyword arguments for the loss scaler."""
        return dict(self.loss_scale_kwargs or {})  # type: ignore[arg-type]


class _AfterSteps(TrainerCallback):
    def __init__(self, trainer: MixedPrecisionTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, runtime = self._trainer, self._trainer.mixed_precision
        tell_accelerate(trainer.optimizer, runtime)
        if runtime is not None:
            callbacks = trainer.callback_handler.callbacks
            trainer.reporting.after_step(runtime.stats, callbacks, state.global_step + 1)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.reporting.end(args)


class MixedPrecisionTrainer(CrashSafeTrainer):
    """A ``Trainer`` that trains in our mixed precision; with ``precision="fp32"`` it is the stock Trainer, bit for bit.

    All arguments of ``Trainer``, and:

    Args:
        precision: a preset, a spelled-out policy or a :class:`PrecisionPolicy`; default: what ``args`` say
            (:class:`MixedPrecisionArguments`), else ``"fp16"``.
        tables: whose op lists autocast applies, as for :class:`hf_mp.MixedPrecision`; default ``"compact"``.
        rules: own rules of autocast by op and by module name, as for :class:`hf_mp.autocast`; default none.

    Attributes:
        mixed_precision: the :class:`MixedPrecision` runtime of the current model; None with ``precision="fp32"``.
        overflow_reports: an :class:`OverflowReport` for each skipped step of the current model that was explained.
        reporting: what shows in the progress bar and TensorBoard, and the ``recorder`` of the run where one was asked
            for (``histogram_steps``, ``precision_report``).

    Raises:
        ValueError: before anything is written, for an unknown precision, for ``fp16=True``, ``bf16=True`` or
            ``ACCELERATE_MIXED_PRECISION`` beside ours, or for a model without floating parameters.
    """

    stuck_errors = (LossScaleError,)

    @property
    def is_stuck(self) -> bool:
        """Whether the last two steps were skipped: a single one is how a scaler finds its level."""
        return self.mixed_precision is not None and self.mixed_precision.scaler.state.consecutive_skips > 1

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        precision: str | PrecisionPolicy | None = None,
        tables: TableName = "compact",
        rules: Rules | None = None,
        **named: Any,
    ) -> None:
        args = MixedPrecisionArguments() if args is None else args
        self.precision_policy = policy_of(args, precision)
        self._autocast: dict[str, Any] = {"tables": tables, "rules": rules}
        self.mixed_precision: MixedPrecision | None = None
        self.overflow_reports: list[OverflowReport] = []
        self.reporting = TrainerReporting()
        refuse_other_precision(args, self.precision_policy)
        check_free_gradients(self.precision_policy, getattr(args, "free_gradients", "step"))
        if args.torch_compile and self.precision_policy.is_lean and self.precision_policy.loss_scale is not None:
            logger.warning(
                f"torch_compile=True has little effect with {self.precision_policy}: graphs end at parameters"
            )
        for given in (*positional, *named.values()):
            _refuse_callbacks(given if isinstance(given, (list, tuple)) else ())
        if self.precision_policy.is_mixed:
            self.mixed_precision = make_runtime(self.precision_policy, args, **self._autocast)
            if model is not None:
                check_attachable(model)
        elif rules or tables != "compact":
            logger.warning("tables and rules have no effect with precision='fp32': there is no autocast")
        # By name where that can be: in DPOTrainer, the arguments are not the second parameter.
        first: dict[str, Any] = {} if positional else {"model": model, "args": args}
        super().__init__(*((model, args, *positional) if positional else ()), **{**first, **named})
        if self.precision_policy.is_mixed:
            self.add_callback(_AfterSteps(self))
            self._attach()

    def _attach(self) -> MixedPrecision:
        """The runtime of the current model, which ``model_init`` may have replaced."""
        model = cast(nn.Module, self.model)
        runtime = self.mixed_precision
        if runtime is None or (runtime.was_attached and runtime.model is not model):
            if runtime is not None:
                runtime.detach()
            runtime = self.mixed_precision = make_runtime(self.precision_policy, self.args, **self._autocast)
        if runtime.model is None:
            runtime.attach(model)
        # Code of one's own may write gradients so that no version counter rises (`.data`, NumPy).
        runtime.check.measures_norm = type(self).training_step is Trainer.training_step and not any(
            type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
            for callback in self.callback_handler.callbacks
        )
        self._explain_overflows(runtime)
        self.reporting.begin(runtime, self.args, ReportSettings.of(self.args))
        runtime.wrap_forwards()  # Liger's kernels set a forward of their own after the Trainer is made
        return runtime

    def _explain_overflows(self, runtime: MixedPrecision) -> None:
        if asks_for_explanation(self.args):
            self.overflow_reports = explain_overflows(runtime, keep_batches=overflow_directory(self.args)).reports

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """As the stock Trainer's, over FP32 masters and with a guarded ``step``."""
        if not self.precision_policy.is_mixed:
            return super().create_optimizer(*args, **kwargs)
        runtime = self._attach()
        if self.precision_policy.is_lean:
            read_learning_rate_from_state(self.lr_scheduler)
        optimizer = super().create_optimizer(*args, **kwargs)
        if isinstance(optimizer, AcceleratedOptimizer):  # a second train() gets that of the first back
            runtime.attach_optimizer(optimizer.optimizer)
            return optimizer
        self.optimizer = runtime.attach_optimizer(optimizer)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        wrapper, max_norm = self._master_weight_optimizer(), self.args.max_grad_norm
        if (in_backward := self._in_backward()) is not None:
            return torch.zeros(()) if in_backward.norm is None else in_backward.norm
        if wrapper is not None:
            return wrapper.clip_grad_norm_(max_norm)
        norm = self._known_grad_norm(model)
        if norm is None:
            return super()._clip_grad_norm(model)
        cast(MixedPrecision, self.mixed_precision).check.clip(list(model.parameters()), max_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self._in_backward() is not None:
            return None  # one pass over the gradients, which measures nothing
        if grad_norm is None:
            wrapper = self._master_weight_optimizer()
            grad_norm = self._known_grad_norm(model) if wrapper is None else wrapper.clip_grad_norm_(math.inf)
        return super()._get_grad_norm(model, grad_norm)

    def _in_backward(self) -> OptimizerInBackward | None:
        return None if self.mixed_precision is None else self.mixed_precision.in_backward

    def _known_grad_norm(self, model: nn.Module) -> Any:
        """The norm that was measured when the backward ended, while the gradients are still those."""
        runtime = self.mixed_precision
        return None if runtime is None else runtime.check.norm(list(model.parameters()))

    def _master_weight_optimizer(self) -> MasterWeightOptimizer | None:
        """The optimizer's wrapper in a lean layout, which knows gradients that no one has unscaled yet."""
        optimizer = self.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        return optimizer if isinstance(optimizer, MasterWeightOptimizer) else None

    def add_callback(self, callback: Any) -> None:
        """As the stock Trainer's; refuses a :class:`MixedPrecisionCallback`."""
        _refuse_callbacks([callback])
        super().add_callback(callback)

    def _keep_last_state(self, error: Exception) -> None:
        super()._keep_last_state(error)
        self.reporting.end(self.args)  # the run that most needs its report; no callback hears of its end

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the stock Trainer's; training logs also carry ``loss_scale`` and ``skipped_steps``."""
        if self.mixed_precision is not None and "loss" in logs:
            logs = {**logs, **self.mixed_precision.stats.log_entries(), **self.reporting.log_entries()}
        super().log(logs, *args, **kwargs)

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        if self.mixed_precision is not None and self.args.should_save:
            text = json.dumps(self.mixed_precision.state_dict(), indent=2)
            Path(output_dir, STATE_NAME).write_text(text + "\n", encoding="utf-8")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if self.precision_policy.is_mixed:
            self._attach()  # a model that model_init made in FP16 would round the weights
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.mixed_precision is None:
            super()._load_scaler(checkpoint)
        elif checkpoint is not None:
            load_runtime_state(self.mixed_precision, Path(checkpoint))


def _refuse_callbacks(callbacks: Iterable[Any]) -> None:
    if any(
        isinstance(callback, MixedPrecisionCallback) or callback is MixedPrecisionCallback for callback in callbacks
    ):
        raise ValueError(
            "MixedPrecisionCallback is for other Trainers: MixedPrecisionTrainer is in mixed precision already, remove "
            "the callback"
        )
