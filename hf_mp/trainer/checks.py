"""Check settings, model and optimizer of a Trainer. All checks raise a ValueError with advice."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import is_dtensor


def check_no_other_precision(args: TrainingArguments, policy: PrecisionPolicy) -> None:
    """Raise for another mixed precision, or a setting that ``policy`` excludes."""
    # accelerate would add its own autocast, and scale the loss a second time.
    for name in ("fp16", "bf16"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True switches accelerate's mixed precision on, and precision={str(policy)!r} hf_mp's: remove "
                f"{name} and say precision={name!r}, or leave hf_mp out (TRL's default is bf16=True: pass bf16=False)"
            )
    if getattr(args, "mixed_precision", "no") not in ("no", None):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={os.environ.get('ACCELERATE_MIXED_PRECISION')!r} in the environment switches "
            f"accelerate's mixed precision on, and hf_mp's is precision={str(policy)!r}: unset it, or start with "
            "`accelerate launch --mixed_precision no`"
        )
    _check_processes_joined(args)
    if policy.is_mixed:
        _check_optimizer(str(getattr(args.optim, "value", args.optim)), args)
        _check_settings_supported(args, policy)


def _check_settings_supported(args: TrainingArguments, policy: PrecisionPolicy) -> None:
    version = fsdp_version(args)
    if version not in (None, 2):
        raise ValueError(
            f"FSDP version {version} joins weights into flat parameters, which hf_mp cannot give 16-bit copies: use "
            "FSDP2 (fsdp_config={'version': 2}, or `accelerate launch --fsdp_version 2`)"
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise ValueError(f"{name}=True casts the FP32 masters away: remove it, evaluation uses {policy} already")
    if args.deepspeed is not None or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        setting = "ACCELERATE_USE_DEEPSPEED from the environment" if args.deepspeed is None else "deepspeed"
        raise ValueError(
            f"DeepSpeed brings its own FP16 optimizer, which hf_mp cannot work with: remove {setting}, or use the "
            "stock Trainer"
        )
    # DataParallel replicates modules without their instance attributes.
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process make the Trainer use DataParallel, whose replicas bypass mixed "
            "precision: start with `torchrun --nproc_per_node N`, or show one GPU with CUDA_VISIBLE_DEVICES"
        )


_OF_BITSANDBYTES = re.compile("bnb|paged|lion_|ademamix|^(?!.*torch).*8bit")  # adamw_torch_8bit is torchao's


def _check_optimizer(optim: str, args: TrainingArguments) -> None:
    if optim.endswith("layerwise") or "lomo" in optim:
        raise ValueError(
            f"optim={optim!r} updates inside backward, where an overflow cannot be skipped: use optim='adamw_torch'"
        )
    if fsdp_version(args) == 2 and _OF_BITSANDBYTES.search(optim):
        raise ValueError(
            f"optim={optim!r} of bitsandbytes updates plain tensors, and under FSDP2 parameters are DTensors: use "
            "optim='adamw_torch', or DDP"
        )


def _check_processes_joined(args: TrainingArguments) -> None:
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1 and args.parallel_mode is ParallelMode.NOT_PARALLEL:
        raise ValueError(
            f"WORLD_SIZE={started} in the environment says that this is one of {started} processes, and accelerate has "
            "not joined them: each would train alone, over the checkpoints of the others. It joins processes on GPUs, "
            "or on a CPU with TrainingArguments(use_cpu=True); for a run of one process, unset WORLD_SIZE"
        )


def fsdp_version(args: TrainingArguments) -> int | None:
    """Return the version of FSDP in ``args`` or the environment; 0 for XLA's, None without FSDP."""
    if not args.fsdp:
        return int(os.environ.get("FSDP_VERSION", "1")) if parse_flag_from_env("ACCELERATE_USE_FSDP") else None
    settings: Any = args.fsdp_config or {}
    if settings.get("xla"):
        return 0
    return int((args.fsdp_plugin_args or {}).get("fsdp_version", settings.get("version", 1)))


def check_not_lean(policy: PrecisionPolicy) -> None:
    if policy.is_lean:
        raise ValueError(
            f"precision={str(policy)!r} keeps the FP32 masters in the optimizer, which a callback cannot replace: "
            f"the Trainer owns it. Use MixedPrecisionCallback({str(policy).replace('-lean', '')!r}), or "
            f"MixedPrecisionTrainer with precision={str(policy)!r}"
        )


def check_model_and_optimizer(model: nn.Module | None, optimizer: Optimizer | None, trainer: Trainer | None) -> None:
    if model is None or optimizer is None:
        raise ValueError(
            "this Trainer does not hand its model and its optimizer to on_train_begin, so a step that overflows could "
            "not be skipped: use hf_mp.prepare(model, optimizer) where it makes them"
        )
    world_size = 1 if trainer is None else trainer.args.world_size
    is_wrapped = trainer is None or trainer.model_wrapped is not model or any(map(is_dtensor, model.parameters()))
    if world_size > 1 and not is_wrapped:
        raise ValueError(
            f"this is one of {world_size} processes, and the Trainer has wrapped its model neither in DDP nor in FSDP: "
            "each would train alone. If evaluation_loop() ran before train(), leave it out, or make a new Trainer"
        )


def check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if hasattr(model, "_orig_mod") or isinstance(model, (DistributedDataParallel, torch.jit.ScriptModule)):
        raise ValueError(
            f"{name} hides the forward of the model inside it from mixed precision: give the Trainer the model itself, "
            "and TrainingArguments(torch_compile=True) to have it compiled"
        )
    if hasattr(model, "_original_forward"):
        raise ValueError(
            f"accelerate has put its own mixed precision around the forward of this {name}, as a Trainer with "
            "fp16=True does: take it off by accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    quantized = getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None
    if quantized and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"this {name} is quantized and has nothing to train: add an adapter (peft.get_peft_model), or load one "
            "with PeftModel.from_pretrained(..., is_trainable=True)"
        )


def check_dtype_of_late_model(model: nn.Module, args: TrainingArguments, *, resumed: bool) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in LOWER_PRECISION_DTYPES}
    if dtypes and (resumed or args.world_size > 1):
        reason = "loading the checkpoint rounded its FP32 weights" if resumed else "DDP has laid out its buckets"
        raise ValueError(
            f"the model became {', '.join(map(str, dtypes))} after the Trainer was made, and {reason} before it "
            "could be given FP32 masters: have model_init return it in FP32 (dtype=torch.float32), and give the "
            "callback to the Trainer when it is made"
        )
