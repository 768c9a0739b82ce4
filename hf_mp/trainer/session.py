"""What the Trainer subclass and the callback share: refusals, policy and runtime, the word to accelerate."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.trainer import SCALER_NAME
from transformers.utils import logging

from hf_mp.policy import PrecisionPolicy, parse_loss_scale
from hf_mp.scaling.scalers import make_loss_scaler
from hf_mp.step.mixed_precision import MixedPrecision

logger = logging.get_logger(__name__)

STATE_NAME = "mixed_precision.json"  # in each checkpoint directory
OVERFLOWS_NAME = "overflows"  # in the output directory


def refuse_other_precision(args: TrainingArguments, policy: PrecisionPolicy) -> None:
    """Raise where ``args`` ask for another mixed precision than ours, or for what ours cannot live with.

    Raises:
        ValueError: naming the setting and the way out.
    """
    for name in ("fp16", "bf16"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True switches accelerate's mixed precision on beside precision={str(policy)!r}: remove {name} "
                f"and say precision={name!r}, or leave hf_mp out (TRL sets bf16 unasked: there, say bf16=False)"
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
    if (fsdp_version := _fsdp_version(args)) not in (None, 2):
        raise ValueError(
            f"FSDP version {fsdp_version} flattens parameters, and there is nothing left to give a working copy: use "
            "FSDP2 (fsdp_config={'version': 2}, or `accelerate launch --fsdp_version 2`)"
        )
    if fsdp_version == 2 and args.torch_compile and not _is_set("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"):
        raise ValueError(
            "torch_compile=True compiles the whole model at once, which torch.compile cannot while autocast is active "
            "and FSDP gathers parameters inside: compile its blocks (ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true, "
            "or block.compile()), or use DDP"
        )
    if (optim := str(getattr(args.optim, "value", args.optim))).endswith("layerwise") or "lomo" in optim:
        raise ValueError(
            f"optim={optim!r} updates inside of backward, where an overflow cannot be skipped: use another"
        )
    if policy.is_lean and args.world_size > 1:
        raise ValueError(
            f"precision={str(policy)!r} leaves FP16 gradients, which DistributedDataParallel would sum in FP16: use "
            f"{str(policy).removesuffix('-lean')!r} on several processes"
        )
    if args.deepspeed is not None or _is_set("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "DeepSpeed brings its own FP16 optimizer: use the stock Trainer with DeepSpeed, or drop it here"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process make the Trainer use DataParallel, which replicates the model behind "
            "our back: start with `torchrun --nproc_per_node N`, or show one GPU with CUDA_VISIBLE_DEVICES"
        )


def _fsdp_version(args: TrainingArguments) -> int | None:
    """The version of FSDP that ``args`` or the launcher ask for; 0 for XLA's, None without FSDP."""
    if args.fsdp:
        settings: Any = args.fsdp_config or {}
        default = settings.get("version", 1)
        return 0 if settings.get("xla") else int((args.fsdp_plugin_args or {}).get("fsdp_version", default))
    return int(os.environ.get("FSDP_VERSION", "1")) if _is_set("ACCELERATE_USE_FSDP") else None


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true")


def policy_of(args: TrainingArguments, precision: str | PrecisionPolicy | None) -> PrecisionPolicy:
    """The policy that ``precision`` names; without it, what ``args`` say (``MixedPrecisionArguments``), else FP16."""
    own: PrecisionPolicy | None = getattr(args, "precision_policy", None)
    if own is None:
        return PrecisionPolicy.parse("fp16" if precision is None else precision)
    if precision is None:
        return own
    policy = PrecisionPolicy.parse(precision)
    loss_scale: str | None = getattr(args, "loss_scale", None)
    return policy if loss_scale is None else replace(policy, loss_scale=parse_loss_scale(loss_scale))


def make_runtime(policy: PrecisionPolicy, args: TrainingArguments, **autocast: Any) -> MixedPrecision:
    """A runtime for ``policy`` with ``tables`` and ``rules``, and the loss scaler settings that ``args`` may have."""
    settings: dict[str, Any] = getattr(args, "loss_scaler_settings", {})
    in_backward: dict[str, Any] = {}
    if getattr(args, "free_gradients", "step") == "backward":
        in_backward = {"free_gradients": "backward", "max_grad_norm": args.max_grad_norm or None}
    scaler = make_loss_scaler(policy.loss_scale, **settings)
    return MixedPrecision(policy, loss_scaler=scaler, **in_backward, **autocast)


def asks_for_explanation(args: TrainingArguments) -> bool:
    """Whether skipped steps are to be explained: yes, unless ``MixedPrecisionArguments`` say otherwise."""
    return bool(getattr(args, "explain_overflows", True))


def overflow_directory(args: TrainingArguments, asked: bool | None = None) -> Path | None:
    """Where failing batches are kept, if that is ``asked`` for; None asks ``MixedPrecisionArguments``."""
    asked = getattr(args, "keep_overflow_batches", False) if asked is None else asked
    return Path(str(args.output_dir), OVERFLOWS_NAME) if asked else None


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, without accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def tell_accelerate(optimizer: Optimizer | None, runtime: MixedPrecision | None) -> None:
    """Let accelerate know of a skipped step, so that the LR scheduler stands still as it does under ``fp16=True``."""
    if runtime is not None and isinstance(optimizer, AcceleratedOptimizer):
        optimizer._is_overflow = runtime.step_was_skipped


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
    except (ValueError, TypeError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot resume the loss scale from {path}: {error}") from error
