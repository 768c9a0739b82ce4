"""The ways of training a step that are compared: FP32, torch's, the stock Trainer's and ours, each also compiled."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

import hf_mp
from _benchmarks import DTYPES, UpdateBytes, Workload, peak_tensor_bytes
from _step_by_step import StepByStep
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.policy import PrecisionPolicy, mixed_presets

Step = Callable[[], None]
COMPILED = " compiled"

FP32_UPDATE = UpdateBytes(gradient=4, master=4, moments=8)
MIXED_UPDATE = UpdateBytes(gradient=4, master=4, moments=8, copy=2)
LEAN_UPDATE = UpdateBytes(gradient=2, master=4, moments=8)


@dataclass(frozen=True)
class Contender:
    """One way to train a step.

    Attributes:
        dtype: the one in which matrix products are computed, by its short name.
        update: what its update has to move.
        precision: our preset; None where ours is not used.
        autocast: whose autocast is entered around the forward by hand, with torch's GradScaler for FP16.
        is_trainer: whether a Trainer trains, else a plain loop.
    """

    dtype: str
    update: UpdateBytes = MIXED_UPDATE
    precision: str | None = None
    autocast: Literal["torch", "hf_mp"] | None = None
    is_trainer: bool = False


def _ours(precision: str, is_trainer: bool) -> Contender:
    policy = PrecisionPolicy.parse(precision)
    dtype = "bf16" if policy.compute is torch.bfloat16 else "fp16"
    return Contender(dtype, LEAN_UPDATE if policy.is_lean else MIXED_UPDATE, precision, is_trainer=is_trainer)


CONTENDERS: dict[str, Contender] = {
    "fp32": Contender("fp32", FP32_UPDATE),
    **{f"torch.autocast {dtype}": Contender(dtype, autocast="torch") for dtype in ("fp16", "bf16")},
    # the mode alone: everything else is torch's
    **{f"hf_mp.autocast {dtype}": Contender(dtype, autocast="hf_mp") for dtype in ("fp16", "bf16")},
    **{f"hf_mp {preset}": _ours(preset, False) for preset in mixed_presets()},
    "Trainer fp32": Contender("fp32", FP32_UPDATE, is_trainer=True),
    **{f"Trainer {dtype}=True": Contender(dtype, is_trainer=True) for dtype in ("fp16", "bf16")},
    **{f"MixedPrecisionTrainer {preset}": _ours(preset, True) for preset in mixed_presets()},
}


def find_contender(name: str) -> tuple[Contender, bool]:
    """The entry of :data:`CONTENDERS`, and whether to compile it.

    Raises:
        ValueError: naming those that there are.
    """
    base = name.removesuffix(COMPILED)
    if base not in CONTENDERS:
        raise ValueError(
            f"contender {name!r} is not known: use some of {', '.join(CONTENDERS)}, "
            f"each also with {COMPILED!r} at its end"
        )
    return CONTENDERS[base], name != base


def why_not_here(name: str, device: str) -> str | None:
    """Why a contender cannot run, or not in reasonable time, on this machine; None where it can."""
    contender, compiled = find_contender(name)
    native = runs_natively(DTYPES[contender.dtype], device)
    if name.removesuffix(COMPILED) == "Trainer fp16=True" and device == "cpu":
        return "on a CPU, fp16=True trains in FP32"
    if compiled and (reason := why_not_compiled(device)) is not None:
        return reason
    if contender.dtype == "fp16" and contender.autocast == "torch" and not native:
        return "takes about 50 times FP32's time on a CPU without FP16 arithmetic: only when asked for"
    return None


def why_not_compiled(device: str) -> str | None:
    """Why ``torch.compile`` cannot be used on a device of this type; None where it can."""
    if device == "cpu" and not has_cpp_compiler():
        return "torch.compile needs a C++ compiler on a CPU, and there is none"
    return None


def has_cpp_compiler() -> bool:
    """Whether there is a compiler for the code that ``torch.compile`` writes for a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))


@contextlib.contextmanager
def training(name: str, workload: Workload) -> Iterator[Step]:
    """A function that trains one update of a fresh model the way ``name`` says, as long as this context lasts."""
    contender, compiled = find_contender(name)
    if not contender.is_trainer:
        yield loop_step(contender, workload, compiled)
        return
    with _trainer(contender, workload, compiled, max_steps=10**6) as trainer:
        steps = StepByStep(trainer)
        try:
            yield steps.step
        finally:
            steps.close()


def peak_bytes(name: str, workload: Workload, updates: int) -> int:
    """Peak of the tensors of a training of ``updates``, model and optimizer state included."""
    contender, compiled = find_contender(name)

    def train_loop() -> None:
        step = loop_step(contender, workload, compiled)
        for _ in range(updates):
            step()

    device = torch.device(workload.device)
    if not contender.is_trainer:
        return peak_tensor_bytes(train_loop, device)

    # Not step by step: torch's profiler counts the tensors of its own thread.
    def train_trainer() -> None:
        with _trainer(contender, workload, compiled, max_steps=updates) as trainer:
            trainer.train()

    return peak_tensor_bytes(train_trainer, device)


def loop_step(contender: Contender, workload: Workload, compiled: bool) -> Step:
    """One update in a plain loop: forward, backward, clipping, AdamW."""
    device = workload.device
    model: nn.Module = workload.model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if contender.precision is not None:
        model, optimizer = hf_mp.prepare(model, optimizer, contender.precision)
    if compiled:
        allow_recompilations()
    forward = torch.compile(model) if compiled else model
    ids = workload.token_ids().to(device)
    needs_scaler = contender.autocast is not None and contender.dtype == "fp16"
    scaler = torch.amp.GradScaler(device, enabled=needs_scaler, init_scale=2.0**10)

    def context() -> Any:
        if contender.autocast is None:
            return contextlib.nullcontext()
        if contender.autocast == "torch":
            return torch.autocast(device, DTYPES[contender.dtype])
        return hf_mp.autocast(DTYPES[contender.dtype])

    def step() -> None:
        for _ in range(workload.accumulation):
            with context():
                loss = forward(input_ids=ids, labels=ids).loss
            scaler.scale(loss / workload.accumulation).backward()
        scaler.unscale_(optimizer)
        if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if needs_scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def _trainer(contender: Contender, workload: Workload, compiled: bool, max_steps: int) -> Iterator[Trainer]:
    if compiled:
        allow_recompilations()
    with tempfile.TemporaryDirectory() as directory:
        on_cpu = workload.device == "cpu"
        stock = contender.precision is None
        args = TrainingArguments(
            output_dir=directory, per_device_train_batch_size=workload.batch, max_steps=max_steps,
            gradient_accumulation_steps=workload.accumulation, learning_rate=1e-4, optim="adamw_torch_fused",
            fp16=stock and contender.dtype == "fp16", bf16=stock and contender.dtype == "bf16", use_cpu=on_cpu,
            dataloader_pin_memory=not on_cpu, torch_compile=compiled, save_strategy="no", logging_steps=10**6,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in workload.token_ids(batch=4 * workload.batch)]
        model = workload.model()
        if stock:
            trainer: Trainer = Trainer(model, args, train_dataset=rows)
        else:
            trainer = hf_mp.MixedPrecisionTrainer(model, args, precision=contender.precision, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        yield trainer


def allow_recompilations() -> None:
    """Each contender compiles the same functions anew, and beyond a limit torch leaves them uncompiled."""
    torch._dynamo.config.recompile_limit = 64


def choose(names: Sequence[str], device: str, *, compiled: bool) -> tuple[list[str], dict[str, str]]:
    """Which of the contenders run here, with their compiled twins where asked for; and why the others do not.

    Raises:
        ValueError: for a name that is not known, and where none is left.
    """
    wanted = list(names)
    if compiled:
        wanted += [name + COMPILED for name in names if not name.endswith(COMPILED)]
    reasons = {name: why_not_here(name, device) for name in dict.fromkeys(wanted)}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    chosen = [name for name, reason in reasons.items() if reason is None]
    if not chosen:
        raise ValueError(f"no contender can run on this {device}: {left_out}")
    return chosen, left_out
