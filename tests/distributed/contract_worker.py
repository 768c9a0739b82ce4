"""Runs on each of several processes: precision contracts of stock trainings and of ours, and what FSDP2 saves.

Usage: torchrun (or accelerate launch) ... contract_worker.py FOLDER [CASE ...]; writes FOLDER/rankN.pt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loop_worker import tiny_gpt2, write_results
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from trainer_worker import FULL, allow_fsdp_on_cpu
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

import hf_mp

logging.set_verbosity_error()
IDS = torch.arange(32).reshape(2, 16)
BF16 = torch.bfloat16


def step(model: nn.Module, optimizer: Any, wrapped: Any = None) -> dict[str, set[str]]:
    """The contract of one step, as the dtypes that occur in each column."""

    def run() -> None:
        (wrapped or model)(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()

    return columns(hf_mp.precision_contract(model, optimizer, run=run))


def columns(contract: Any) -> dict[str, set[str]]:
    names = ("stored", "computed", "gradient", "reduced", "moments", "saved")
    return {name: {getattr(row, name) for row in contract.rows} for name in names}


def ddp(hook: Any = None, dtype: torch.dtype = torch.float32) -> dict[str, set[str]]:
    model = tiny_gpt2().to(dtype)
    wrapped = DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return step(model, AdamW(model.parameters()), wrapped)


def fsdp2(dtype: torch.dtype = torch.float32, policy: Any = None, ours: str = "") -> dict[str, set[str]]:
    model: Any = tiny_gpt2().to(dtype)
    for block in (*model.transformer.h, model):
        fully_shard(block, **({} if policy is None else {"mp_policy": policy}))
    optimizer: Any = AdamW(model.parameters())
    if ours:
        model, optimizer = hf_mp.prepare(model, optimizer, ours)
    return step(model, optimizer)


def trainer_saves(save_dtype: str) -> dict[str, Any]:
    """A Trainer with accelerate's FSDP2, and a whole model at the end."""
    args = TrainingArguments(
        str(Path(sys.argv[1], save_dtype)),
        max_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **FULL,
    )
    callback = hf_mp.MixedPrecisionCallback("bf16", save_dtype=save_dtype, check_gradients=False)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    trainer = Trainer(model=tiny_gpt2().to(BF16), args=args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert trainer.is_fsdp_enabled
    trainer.save_model()
    assert callback.session is not None
    return columns(callback.session.contract)


CASES: dict[str, Callable[[], Any]] = {
    "ddp": ddp,
    "ddp in bf16": partial(ddp, dtype=BF16),
    "ddp with a hook that compresses": partial(ddp, fp16_compress_hook),
    "fsdp2": fsdp2,
    "fsdp2 in bf16": partial(fsdp2, BF16),
    "fsdp2 that reduces in bf16": partial(fsdp2, policy=MixedPrecisionPolicy(BF16, BF16)),
    "fsdp2 that reduces in fp32": partial(fsdp2, policy=MixedPrecisionPolicy(BF16, torch.float32)),
    "ours over fsdp2": partial(fsdp2, ours="bf16"),
    "saved original": partial(trainer_saves, "original"),
    "saved fp16": partial(trainer_saves, "fp16"),
}


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    write_results(CASES)
