"""A real training of a tiny model, for faults to strike; the harness starts it in processes of its own.

Settings: arguments of the Trainer, and ``resume`` (from ``"newest"``, which is True, or from what Transformers'
``get_last_checkpoint`` gives ``"before"`` the Trainer is made or ``"after"``; anew where there is none yet),
``trainer`` (``"ours"``, ``"callback"`` or ``"stock"``), ``step_seconds`` (a pause after each step), ``kill_at`` (the
operation on the output directory at which the process kills itself), ``full_disks`` (each save has a disk that is
full one operation later than before; in which process, with which error) and ``vanishes`` (the steps in which the
output directory is gone). It prints a line at each step, and at its end the SHA-256 of its weights, optimizer
and loss scale. With ``task``, the ``main`` of the module of that name beside this one runs instead.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer, NoCheckpointError
from hf_mp.trainer.checkpoints.inspection import find_problems, list_checkpoints

gc.collect()
gc.freeze()  # accelerate collects garbage at each start, which would look at all of torch and Transformers
logging.set_verbosity_warning()
logging.disable_progress_bar()

KILL, FULL = 2, 3  # as in disk_faults.c
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

    def __init__(self, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _tell("begins", args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _tell("step", args, state)
        time.sleep(self._pause_seconds)


def _tell(what: str, args: Any, state: Any) -> None:
    if args.process_index == 0:
        print(f"{what} {state.global_step}", flush=True)


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    # with dropout: resuming must restore the random numbers
    return GPT2LMHeadModel(GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0, use_cache=False))


def rows(count: int = 64) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 101, (count, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def make(
    output_dir: str, kind: str, callbacks: list[TrainerCallback], base: type[Trainer] = Trainer, **settings: Any
) -> Trainer:
    args = MixedPrecisionArguments(output_dir=output_dir, **{**DEFAULTS, **settings})
    named = {"model": tiny_gpt2(), "args": args, "train_dataset": rows(), "eval_dataset": rows(4)}
    if kind == "ours":
        ours = MixedPrecisionTrainer if base is Trainer else type("Ours", (MixedPrecisionTrainer, base), {})
        return ours(**named, callbacks=callbacks)
    own = [MixedPrecisionCallback()] if kind == "callback" else []
    return base(**named, callbacks=[*callbacks, *own])


def fingerprint(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    for _, state in sorted(trainer.optimizer.state_dict()["state"].items()):
        for _, value in sorted(state.items()):
            digest.update(torch.as_tensor(value).cpu().numpy().tobytes())
    runtime = getattr(trainer, "mixed_precision", None)
    if runtime is not None:
        digest.update(json.dumps(runtime.state_dict()["loss_scaler"], sort_keys=True).encode())
    return digest.hexdigest()


class FullDisks(TrainerCallback):
    """Fills the disk at the first operation of the second save, at the second of the third, ...: to the last one.

    After each save it prints the operation, whether the save came to it, whether its checkpoint is there, which
    checkpoints are whole and what is wrong with the others.
    """

    def __init__(self, directory: str, process: int, error: str) -> None:
        self._directory, self._process, self._error = directory, process, getattr(errno, error)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1 and args.process_index == self._process:
            arm(self._directory, FULL, state.global_step - 1, self._error)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        operation, operations = state.global_step - 1, _largest(disarm())
        if args.process_index == 0:
            checkpoints = {path.name: find_problems(path) for path in list_checkpoints(Path(self._directory))}
            whole = [name for name, problems in checkpoints.items() if not problems]
            broken = {name: problems for name, problems in checkpoints.items() if problems}
            there = f"checkpoint-{state.global_step}" in checkpoints
            print("full " + json.dumps([operation, operation <= operations, there, whole, broken]), flush=True)
        control.should_training_stop = operation > operations > 0


class Vanishes(TrainerCallback):
    """Has a file in the place of the output directory for some steps: nothing can be written, listed or made there."""

    def __init__(self, directory: str, first: int, last: int) -> None:
        self._directory, self._first, self._last = Path(directory), first, last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        away = self._directory.with_name(self._directory.name + "-away")
        if state.global_step == self._first:
            self._directory.rename(away)
            self._directory.touch()
        if state.global_step == self._last:
            self._directory.unlink()
            away.rename(self._directory)


def _largest(number: int) -> int:
    if torch.distributed.is_initialized():
        found = torch.tensor([number])
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return int(found.item())
    return number


def arm(directory: str, mode: int, at: int, error: int = errno.ENOSPC) -> None:
    library = ctypes.CDLL(None)
    library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
    library.fault_arm(os.path.realpath(directory).encode(), mode, at, error)


def disarm() -> int:
    library = ctypes.CDLL(None)
    library.fault_disarm.restype = ctypes.c_long
    return int(library.fault_disarm())


def resume(trainer: Trainer, asks: str, before: str | None) -> None:
    if asks != "newest":
        last = before if asks == "before" else get_last_checkpoint(trainer.args.output_dir)
        trainer.train(resume_from_checkpoint=last)
        return
    try:
        trainer.train(resume_from_checkpoint=True)
    except NoCheckpointError:  # killed before the first save
        trainer.train()


def main(output_dir: str, settings: dict[str, Any]) -> None:
    given = dict(settings)
    if task := given.pop("task", None):
        importlib.import_module(task).main(output_dir, given)
        return
    asks, kind = given.pop("resume", None), given.pop("trainer", "ours")
    kill_at, full_disks = given.pop("kill_at", None), given.pop("full_disks", None)
    callbacks: list[TrainerCallback] = [Events(given.pop("step_seconds", 0.0))]
    if vanishes := given.pop("vanishes", None):
        callbacks.append(Vanishes(output_dir, *vanishes))
    if full_disks:
        callbacks.append(FullDisks(output_dir, *full_disks))
    before = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
    trainer = make(output_dir, kind, callbacks, **given)
    if kill_at is not None:
        arm(output_dir, KILL, kill_at)
    resume(trainer, asks, before) if asks else trainer.train()
    if kill_at is not None:
        print(f"operations {disarm()}", flush=True)
    if trainer.args.process_index == 0:
        print(f"finished {trainer.state.global_step} {fingerprint(trainer)}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start(log: str, variables: dict[str, str], output_dir: str, settings: dict[str, Any]) -> None:
    """Where a process of the harness begins: its output goes to the end of the file ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(variables)
    main(output_dir, settings)
