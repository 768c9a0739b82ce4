"""``MixedPrecisionTrainer``: the Trainer subclass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.agreement import compare_settings
from hf_mp.ranks.parallelism import has_process_group
from hf_mp.trainer.arguments import MixedPrecisionArguments
from hf_mp.trainer.checks import check_no_other_precision
from hf_mp.trainer.crash_safe_trainer import CrashSafe
from hf_mp.trainer.find_trainer import check_regional_compile, clear_prepared_mark
from hf_mp.trainer.save_dtype import extend_save
from hf_mp.trainer.session import SessionProperties, TrainerSession
from hf_mp.trainer.settings import DEFAULT_PRECISION, SessionSettings


class MixedPrecisionTrainer(SessionProperties, CrashSafe):
    """A ``Trainer`` in mixed precision, ``"fp16"`` by default; with ``"fp32"`` it is the stock Trainer, bit for bit.

    The model, and a reference model in ``ref_model`` (TRL), are attached during ``train()``; after it, or an error,
    they are ordinary FP32 models. ``evaluate()`` and ``predict()`` always run in autocast. Checkpoints are complete or
    marked as unfinished. It accepts all arguments of ``Trainer``, and:

    Args:
        precision: a preset, a spelled-out policy or a :class:`PrecisionPolicy`; default: that of ``args``
            (:class:`MixedPrecisionArguments`), else ``"fp16"``.
        tables, rules: as for :class:`hf_mp.autocast`; default ``"compact"`` and none.
        offload: as for :class:`hf_mp.MixedPrecision`; default: that of ``args``, else None.

    Attributes:
        session: the :class:`TrainerSession`, with the ``contract`` of the run.

    Raises:
        ValueError: for an unknown precision, and for ``fp16=True``, ``bf16=True`` or ``ACCELERATE_MIXED_PRECISION``.
            From ``train()``, for a model that cannot be attached.
        ScaleLeakError: from ``train()``, if gradients of its first backward depend on the loss scale.
    """

    session: TrainerSession

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        precision: str | torch.dtype | PrecisionPolicy = DEFAULT_PRECISION,
        tables: TableName = "compact",
        rules: Rules | None = None,
        offload: str | None = None,
        **named: Any,
    ) -> None:
        args = MixedPrecisionArguments() if args is None else args
        given = {"precision": precision, "tables": tables, "rules": rules, "offload": offload}
        settings = SessionSettings.of(args, given)
        self.precision_policy = policy = settings.policy
        check_no_other_precision(args, policy)
        self.session = TrainerSession(settings, args)
        if positional:
            super().__init__(model, args, *positional, **named)
        else:  # the second parameter of TRL's DPOTrainer is the reference model
            super().__init__(model=model, args=args, **named)
        if policy.is_mixed:
            check_regional_compile(self)
        extend_save(self, lambda: self.session)
        self.add_callback(self.session)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the stock Trainer; model and optimizer are detached at the end."""
        clear_prepared_mark(self)
        try:
            if has_process_group() and self.args.parallel_mode is ParallelMode.DISTRIBUTED:
                # Before DDP broadcasts the weights: with different dtypes, gloo aborts.
                compare_settings(cast(Any, torch.distributed.group.WORLD), f"precision={self.precision_policy}")
            return super().train(*args, **kwargs)
        finally:
            self.session.end()

    def _attach(self) -> None:
        """Attach the model; measure the norm at the end of backward if gradients cannot change later."""
        # Custom code may write gradients through `.data` or NumPy, without a new version.
        has_stock_step = type(self).training_step is Trainer.training_step
        has_stock_callbacks = all(
            type(callback).on_pre_optimizer_step is TrainerCallback.on_pre_optimizer_step
            for callback in self.callback_handler.callbacks
        )
        self.session.begin(cast(nn.Module, self.model), measures_norm=has_stock_step and has_stock_callbacks)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        # A 16-bit model of model_init would round the loaded FP32 weights.
        if self.is_in_train:
            self._attach()
        self._detach_split_parameters()
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        self._detach_split_parameters()
        super()._load_best_model()

    def _detach_split_parameters(self) -> None:
        settings = self.session.settings
        has_split_parameters = settings.policy.is_lean and not self.is_fsdp_enabled
        # A full model with offload may not fit in memory in FP32. PEFT's loader replaces split parameters by FP32 ones.
        must_stay_split = settings.offload is not None and not hasattr(self.model, "peft_config")
        if has_split_parameters and not must_stay_split:
            self.session.detach()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._attach()
        self.session.attach_reference_model(getattr(self, "ref_model", None))
        self.session.record_contract(cast(nn.Module, self.model))
        self.session.begin_run(self)
        return super()._inner_training_loop(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        self._attach()
        self.optimizer = self.session.attach_optimizer(super().create_optimizer(*args, **kwargs))
        return self.optimizer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.session.evaluating(cast(nn.Module, self.model)):
            return super().evaluation_loop(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = self.session.clip_grad_norm(model, cast(Optimizer, self.optimizer), self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.mixed_precision is not None:
            # Its gradients are freed.
            if self.mixed_precision.updates_in_backward:
                return None
            grad_norm = self.session.clip_grad_norm(model, cast(Optimizer, self.optimizer), math.inf)
        return super()._get_grad_norm(model, grad_norm)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, **self.session.log_entries(logs)}, *args, **kwargs)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.mixed_precision is None:
            super()._load_scaler(checkpoint)
        if checkpoint is not None:
            self.session.load(Path(checkpoint))
