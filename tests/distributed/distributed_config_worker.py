"""Runs on one or two processes: models that Transformers shards as it loads them (``DistributedConfig``).

Usage: torchrun ... distributed_config_worker.py FOLDER; writes FOLDER/rankN.pt, a dict of what each case returned.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import tensor_parallel_doors
import torch
import torch.distributed as dist
from loop_worker import RANKS, batches, named, said_of, weights, write_results
from peft import LoraConfig, get_peft_model
from tensor_parallel_worker import MODELS
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_mp

TRAININGS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "bf16": {"precision": "bf16"},
    "fp16-lean": {"precision": "fp16-lean"},
    "callback": {"callback": True},
    "replicas": {"fsdp_size": 1, "dp_replicate_size": 2},
    "lora": {"lora": True},
}


def loaded(folder: str, *, lora: bool = False, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """The same weights for everyone, in parts on two processes."""
    path = Path(folder, "llama")
    if not path.exists() and (RANKS == 1 or dist.get_rank() == 0):
        torch.manual_seed(3)
        make, config = MODELS["llama"]
        make(config).save_pretrained(path)
    settings: dict[str, Any] = {"dtype": dtype}
    if RANKS > 1:
        dist.barrier()
        settings["distributed_config"] = DistributedConfig(**{"fsdp_size": 2, **sizes})
    model: Any = AutoModelForCausalLM.from_pretrained(path, **settings).train()
    torch.manual_seed(4)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])) if lora else model


def train(
    folder: str,
    name: str = "refused",
    *,
    precision: str = "fp16",
    callback: bool = False,
    overflow_at: int | None = None,
    **loading: Any,
) -> dict[str, Any]:
    """Five steps of a Trainer, and the model saved; in one forward the loss of rank 1 may be infinite."""
    model = loaded(folder, **loading)
    settings = {
        "save_strategy": "steps",
        "save_steps": 5,
        "save_only_model": True,
        "output_dir": str(Path(folder, name)),
    }
    made, log = tensor_parallel_doors._trainer(
        folder, model, precision, callback=callback, per_device_train_batch_size=4 // RANKS, **settings
    )
    forwards = 0

    def plant(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal forwards
        if forwards == overflow_at and dist.get_rank() == 1:
            output.loss = output.loss * math.inf
        forwards += 1

    model.register_forward_hook(plant)
    made.train()
    return {
        **log.found,
        "wrapped": made.model_wrapped is not made.model,
        "weights": weights(model),
        "skipped": None if callback else made.mixed_precision.stats.skipped_steps,
    }


def trainings(folder: str) -> dict[str, Any]:
    return {name: train(folder, name, **settings) for name, settings in TRAININGS.items()}


def overflows(folder: str) -> dict[str, Any]:
    return {name: train(folder, "overflow", overflow_at=2, **TRAININGS[name]) for name in ("fp16", "fp16-lean", "lora")}


def loop(folder: str) -> dict[str, list[float]]:
    """Losses of a loop of one's own, and of one that goes on from its checkpoint after two steps."""
    found: dict[str, list[float]] = {}
    for name, first in (("at once", 0), ("resumed", 2)):
        model = loaded(folder)
        model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "fp16")
        if first:
            hf_mp.load_checkpoint(Path(folder, "at once"), model, optimizer)
        for step, ids in enumerate(batches(4)[first:], first + 1):
            ids = ids.chunk(RANKS)[dist.get_rank()]
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.setdefault(name, []).append(loss.item())
            if step == 2 and not first:
                hf_mp.save_checkpoint(Path(folder, name, "checkpoint-2"), model, optimizer, step)
    return found


def refusals(folder: str) -> dict[str, str]:
    return said_of(
        {
            "own precision": lambda: train(folder, fsdp_mixed_precision=True),
            "own precision, callback": lambda: train(folder, callback=True, fsdp_mixed_precision=True),
            "in 16 bits": lambda: train(folder, dtype=torch.bfloat16),
        }
    )


if __name__ == "__main__":
    write_results(named([trainings, overflows, loop, refusals] if RANKS > 1 else [trainings], sys.argv[1]))
