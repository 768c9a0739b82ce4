"""A real training of a tiny model, for faults to strike: python worker.py OUTPUT_DIR [SETTINGS_AS_JSON].

Settings: arguments of the Trainer, and ``resume`` (true, or a path), ``trainer`` (``"ours"``, ``"callback"`` or
``"stock"``), ``step_seconds`` (a pause after each step), ``events`` (print a line at each step and save). At its end it
prints the SHA-256 of its weights, optimizer, random numbers and loss scale.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback
from transformers.utils import logging

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer
from hf_mp.trainer_support import unwrap_optimizer

logging.set_verbosity_warning()

DEFAULTS: dict[str, Any] = {
    "max_steps": 12,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}
SIZES = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 101, "n_positions": 24}  # about 90 kB a checkpoint


class Events(TrainerCallback):
    """Tells the harness where the run is, and makes its steps as long as the harness wants."""

    def __init__(self, tell: bool, pause_seconds: float) -> None:
        self._tell, self._pause_seconds = tell, pause_seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._tell and args.process_index == 0:
            print(f"step {state.global_step}", flush=True)
        time.sleep(self._pause_seconds)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._tell and args.process_index == 0:
            print(f"saved {state.global_step}", flush=True)


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    # with dropout: resuming must restore the random numbers
    return GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, use_cache=False))


def rows(count: int = 64) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 101, (count, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def make(output_dir: str, kind: str, callbacks: list[TrainerCallback], **settings: Any) -> Trainer:
    args = MixedPrecisionArguments(output_dir=output_dir, **{**DEFAULTS, **settings})
    named = {"model": tiny_gpt2(), "args": args, "train_dataset": rows(), "eval_dataset": rows(4)}
    if kind == "ours":
        return MixedPrecisionTrainer(**named, callbacks=callbacks)
    ours = [MixedPrecisionCallback()] if kind == "callback" else []
    return Trainer(**named, callbacks=[*callbacks, *ours])


def fingerprint(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    for _, state in sorted(unwrap_optimizer(trainer.optimizer).state_dict()["state"].items()):
        for _, value in sorted(state.items()):
            digest.update(torch.as_tensor(value).cpu().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    runtime = getattr(trainer, "mixed_precision", None)
    if runtime is not None:
        digest.update(json.dumps(runtime.state_dict()["loss_scaler"], sort_keys=True).encode())
    return digest.hexdigest()


def main(output_dir: str, settings: str = "{}") -> None:
    given = json.loads(settings)
    resume, kind = given.pop("resume", None), given.pop("trainer", "ours")
    events = Events(given.pop("events", True), given.pop("step_seconds", 0.0))
    if resume == "if there":
        resume = any(Path(output_dir).glob("checkpoint-*")) or any(Path(output_dir).glob(".saving/*")) or None
    trainer = make(output_dir, kind, [events], **given)
    if trainer.args.process_index == 0:
        print("ready", flush=True)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.args.process_index == 0:
        print(f"finished {trainer.state.global_step} {fingerprint(trainer)}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
