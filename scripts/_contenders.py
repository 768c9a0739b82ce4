"""The ways of training a step that are compared: FP32, torch's, the stock Trainer's and ours, each also compiled."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import hf_mp
from _benchmarks import DTYPES, Workload, peak_tensor_bytes, update_bytes
from _results import wait_for_gpu
from hf_mp.casting.cpu.upcast import runs_natively
from hf_mp.policy import mixed_presets

Step = Callable[[], None]
Parts = list[tuple[float, ...]]
PARTS = ("forward", "backward", "clipping", "update")
COMPILED = " compiled"
BARE, LOSS_SCALED, BATCHED = "bare function mode", "loss scaled", "batched_mm"

FP32_UPDATE = update_bytes(gradient=4, master=4, moments=8)
MIXED_UPDATE = update_bytes(gradient=4, master=4, moments=8, copy=2)
LEAN_UPDATE = update_bytes(gradient=2, master=4, moments=8)

CONTENDERS = (
    "fp32",
    *(f"torch.autocast {dtype}" for dtype in ("fp16", "bf16")),
    *(f"hf_mp.autocast {dtype}" for dtype in ("fp16", "bf16")),  # the mode alone: everything else is torch's
    *(f"hf_mp {preset}" for preset in mixed_presets()),
    "Trainer fp32",
    *(f"Trainer {dtype}=True" for dtype in ("fp16", "bf16")),
    *(f"MixedPrecisionTrainer {preset}" for preset in mixed_presets()),
    *(f"MixedPrecisionCallback {preset}" for preset in mixed_presets() if not preset.endswith("-lean")),
)


class BareMode(TorchFunctionMode):
    """Sees every torch call and does nothing: with torch's own casts, the floor of an autocast that is a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Contender(NamedTuple):
    """One way to train a step, read from its name.

    Attributes:
        kind: ``""`` (plain FP32), ``"torch.autocast"``, ``"hf_mp.autocast"``, ``"hf_mp"``, ``"whole"`` (a model that is
            in that dtype throughout, its optimizer's state included), ``"Trainer"``, ``"MixedPrecisionTrainer"`` or
            ``"MixedPrecisionCallback"`` (of a stock Trainer).
        precision: a preset, or the short name of a dtype.
        extras: what follows after commas: ``"GradScaler"`` (FP16 under torch's autocast has one without a word),
            ``"bare function mode"``, ``"loss scaled"``, ``"batched_mm"`` (of experts).
        is_compiled: whether the name ends in ``" compiled"``.
    """

    kind: str
    precision: str
    extras: tuple[str, ...]
    is_compiled: bool

    @classmethod
    def of(cls, name: str) -> Contender:
        """That of a name, such as ``"hf_mp fp16-lean compiled"`` or ``"torch.autocast bf16, GradScaler"``."""
        first, *extras = name.removesuffix(COMPILED).split(", ")
        kind, _, precision = first.rpartition(" ")
        return cls(kind, precision.removesuffix("=True"), tuple(extras), name.endswith(COMPILED))

    @property
    def dtype(self) -> str:
        """The one in which matrix products are computed, by its short name."""
        return self.precision.partition("-")[0]

    @property
    def is_trainer(self) -> bool:
        """Whether a Trainer trains, else a plain loop."""
        return self.kind.endswith(("Trainer", "Callback"))

    @property
    def update(self) -> int:
        """Bytes a parameter that its update has to move."""
        if self.dtype == "fp32":
            return FP32_UPDATE
        return LEAN_UPDATE if self.precision.endswith("-lean") else MIXED_UPDATE

    @property
    def needs_scaler(self) -> bool:
        """Whether torch's GradScaler scales its loss."""
        return "GradScaler" in self.extras or (self.kind.endswith("cast") and self.dtype == "fp16")

    @property
    def policy(self) -> str:
        """The precision that ``hf_mp`` is given."""
        scaled = f"params=fp32,compute={self.precision},loss_scale=headroom"
        return scaled if LOSS_SCALED in self.extras else self.precision

    def casts(self, device: str) -> Any:
        """What a loop enters around each forward."""
        if self.kind not in ("torch.autocast", "hf_mp.autocast"):
            return contextlib.nullcontext()
        dtype = DTYPES[self.dtype]
        return torch.autocast(device, dtype) if self.kind == "torch.autocast" else hf_mp.autocast(dtype)

    def mode(self) -> Any:
        """What a loop enters besides, to be a floor."""
        return BareMode() if BARE in self.extras else contextlib.nullcontext()

    def convert(self, model: Any, inputs: Mapping[str, Tensor]) -> tuple[Any, Mapping[str, Tensor]]:
        """The model as this way has it, and its inputs."""
        if BATCHED in self.extras:
            model.set_experts_implementation(BATCHED)
        if self.kind != "whole":
            return model, inputs
        dtype = DTYPES[self.dtype]
        cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        return model.to(dtype), cast


def choose(names: Sequence[str], device: str) -> tuple[list[str], dict[str, str]]:
    """Which of the contenders run here, and why the others do not, or not in reasonable time.

    Raises:
        ValueError: for a name that is neither one of :data:`CONTENDERS` nor its compiled twin.
    """
    if unknown := [name for name in names if name.removesuffix(COMPILED) not in CONTENDERS]:
        raise ValueError(
            f"contenders {', '.join(unknown)} are not known: use some of {', '.join(CONTENDERS)}, "
            f"each also with {COMPILED!r} at its end"
        )
    left_out: dict[str, str] = {}
    if device == "cpu":
        left_out |= {name: "on a CPU, fp16=True trains in FP32" for name in names if name.startswith("Trainer fp16")}
    if not runs_natively(torch.float16, device):
        reason = "takes about 50 times FP32's time on a CPU without FP16 arithmetic"
        left_out |= {name: reason for name in names if name.startswith("torch.autocast fp16")}
    return [name for name in names if name not in left_out], left_out


def make_step(
    name: str,
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    accumulation: int = 1,
    parts: Parts | None = None,
    backend: str = "inductor",
    clips_masters: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    **settings: Any,
) -> Step:
    """One update of ``model`` in a plain loop: forward, backward, clipping, fused AdamW.

    Args:
        name: of the contender.
        model: fresh, on its device.
        inputs: of one forward, on that device.
        accumulation: forwards in one update.
        parts: gets the seconds of the :data:`PARTS` of each step, where the device does not run behind the host.
        backend: of a compiled contender.
        clips_masters: call the optimizer's own clipping where it has FP32 masters, as the Trainer does.
        clock: tells the seconds of the parts.
        settings: those of :func:`hf_mp.prepare`.
    """
    contender = Contender.of(name)
    device = next(model.parameters()).device.type
    model, inputs = contender.convert(model, inputs)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if contender.kind == "hf_mp":
        model, optimizer = hf_mp.prepare(model, optimizer, contender.policy, **settings)
    forward = torch.compile(model, backend=backend) if contender.is_compiled else model
    scaler = torch.amp.GradScaler(device, enabled=contender.needs_scaler, init_scale=2.0**10)
    casts, around = contender.casts(device), contender.mode()
    clips_masters = clips_masters and isinstance(optimizer, hf_mp.MasterWeightOptimizer)

    def step() -> None:
        moments = [clock()]
        for _ in range(accumulation):
            with casts, around:
                loss = forward(**inputs).loss
            moments.append(clock())
            scaler.scale(loss if accumulation == 1 else loss / accumulation).backward()
            moments.append(clock())
        scaler.unscale_(optimizer)
        if clips_masters:
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        moments.append(clock())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moments.append(clock())
        if parts is not None:
            parts.append(tuple(end - begin for begin, end in itertools.pairwise(moments)))

    return step


def loop_step(name: str, workload: Workload) -> Step:
    """One update of a fresh GPT-2."""
    if name.endswith(COMPILED):
        allow_recompilations()
    ids = workload.token_ids().to(workload.device)
    inputs = {"input_ids": ids, "labels": ids}
    return make_step(name, workload.model(), inputs, accumulation=workload.accumulation, clips_masters=True)


def allow_recompilations() -> None:
    """Each contender compiles the same functions anew, and beyond a limit torch leaves them uncompiled."""
    torch._dynamo.config.recompile_limit = 64


def peak_bytes(name: str, workload: Workload, updates: int) -> int:
    """Peak of the tensors of a training of ``updates``, model and optimizer state included."""

    def train() -> None:
        if Contender.of(name).is_trainer:
            with make_trainer(name, workload, updates) as trainer:
                trainer.train()
            return
        step = loop_step(name, workload)
        for _ in range(updates):
            step()

    return peak_tensor_bytes(train, torch.device(workload.device))


@contextlib.contextmanager
def make_trainer(name: str, workload: Workload, max_steps: int) -> Iterator[Trainer]:
    """A Trainer with a fresh GPT-2; what it writes is deleted at the end."""
    contender, on_cpu = Contender.of(name), workload.device == "cpu"
    stock = contender.kind == "Trainer"
    if contender.is_compiled:
        allow_recompilations()
    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            output_dir=directory, per_device_train_batch_size=workload.batch, max_steps=max_steps,
            gradient_accumulation_steps=workload.accumulation, learning_rate=1e-4, optim="adamw_torch_fused",
            fp16=stock and contender.precision == "fp16", bf16=stock and contender.precision == "bf16", use_cpu=on_cpu,
            dataloader_pin_memory=not on_cpu, torch_compile=contender.is_compiled, save_strategy="no",
            logging_steps=10**6, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in workload.token_ids(batch=4 * workload.batch)]
        cls: Any = hf_mp.MixedPrecisionTrainer if contender.kind == "MixedPrecisionTrainer" else Trainer
        of_ours: dict[str, Any] = {} if stock else {"precision": contender.precision}
        if contender.kind == "MixedPrecisionCallback":
            of_ours = {"callbacks": [hf_mp.MixedPrecisionCallback(**of_ours)]}
        trainer: Trainer = cls(workload.model(), args, train_dataset=rows, **of_ours)
        trainer.remove_callback(PrinterCallback)
        yield trainer


class StepClock(TrainerCallback):
    """Notes when each step of a Trainer begins: when the one before has ended, logging and callbacks included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.moments: list[float] = []

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        wait_for_gpu()
        self.moments.append(self.clock())


def trainers_in_turns(
    trainers: Mapping[str, Callable[[int], contextlib.AbstractContextManager[Trainer]]],
    *,
    rounds: int,
    warmup: int,
    trainings: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, list[float]]]:
    """Seconds of ``rounds`` steps of each Trainer, which is made for its number of steps.

    Each trains so many times, and takes its share of the steps each time: all of them in turns, and every second time
    in reverse order. The first ``warmup`` steps of a training do not count. ``clock`` tells the seconds. Yields what
    there is after each training.
    """
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(trainings):
        for name in list(trainers)[:: -1 if turn % 2 else 1]:
            steps = StepClock(clock)
            with trainers[name](warmup + max(1, rounds // trainings) + 1) as trainer:
                trainer.add_callback(steps)
                trainer.train()
            seconds[name] += [end - begin for begin, end in itertools.pairwise(steps.moments[warmup:])]
            yield {name: found for name, found in seconds.items() if found}
