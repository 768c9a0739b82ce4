"""Runs on each of several processes: ``MixedPrecisionTrainer`` with DDP and with accelerate's FSDP2.

Usage: torchrun (or accelerate launch) ... trainer_worker.py FOLDER [CASE ...]; writes FOLDER/rankN.pt.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from loop_worker import said_of, tiny_gpt2, weights, whole
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer
from hf_mp.trainer.session import STATE_NAME

logging.set_verbosity_error()
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
GLOBAL_BATCH = 4


def rows(count: int = 256, uneven: bool = False) -> list[dict[str, Tensor]]:
    """Token ids by a rule that can be learned; where ``uneven``, every second row has labels for a quarter only."""
    start = torch.randint(0, 101, (count, 1), generator=torch.Generator().manual_seed(5))
    ids = (start + 3 * torch.arange(16)) % 101
    labels = ids.clone()
    if uneven:
        labels[::2, 4:] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


class Log(TrainerCallback):
    """What each step saw, on every process."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: dict[str, list[Any]] = defaultdict(list)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        runtime = self.trainer.mixed_precision
        self.seen["skipped"].append(runtime.step_was_skipped)
        self.seen["scale"].append(runtime.stats.loss_scale)
        self.seen["learning_rate"].append(self.trainer.lr_scheduler.get_last_lr()[0])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name in ("loss", "grad_norm") if "loss" in logs else ():
            self.seen[name].append(float(logs[name]))


class Planting(MixedPrecisionTrainer):
    """Multiplies the loss of rank 1 by inf in one forward."""

    forwards = 0
    overflow_at: int | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.forwards += 1
        hit = self.model.training and self.args.process_index == 1 and self.forwards - 1 == self.overflow_at
        return loss * math.inf if hit else loss


def trainer(
    folder: Path, *, overflow_at: int | None = None, uneven: bool = False, width: int = 32, **settings: Any
) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "precision": "fp16",
        "max_steps": 8,
        "per_device_train_batch_size": GLOBAL_BATCH // PROCESSES,
        "per_device_eval_batch_size": GLOBAL_BATCH // PROCESSES,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = MixedPrecisionArguments(**copy.deepcopy({**defaults, **settings}))  # which take dictionaries apart
    log = Log()
    data = {"train_dataset": rows(uneven=uneven), "eval_dataset": rows(8)}
    made = Planting(tiny_gpt2(width=width), args, callbacks=[log], **data)
    made.overflow_at, log.trainer = overflow_at, made
    return made, log


def run(folder: Path, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    made, log = trainer(folder, **settings)
    made.train(resume_from_checkpoint=resume)
    return {
        **log.seen,
        "weights": weights(made.model),
        "momentum": [whole(s["momentum_buffer"]) for s in made.optimizer.state_dict()["state"].values() if s]
        if settings.get("optim_args")
        else [],
        "eight_bit_states": sum(
            isinstance(value, Tensor) and value.dtype is torch.uint8
            for state in made.optimizer.state.values()
            for value in state.values()
        ),
        "wrapper": type(made.model_wrapped).__name__,
        "evaluation": made.evaluate()["eval_loss"],
    }


def resumed(folder: Path, **settings: Any) -> dict[str, Any]:
    """Eight steps at once, and four steps, a checkpoint, four more in a new Trainer; a step overflows before it."""
    settings = {"optim_args": "momentum=0.5", "lr_scheduler_type": "linear", **settings}
    at_once = run(folder, overflow_at=2, save_strategy="steps", save_steps=4, **settings)
    checkpoint = folder / "checkpoint-4"
    after = run(folder / "again", str(checkpoint), **settings)
    return {
        "at_once": at_once,
        "after": after,
        "files": sorted(path.name for path in checkpoint.iterdir()),
        "state": json.loads((checkpoint / STATE_NAME).read_text()),
    }


def fsdp(**settings: Any) -> dict[str, Any]:
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], **settings}
    return {"fsdp": True, "fsdp_config": config}


FULL, SHARDED = (fsdp(state_dict_type=f"{kind}_STATE_DICT") for kind in ("FULL", "SHARDED"))
OVERFLOW = {"overflow_at": 3, "lr_scheduler_type": "linear"}
# Uneven numbers of tokens: the Trainer divides by those of all processes and micro-batches.
ACCUMULATION = {"uneven": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2 // PROCESSES}
LEAN = {"precision": "fp16-lean"}
EIGHT_BITS = {"optim": "adamw_8bit", "optim_args": None, "learning_rate": 1e-3, "width": 64}
RUNS: dict[str, dict[str, Any]] = {
    "twenty_steps": {"max_steps": 20},
    "overflow": OVERFLOW,
    "accumulation": ACCUMULATION,
    "fsdp_twenty_steps": {"max_steps": 20, **fsdp()},
    "fsdp_overflow": {**OVERFLOW, **fsdp()},
    "fsdp_accumulation": {**ACCUMULATION, **fsdp()},
    "fsdp_without": fsdp(),
    "fsdp_checkpointing": fsdp(activation_checkpointing=True),
    "fsdp_of_model": {"gradient_checkpointing": True, **fsdp()},
    "fsdp_ram_efficient": fsdp(cpu_ram_efficient_loading=True),
    "eight_bits_fp16": EIGHT_BITS,
    "eight_bits_fp16-lean": {**LEAN, **EIGHT_BITS},
}
RESUMED: dict[str, dict[str, Any]] = {
    "resume": {},
    "lean": LEAN,
    "eight_bits_resume": {**LEAN, **EIGHT_BITS},
    "fsdp_resume_full": FULL,
    "fsdp_resume_sharded": SHARDED,
    "fsdp_lean_resume": {**LEAN, **SHARDED},
}


def resume_from_two(folder: Path) -> dict[str, Any]:
    """On one process, from the checkpoint that two processes wrote."""
    made = Path(os.environ["CHECKPOINT"])
    return run(folder, str(made), optim_args="momentum=0.5", lr_scheduler_type="linear")


def recipe(folder: Path) -> dict[str, Any]:
    """The recipe's own run with one global batch; 16 blocks a process do not divide what it evaluates on."""
    import finetune_gpt2

    folder.mkdir(exist_ok=True)
    text = folder / f"{os.environ.get('RANK', '0')}.txt"
    text.write_text("\n\n".join(topics[name] for name in ("assert", "for", "if", "while", "with", "pass", "return")))
    settings = {
        "train_file": text, "vocab_size": 300, "context": 32, "width": 32, "layers": 1, "heads": 2, "max_steps": 6,
        "warmup_steps": 1, "learning_rate": 5e-3, "per_device_train_batch_size": GLOBAL_BATCH // PROCESSES,
        "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "output_dir": folder / "run",
    }  # fmt: skip
    finetune_gpt2.main([f"--{name}={value}" for name, value in settings.items()])
    return json.loads((folder / "run" / "summary.json").read_text()) if text.stem == "0" else {}


def evaluated_before(folder: Path) -> dict[str, Any]:
    made, log = trainer(folder, max_steps=20)
    made.evaluate()
    made.train()
    return {**log.seen, "wrapper": type(made.model_wrapped).__name__}


def callback_evaluated_before(folder: Path) -> dict[str, Any]:
    """The stock Trainer with our callback: evaluate() and predict(), then train()."""
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=0.1, optim="sgd", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    found = {}
    for name in ("evaluated", "plain", "refused"):
        callback, data = MixedPrecisionCallback(), {"train_dataset": rows(), "eval_dataset": rows(8)}
        made = Trainer(tiny_gpt2(), args, callbacks=[callback], **data)
        if name == "evaluated":
            made.evaluate()
            made.predict(rows(8))
        try:
            if name == "refused":
                made.evaluation_loop(made.get_eval_dataloader(), "evaluation")
            made.train()
            found[name] = weights(made.model)
        except ValueError as error:
            found[name] = str(error)
        finally:
            callback.detach()
    return found


def mixed_layouts(folder: Path) -> dict[str, str]:
    layout = ("fp16", "fp16-lean")[dist.get_rank()]
    return said_of({"mixed layouts": lambda: trainer(folder, precision=layout)[0].train()})


def fsdp_compiled(folder: Path) -> dict[str, Any]:
    """``torch_compile=True``, with which accelerate compiles each block where the environment asks for that."""
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 4, "overflow_at": 2}
    try:
        found = run(folder, **settings, **fsdp())
        found["compiled_frames"] = counters["frames"]["ok"]
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
            del os.environ[name]
    return found


def fsdp_lean(folder: Path) -> dict[str, Any]:
    """Twenty steps; the model that is saved in between, in FP32."""
    saving = {"max_steps": 20, "save_steps": 20, "save_strategy": "steps", "save_only_model": True}
    log = run(folder, **LEAN, **saving, **FULL)
    return {**log, "saved": load_file(folder / "checkpoint-20" / "model.safetensors")}


def other_layout(folder: Path) -> dict[str, Any]:
    """A checkpoint of a lean layout goes on in the default one, and one of the default layout in a lean one."""
    settings = {"optim_args": "momentum=0.5", "lr_scheduler_type": "linear", **SHARDED}
    others: dict[str, dict[str, Any]] = {"fsdp_lean_resume": {}, "fsdp_resume_sharded": LEAN}
    checkpoints = {saved: str(folder.parent / saved / "checkpoint-4") for saved in others}
    return {saved: run(folder / saved, checkpoints[saved], **settings, **other) for saved, other in others.items()}


def fsdp_saved_model(folder: Path) -> dict[str, Any]:
    made, _ = trainer(folder, **fsdp())
    made.train()
    made.save_model(str(folder / "model"))
    dist.barrier()
    return {"trained": weights(made.model), "loaded": weights(GPT2LMHeadModel.from_pretrained(folder / "model"))}


ONE_PROCESS = ["twenty_steps", "accumulation", "resume_from_two", "recipe", "eight_bits_fp16", "eight_bits_fp16-lean"]
# FSDP comes last: accelerate leaves its settings in the environment.
TWO_PROCESSES = [
    *(name for name, settings in (RUNS | RESUMED).items() if "fsdp" not in settings),
    *("mixed_layouts", "evaluated_before", "callback_evaluated_before", "recipe"),
    *(name for name, settings in (RUNS | RESUMED).items() if "fsdp" in settings),
    *("fsdp_saved_model", "fsdp_lean", "other_layout"),
]


def allow_fsdp_on_cpu() -> None:
    """accelerate uses FSDP on accelerators only, and DDP on CPUs without a word; let it use its FSDP2 here too."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = plugin

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


def case(name: str) -> dict[str, Any]:
    folder = Path(sys.argv[1], name)
    if name in RESUMED:
        return resumed(folder, **RESUMED[name])
    found: dict[str, Any] = run(folder, **RUNS[name]) if name in RUNS else globals()[name](folder)
    return found


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    names = sys.argv[2:] or (TWO_PROCESSES if PROCESSES > 1 else ONE_PROCESS)
    results = {name: case(name) for name in names}
    torch.save(results, Path(sys.argv[1]) / f"rank{os.environ.get('RANK', '0')}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
