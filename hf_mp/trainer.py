"""``MixedPrecisionTrainer`` and ``MixedPrecisionArguments``: the Trainer subclass over the runtime."""

from __future__ import annotations

import json
import math
import os
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import SCALER_NAME
from transformers.utils import logging

from hf_mp.diagnostics.overflow import explain_overflows
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.loss_scaling import make_loss_scaler
from hf_mp.master_weights.optimizer import MasterWeightOptimizer
from hf_mp.policy import PrecisionPolicy, parse_loss_scale
from hf_mp.runtime import MixedPrecision, check_attachable

logger = logging.get_logger(__name__)

STATE_NAME = "mixed_precision.json"  # in each checkpoint directory
OVERFLOWS_NAME = "overflows"  # in the output directory


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
        metadata={"help": "fp16, bf16, fp32 (the stock Trainer), or 'params=fp32,compute=fp16,loss_scale=dynamic'."},
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

    # On: good steps pay nothing for it, and whoever needs the answer did not know so beforehand.
    explain_overflows: bool = field(
        default=True,
        metadata={"help": "Replay the micro-batch of a skipped step and log which module made the first inf or NaN."},
    )
    keep_overflow_batches: bool = field(
        default=False,
        metadata={"help": "Keep failing batches and their reports in OUTPUT_DIR/overflows (safetensors and JSON)."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = self.precision_policy
        if policy.is_mixed:
            make_loss_scaler(policy.loss_scale, **self.loss_scaler_settings)  # refuse wrong settings now
        elif self.loss_scale is not None or self.loss_scale_kwargs:
            logger.warning("loss_scale has no effect with precision='fp32': nothing is scaled")
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


def refuse_other_precision(args: TrainingArguments, policy: PrecisionPolicy) -> None:
    """Raise where ``args`` ask for another mixed precision than ours, or for what ours cannot live with.

    Raises:
        ValueError: naming the setting and the way out.
    """
    for name in ("fp16", "bf16"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True switches accelerate's mixed precision on beside precision={str(policy)!r}: remove {name} "
                f"and say precision={name!r}, or use the stock Trainer"
            )
    if getattr(args, "mixed_precision", "no") not in ("no", None):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={os.environ.get('ACCELERATE_MIXED_PRECISION')!r} in the environment switches "
            f"accelerate's mixed precision on beside precision={str(policy)!r}: unset it, or start with "
            "`accelerate launch --mixed_precision no`"
        )
    if not policy.is_mixed:
        return
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise ValueError(f"{name}=True casts the FP32 masters away: remove it, evaluation uses {policy} already")
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError("FSDP shards the FP32 masters behind our back and is not supported yet: use DDP (torchrun)")
    if (optim := str(getattr(args.optim, "value", args.optim))).endswith("layerwise") or "lomo" in optim:
        raise ValueError(
            f"optim={optim!r} updates inside of backward, where an overflow cannot be skipped: use another"
        )
    if policy.is_lean and args.world_size > 1:
        raise ValueError(
            f"precision={str(policy)!r} leaves FP16 gradients, which DistributedDataParallel would sum in FP16: use "
            f"{str(policy).removesuffix('-lean')!r} on several processes"
        )
    if args.deepspeed is not None:
        raise ValueError(
            "DeepSpeed brings its own FP16 optimizer: use the stock Trainer with DeepSpeed, or drop it here"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process make the Trainer use DataParallel, which replicates the model behind "
            "our back: start with `torchrun --nproc_per_node N`, or show one GPU with CUDA_VISIBLE_DEVICES"
        )


class _TellAccelerate(TrainerCallback):
    """Lets accelerate know of a skipped step, so that the LR scheduler stands still as it does under ``fp16=True``."""

    def __init__(self, trainer: MixedPrecisionTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        runtime, optimizer = self._trainer.mixed_precision, self._trainer.optimizer
        if runtime is not None and isinstance(optimizer, AcceleratedOptimizer):
            optimizer._is_overflow = runtime.step_was_skipped


class MixedPrecisionTrainer(Trainer):
    """A ``Trainer`` that trains in our mixed precision; with ``precision="fp32"`` it is the stock Trainer, bit for bit.

    All arguments of ``Trainer``, and:

    Args:
        precision: a preset, a spelled-out policy or a :class:`PrecisionPolicy`; default: what ``args`` say
            (:class:`MixedPrecisionArguments`), else ``"fp16"``.

    Attributes:
        mixed_precision: the :class:`MixedPrecision` runtime of the current model; None with ``precision="fp32"``.
        overflow_reports: an :class:`OverflowReport` for each skipped step of the current model that was explained.

    Raises:
        ValueError: before anything is written, for an unknown precision, for ``fp16=True``, ``bf16=True`` or
            ``ACCELERATE_MIXED_PRECISION`` beside ours, or for a model without floating parameters.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        precision: str | PrecisionPolicy | None = None,
        **named: Any,
    ) -> None:
        args = MixedPrecisionArguments() if args is None else args
        self.precision_policy = _policy(args, precision)
        self.mixed_precision: MixedPrecision | None = None
        self.overflow_reports: list[OverflowReport] = []
        refuse_other_precision(args, self.precision_policy)
        if self.precision_policy.is_mixed:
            self.mixed_precision = _runtime(self.precision_policy, args)
            if model is not None:
                check_attachable(model)
        super().__init__(model, args, *positional, **named)
        if self.precision_policy.is_mixed:
            self.add_callback(_TellAccelerate(self))
            self._attach()

    def _attach(self) -> MixedPrecision:
        """The runtime of the current model, which ``model_init`` may have replaced."""
        model = cast(nn.Module, self.model)
        runtime = self.mixed_precision
        if runtime is None or (runtime.was_attached and runtime.model is not model):
            if runtime is not None:
                runtime.detach()
            runtime = self.mixed_precision = _runtime(self.precision_policy, self.args)
        if runtime.model is None:
            runtime.attach(model)
        self._explain_overflows(runtime)
        runtime.wrap_forwards()  # Liger's kernels set a forward of their own after the Trainer is made
        return runtime

    def _explain_overflows(self, runtime: MixedPrecision) -> None:
        args = self.args
        if getattr(args, "explain_overflows", True):
            keep = getattr(args, "keep_overflow_batches", False)
            directory = Path(cast(str, args.output_dir), OVERFLOWS_NAME) if keep else None
            self.overflow_reports = explain_overflows(runtime, keep_batches=directory).reports

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """As the stock Trainer's, over FP32 masters and with a guarded ``step``."""
        if not self.precision_policy.is_mixed:
            return super().create_optimizer(*args, **kwargs)
        runtime = self._attach()
        optimizer = super().create_optimizer(*args, **kwargs)
        if isinstance(optimizer, AcceleratedOptimizer):  # a second train() gets that of the first back
            runtime.attach_optimizer(optimizer.optimizer)
            return optimizer
        self.optimizer = runtime.attach_optimizer(optimizer)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        wrapper = self._master_weight_optimizer()
        return super()._clip_grad_norm(model) if wrapper is None else wrapper.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        wrapper = self._master_weight_optimizer()
        if wrapper is not None and grad_norm is None:
            grad_norm = wrapper.clip_grad_norm_(math.inf)
        return super()._get_grad_norm(model, grad_norm)

    def _master_weight_optimizer(self) -> MasterWeightOptimizer | None:
        """The optimizer's wrapper in a lean layout, which knows gradients that no one has unscaled yet."""
        optimizer = self.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        return optimizer if isinstance(optimizer, MasterWeightOptimizer) else None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the stock Trainer's; training logs also carry ``loss_scale`` and ``skipped_steps``."""
        if self.mixed_precision is not None and "loss" in logs:
            logs = {**logs, **self.mixed_precision.stats.log_entries()}
        super().log(logs, *args, **kwargs)

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        if self.mixed_precision is not None and self.args.should_save:
            text = json.dumps(self.mixed_precision.state_dict(), indent=2)
            Path(output_dir, STATE_NAME).write_text(text + "\n", encoding="utf-8")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.mixed_precision is None:
            super()._load_scaler(checkpoint)
        elif checkpoint is not None:
            load_runtime_state(self.mixed_precision, Path(checkpoint))


def load_runtime_state(runtime: MixedPrecision, checkpoint: Path) -> None:
    """Take over the loss scale from a checkpoint of ours, or from one of a Trainer with ``fp16=True``.

    Raises:
        ValueError: for a file that does not hold such a state; the message names it.
    """
    path, torch_path = checkpoint / STATE_NAME, checkpoint / SCALER_NAME
    try:
        if path.is_file():
            runtime.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        elif torch_path.is_file():
            path = torch_path
            runtime.scaler.load_state_dict(torch.load(torch_path, weights_only=True))
            runtime.reset_stats()
        else:
            logger.warning(f"{checkpoint} has no {STATE_NAME}: the loss scale starts anew")
    except (ValueError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot resume the loss scale from {path}: {error}") from error


def _runtime(policy: PrecisionPolicy, args: TrainingArguments) -> MixedPrecision:
    settings = args.loss_scaler_settings if isinstance(args, MixedPrecisionArguments) else {}
    return MixedPrecision(policy, loss_scaler=make_loss_scaler(policy.loss_scale, **settings))


def _policy(args: TrainingArguments, precision: str | PrecisionPolicy | None) -> PrecisionPolicy:
    if not isinstance(args, MixedPrecisionArguments):
        return PrecisionPolicy.parse("fp16" if precision is None else precision)
    if precision is None:
        return args.precision_policy
    policy = PrecisionPolicy.parse(precision)
    return policy if args.loss_scale is None else replace(policy, loss_scale=parse_loss_scale(args.loss_scale))
