"""Runs on each of two processes: models that Transformers saves under other names than their own, under FSDP2.

Usage: torchrun ... saved_names_worker.py FOLDER RUN...; a run is CONTENDER/KIND/PRECISION/STATE/ADAPTER,
as in "callback/Mixtral/bf16/FULL/LoRA", or loop/KIND/PRECISION, or left-out/KIND/PRECISION/STATE/ADAPTER. Writes
FOLDER/rankN.pt: by run, the tensors that did not come back, or the error of a run that is left without one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hub_names
import torch
import torch.distributed as dist
from hub_names import FirstIsBest, Snapshots, State, state_of
from torch.distributed.fsdp import fully_shard
from trainer_runs import make_trainer
from trainer_worker import allow_fsdp_on_cpu
from transformers import PreTrainedModel
from transformers.utils import logging

import hf_mp
from hf_mp import MixedPrecisionArguments
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME

logging.set_verbosity_error()
logging.disable_progress_bar()


def differing(found: State, expected: State) -> list[str]:
    return [
        name for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]  # fmt: skip


def trainer(
    folder: Path, contender: str, kind: str, precision: str, state: str, adapter: str, seed: int
) -> tuple[Any, Snapshots]:
    model = (hub_names.adapted if adapter == "LoRA" else hub_names.make)(kind, seed)
    blocks = {type(module).__name__ for module in model.modules()} & set(model._no_split_modules)
    args = MixedPrecisionArguments(
        str(folder), precision=precision, max_steps=4, per_device_train_batch_size=1, learning_rate=1e-2,
        optim="adamw_torch", save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="quality", greater_is_better=True, report_to=[],
        disable_tqdm=True, use_cpu=True, check_gradients=False, fsdp=True,
        fsdp_config={
            "version": 2, "state_dict_type": f"{state}_STATE_DICT", "transformer_layer_cls_to_wrap": sorted(blocks)
        },
    )  # fmt: skip
    rows, snapshots = hub_names.rows(kind), Snapshots()
    data = {"train_dataset": rows, "eval_dataset": rows[:4], "data_collator": hub_names.collate}
    return make_trainer(contender, precision, model, args, FirstIsBest, callbacks=[snapshots], **data), snapshots


def run(folder: Path, *case: str) -> dict[str, Any]:
    """Four steps at once, with the best model at their end; two of them again, from the checkpoint of the second."""
    first, seen = trainer(folder, *case, seed=0)
    first.train()
    found = {"best at once": differing(state_of(first.model), seen.after[2])}
    again, after = trainer(folder / "again", *case, seed=1)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["steps"] = sorted(after.after)
    found["resumed"] = differing(after.after[3], seen.after[3]) + differing(after.after[4], seen.after[4])
    found["best"] = differing(state_of(again.model), seen.after[2])
    if case[-2:] == ("FULL", "whole"):
        cls: Any = type(hub_names.make(case[1]))
        loaded: PreTrainedModel = cls.from_pretrained(folder / "checkpoint-2")
        found["from_pretrained"] = differing(state_of(loaded), seen.after[2])
    return found


def left_out(folder: Path, *case: str) -> dict[str, Any]:
    """Resume from a file without a weight, or an adapter with a weight of the base that did not train before."""
    trainer(folder, "subclass", *case, seed=0)[0].train()
    again, _ = trainer(folder / "again", "subclass", *case, seed=1)
    if case[-1] == "LoRA":
        again.model.base_model.model.model.norm.requires_grad_(True)
    elif dist.get_rank() == 0:
        path = folder / "checkpoint-2" / "pytorch_model_fsdp.bin"
        tensors = torch.load(path)
        del tensors["model.norm.weight"]
        torch.save(tensors, path)
        (folder / "checkpoint-2" / MANIFEST_NAME).unlink()
    dist.barrier()
    try:
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    except hf_mp.CheckpointError as error:
        return {"error": str(error)}
    return {}


def loop(folder: Path, kind: str, precision: str) -> dict[str, Any]:
    """A loop's checkpoint, saved and loaded under FSDP2."""

    def made(seed: int) -> tuple[Any, Any]:
        model, runtime = hub_names.make(kind, seed), hf_mp.MixedPrecision(precision)
        runtime.attach(model)
        fully_shard(model)
        return model, runtime.attach_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def steps(model: Any, optimizer: Any, start: int, stop: int) -> None:
        rows = hub_names.rows(kind)
        for step in range(start, stop):
            torch.manual_seed(step)  # for dropout
            model(**hub_names.collate(rows[2 * step + dist.get_rank() :][:1])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    first, again = made(0), made(1)
    steps(*first, 0, 2)
    hf_mp.save_checkpoint(folder / "checkpoint-2", *first, 2)
    hf_mp.load_checkpoint(folder / "checkpoint-2", *again)
    found = {"loaded": differing(state_of(again[0]), state_of(first[0]))}
    for parts in (first, again):
        steps(*parts, 2, 3)
    return {**found, "resumed": differing(state_of(again[0]), state_of(first[0]))}


def result(name: str) -> dict[str, Any]:
    contender, *case = name.split("/")
    folder = Path(sys.argv[1], name.replace("/", "-"))
    others = {"loop": loop, "left-out": left_out}
    return others[contender](folder, *case) if contender in others else run(folder, contender, *case)


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    # FSDP of a Trainer last: accelerate leaves its settings in the environment.
    names = sorted(sys.argv[2:], key=lambda name: not name.startswith("loop/"))
    results = {name: result(name) for name in names}
    torch.save(results, Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
