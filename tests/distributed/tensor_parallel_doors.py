"""Cases of tensor_parallel_worker.py: the Trainer, the callback and accelerate, with a tensor parallel model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from loop_worker import batches, said_of, weights
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_mp

STEPS = 5


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {"loss": [], "norm": []}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found["loss"].append(float(logs["loss"]))
            self.found["norm"].append(float(logs["grad_norm"]))


@contextlib.contextmanager
def meshes_on_cpus() -> Iterator[None]:
    """accelerate takes a ``ParallelismConfig`` on accelerators only; let it take one here too."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if kwargs.get("parallelism_config") is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with mock.patch.object(AcceleratorState, "__init__", init):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in batches(count, 4).flatten(0, 1)]


def _trainer(folder: str, model: nn.Module, precision: str = "fp16", *, callback: bool = False, **settings: Any) -> Any:
    settings = {
        "output_dir": str(Path(folder, "doors")), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "logging_steps": 1, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "save_strategy": "no",
        "optim": "adamw_torch", "report_to": [], "disable_tqdm": True, "use_cpu": True, **settings,
    }  # fmt: skip
    log = Losses()
    if callback:
        callbacks = [hf_mp.MixedPrecisionCallback(precision), log]
        return Trainer(model, TrainingArguments(**settings), train_dataset=_rows(STEPS), callbacks=callbacks), log
    args = hf_mp.MixedPrecisionArguments(precision=precision, **settings)
    return hf_mp.MixedPrecisionTrainer(model, args, train_dataset=_rows(STEPS), callbacks=[log]), log


def trainer(folder: str, load: Callable[..., nn.Module]) -> dict[str, Any]:
    """The Trainer, with its default optimizer and the model saved in between; what is saved must be whole."""
    checkpoints = {"save_strategy": "steps", "save_steps": STEPS, "save_only_model": True}
    made, log = _trainer(folder, load(folder), optim="adamw_torch_fused", **checkpoints)
    made.train()
    return {**log.found, "trained": weights(made.model)}


def callback(folder: str, load: Callable[..., nn.Module]) -> dict[str, Any]:
    made, log = _trainer(folder, load(folder), callback=True)
    made.train()
    return log.found


def accelerate(folder: str, load: Callable[..., nn.Module]) -> dict[str, Any]:
    """A loop of accelerate's, with its ``ParallelismConfig`` where there are several processes."""
    mesh = {"parallelism_config": ParallelismConfig(tp_size=dist.get_world_size())} if dist.is_initialized() else {}
    accelerator = Accelerator(cpu=True, **mesh)
    model: Any = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = hf_mp.prepare(model, optimizer, "fp16")
    loader = DataLoader(_rows(STEPS), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found: dict[str, Any] = {"loss": [], "norm": []}
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        found["norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(loss.item())
    return found


CASES = [trainer, callback, accelerate]


def refused(folder: str, load: Callable[..., nn.Module]) -> dict[str, Any]:
    def fused() -> None:
        model = load(folder)
        hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), "fp16")

    cases: dict[str, Callable[[], Any]] = {
        "lean": lambda: _trainer(folder, load(folder), "fp16-lean")[0].train(),
        "lean_callback": lambda: _trainer(folder, load(folder), "fp16-lean", callback=True)[0].train(),
        "fused": fused,
    }
    return said_of(cases, context=meshes_on_cpus)


def run(folder: str, load: Callable[..., nn.Module]) -> dict[str, Any]:
    """What each case returned."""
    found: dict[str, Any] = {}
    for case in CASES:
        with meshes_on_cpus():
            found[case.__name__] = case(folder, load)
    return found
