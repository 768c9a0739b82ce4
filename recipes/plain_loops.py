"""The loops of the mixed precision tutorials, with torch.amp and with hf_mp: do the results agree?

    python recipes/plain_loops.py                                   # all of them; minutes on a CPU
    python recipes/plain_loops.py --scale small                     # the last one small: seconds
    python recipes/plain_loops.py --loops scaling clipping          # only these

Read it from top to bottom: each loop is what one would write. Those of torch.amp take autocast and the scaler as
arguments, so that torch's objects and ours go through the same lines; ``prepared`` next to them is the same training
without a scaler in sight. The program ends with exit code 1 if results do not agree.

All train on the handwritten digits that scikit-learn brings along. torch multiplies FP16 about 200 times slower than
FP32 on a CPU without FP16 arithmetic, so what runs against torch.amp is a network of 64-32-10; hf_mp trains the last
one, of 784-8192-10, in FP16 on such a CPU too.

The loops are those of PyTorch's "Automatic Mixed Precision examples" and of the documentation of ``torch.autocast``;
the hand-written master weights are those of Micikevicius et al. 2017 (section 3.1).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import hf_mp
from _agreement import Agreement, agreement_table, close, same
from _options import parse_options
from _tensor_memory import peak_tensor_bytes

# The spacing of FP16 numbers is at most this part of them: a sum in another order may be rounded to the next one.
ONE_ROUNDING = 2.0**-10
STEPS = 40
BATCH = 64
CLIP_NORM = 0.5
ACCUMULATION = 4
STATIC_SCALE = 128.0


@dataclass(frozen=True)
class Run:
    """What a loop came to: after each step, and at its end."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # loss scales, as the step used them
    norms: list[float] = field(default_factory=list)  # of the unscaled gradients, before clipping
    rates: list[float] = field(default_factory=list)  # learning rates
    weights: list[Tensor] = field(default_factory=list)

    def finish(self, model: nn.Module) -> Run:
        """Keep the trained weights, as FP32."""
        self.weights.extend(parameter.detach().float().clone() for parameter in model.parameters())
        return self


# The model and the data of all loops but the last


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)


def digits(size: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``count`` handwritten digits, drawn with repetition from the 1,797 there are.

    Returns:
        FP32 images in 0 to 1, of shape (count, size * size), from 8 x 8 upscaled bilinearly; int64 labels, (count,).
    """
    data = load_digits()
    chosen = torch.randint(len(data.target), (count,), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(data.images).float()[chosen, None] / 16
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images.flatten(1).to(device), torch.from_numpy(data.target)[chosen].to(device)


def batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = digits(8, STEPS * BATCH, device)
    return zip(images.split(BATCH), labels.split(BATCH), strict=True)


# Autocast: which dtypes go in and come out


def products(autocast: AbstractContextManager[Any], a: Tensor, b: Tensor) -> dict[str, Tensor]:
    with autocast:
        e = torch.mm(a, b)
        f = torch.mm(a, e)
        loss = F.mse_loss(e, f)
    return {"mm(f32, f32)": e, "mm(f32, f16)": f, "loss": loss, "mm(f32, f16.float()) after it": torch.mm(a, f.float())}


def compare_autocast(device: torch.device) -> Iterator[Agreement]:
    torch.manual_seed(0)
    a, b = torch.randn(2, 8, 8, device=device)
    theirs = products(torch.autocast(device.type, torch.float16), a, b)
    ours = products(hf_mp.autocast(torch.float16), a, b)
    for name, peer in theirs.items():
        yield same("autocast", f"dtype of {name}", peer.dtype, ours[name].dtype)
        yield close("autocast", f"value of {name}", peer, ours[name], ONE_ROUNDING)
    half = "mm(f32, f16)"
    yield same("autocast", "f16 after it, without .float()", refusal(a, theirs[half]), refusal(a, ours[half]))


def refusal(a: Tensor, b: Tensor) -> str:
    try:
        torch.mm(a, b)
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


# Loss scaling: scale, step, update; with clipping unscale_ comes first, then clip as usual


def explicit(
    autocast: AbstractContextManager[Any], scaler: Any, device: torch.device, clip_norm: float | None = None
) -> Run:
    model = small_model(device)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run()
    for images, labels in batches(device):
        optimizer.zero_grad()
        with autocast:
            loss = F.cross_entropy(model(images), labels)
        run.losses.append(loss.item())
        run.scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        scaler.step(optimizer)
        scaler.update()
    return run.finish(model)


def prepared(model: nn.Module, precision: str, device: torch.device, clip_norm: float | None = None) -> Run:
    model, optimizer = hf_mp.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9), precision=precision)
    run = Run()
    for images, labels in batches(device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        run.losses.append(loss.item())
        loss.backward()
        if clip_norm is not None:
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        optimizer.step()
    return run.finish(model)


def compare_scaling(device: torch.device) -> Iterator[Agreement]:
    # So high a start, and so short an interval, that steps do overflow: both must skip the same ones.
    settings = {"init_scale": 2.0**24, "growth_interval": 8}
    theirs = explicit(
        torch.autocast(device.type, torch.float16), torch.amp.GradScaler(device.type, **cast(Any, settings)), device
    )
    ours = explicit(hf_mp.autocast(torch.float16), hf_mp.DynamicLossScaler(**cast(Any, settings)), device)
    yield same("scaling", "loss scales (steps)", history(theirs.scales), history(ours.scales))
    yield from compare_training("scaling", theirs, ours)


def history(scales: Sequence[float]) -> str:
    """Each scale, and for how many steps it was used."""
    return ", ".join(f"2^{math.log2(scale):g} ({len(list(steps))})" for scale, steps in groupby(scales))


def compare_training(loop: str, theirs: Run, ours: Run, allowed: float = ONE_ROUNDING) -> Iterator[Agreement]:
    yield close(loop, "losses", theirs.losses, ours.losses, allowed)
    if theirs.norms:
        yield close(loop, "gradient norms", theirs.norms, ours.norms, allowed)
    if theirs.rates:
        yield close(loop, "learning rates", theirs.rates, ours.rates, 0.0)
    flat_theirs, flat_ours = (torch.cat([weight.flatten() for weight in run.weights]) for run in (theirs, ours))
    yield close(loop, "weights", flat_theirs, flat_ours, allowed)


# Clipping


def compare_clipping(device: torch.device) -> Iterator[Agreement]:
    theirs = explicit(torch.autocast(device.type, torch.float16), torch.amp.GradScaler(device.type), device, CLIP_NORM)
    ours = explicit(hf_mp.autocast(torch.float16), hf_mp.DynamicLossScaler(), device, CLIP_NORM)
    yield from compare_training("clipping", theirs, ours)
    yield from compare_training("clipping, prepared", theirs, prepared(small_model(device), "fp16", device, CLIP_NORM))


# Gradient accumulation and LR scheduler in one loop


def accumulation(autocast: AbstractContextManager[Any], scaler: Any, device: torch.device) -> Run:
    model = small_model(device)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, STEPS // ACCUMULATION)
    run = Run()
    for number, (images, labels) in enumerate(batches(device), start=1):
        with autocast:
            loss = F.cross_entropy(model(images), labels) / ACCUMULATION
        run.losses.append(loss.item() * ACCUMULATION)
        scaler.scale(loss).backward()
        if number % ACCUMULATION == 0:
            run.rates.append(optimizer.param_groups[0]["lr"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
    return run.finish(model)


def prepared_accumulation(device: torch.device) -> Run:
    model = small_model(device)
    model, optimizer = hf_mp.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9), precision="fp16")
    schedule = CosineAnnealingLR(optimizer, STEPS // ACCUMULATION)
    run = Run()
    for number, (images, labels) in enumerate(batches(device), start=1):
        loss = F.cross_entropy(model(images), labels) / ACCUMULATION
        run.losses.append(loss.item() * ACCUMULATION)
        loss.backward()
        if number % ACCUMULATION == 0:
            run.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return run.finish(model)


def compare_accumulation(device: torch.device) -> Iterator[Agreement]:
    theirs = accumulation(torch.autocast(device.type, torch.float16), torch.amp.GradScaler(device.type), device)
    ours = accumulation(hf_mp.autocast(torch.float16), hf_mp.DynamicLossScaler(), device)
    yield from compare_training("accumulation", theirs, ours)
    yield from compare_training("accumulation, prepared", theirs, prepared_accumulation(device))


# Master weights: an FP16 model, and the FP32 values that its optimizer updates


def masters_by_hand(device: torch.device) -> Run:
    model = small_model(device).half()
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = SGD(masters, lr=0.1, momentum=0.9)
    run = Run()
    for images, labels in batches(device):
        loss = F.cross_entropy(model(images.half()).float(), labels)
        run.losses.append(loss.item())
        (loss * STATIC_SCALE).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = cast(Tensor, parameter.grad).float() / STATIC_SCALE
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return run.finish(model)


def wrapped_masters(device: torch.device) -> Run:
    model = small_model(device).half()
    optimizer = hf_mp.MasterWeightOptimizer(SGD(model.parameters(), lr=0.1, momentum=0.9))
    scaler = hf_mp.StaticLossScaler(STATIC_SCALE)
    run = Run()
    for images, labels in batches(device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.half()).float(), labels)
        run.losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return run.finish(model)


def compare_masters(device: torch.device) -> Iterator[Agreement]:
    theirs = masters_by_hand(device)
    yield from compare_training("masters, whole", theirs, wrapped_masters(device), allowed=0.0)
    yield from compare_training("masters, prepared", theirs, prepared(small_model(device).half(), "fp16-lean", device))


# A larger network, in FP32 and in FP16: losses, memory, time

LOSS_DIGITS = 3
PRECISIONS = {"fp32": "fp32", "fp16": f"params=fp32,compute=fp16,loss_scale={STATIC_SCALE:g}"}


@dataclass(frozen=True)
class Mlp:
    """A training of 784-``hidden``-10 on ``batch`` digits of 28 x 28, all of them at every step."""

    hidden: int
    batch: int
    steps: int = 7
    learning_rate: float = 0.1


MLPS = {"full": Mlp(hidden=8192, batch=8192), "small": Mlp(hidden=256, batch=512)}


@dataclass(frozen=True)
class MlpRun:
    """What it came to: the median of the steps' seconds, and the peak bytes of weights, activations and gradients."""

    losses: list[float]
    step_seconds: float
    peak_bytes: int


def mlp_losses(mlp: Mlp, precision: str, device: torch.device) -> Iterator[float]:
    """Train a step for each loss that is asked for."""
    images, labels = digits(28, mlp.batch, device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, mlp.hidden), nn.ReLU(), nn.Linear(mlp.hidden, 10)).to(device)
    optimizer = SGD(model.parameters(), lr=mlp.learning_rate)
    hf_mp.prepare(model, optimizer, precision)
    for _ in range(mlp.steps):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train_mlps(mlp: Mlp, device: torch.device) -> dict[str, MlpRun]:
    losses: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    seconds: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    trainings = {name: mlp_losses(mlp, precision, device) for name, precision in PRECISIONS.items()}
    for _ in range(mlp.steps):
        for name, training in trainings.items():  # in turns, so that a machine that slows down slows both
            start = time.perf_counter()
            losses[name].append(next(training))
            seconds[name].append(time.perf_counter() - start)
    del trainings, training  # and their tensors
    two_steps = replace(mlp, steps=2)
    peaks = {
        name: peak_tensor_bytes(partial(deque, mlp_losses(two_steps, precision, device)), device)
        for name, precision in PRECISIONS.items()
    }
    return {name: MlpRun(losses[name], statistics.median(seconds[name][1:]), peaks[name]) for name in PRECISIONS}


def compare_mlps(runs: dict[str, MlpRun]) -> Agreement:
    fp32, fp16 = runs["fp32"].losses, runs["fp16"].losses
    return close("MLP", f"losses of {len(fp32)} steps", fp32, fp16, 0.5 * 10.0**-LOSS_DIGITS / max(fp32))


def mlp_table(mlp: Mlp, runs: dict[str, MlpRun], device: torch.device) -> Table:
    table = Table(f"784-{mlp.hidden}-10, batch {mlp.batch:,}, {device}", *PRECISIONS, "ratio")
    fp32, fp16 = (runs[name] for name in PRECISIONS)
    for number, pair in enumerate(zip(fp32.losses, fp16.losses, strict=True), start=1):
        table.add_row(f"loss of step {number}", *(f"{loss:.{LOSS_DIGITS}f}" for loss in pair))
    seconds, sizes = (fp32.step_seconds, fp16.step_seconds), (fp32.peak_bytes, fp16.peak_bytes)
    table.add_row("peak of tensors", *(f"{size / 2**20:,.1f} MiB" for size in sizes), f"{sizes[1] / sizes[0]:.3f}")
    table.add_row("step", *(f"{value * 1000:,.1f} ms" for value in seconds), f"{seconds[1] / seconds[0]:.3f}")
    return table


# The program

LOOPS: dict[str, Callable[[torch.device], Iterator[Agreement]]] = {
    "autocast": compare_autocast,
    "scaling": compare_scaling,
    "clipping": compare_clipping,
    "accumulation": compare_accumulation,
    "masters": compare_masters,
}


@dataclass(frozen=True)
class Options:
    """What to run."""

    loops: list[str] = field(
        default_factory=lambda: [*LOOPS, "mlp"], metadata={"choices": [*LOOPS, "mlp"], "help": "Default: all of them."}
    )
    scale: str = field(
        default="full", metadata={"choices": list(MLPS), "help": "Of the MLP: 784-8192-10, or 784-256-10 in seconds."}
    )


def run(options: Options, console: Console) -> dict[str, Any]:
    """Run the loops, and print how far they agree; all numbers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    agreements = [row for name, loop in LOOPS.items() if name in options.loops for row in loop(device)]
    mlps = train_mlps(MLPS[options.scale], device) if "mlp" in options.loops else {}
    agreements += [compare_mlps(mlps)] if mlps else []
    console.print(agreement_table(agreements))
    if mlps:
        console.print(mlp_table(MLPS[options.scale], mlps, device))
    return {
        "options": asdict(options),
        "agreements": [{**asdict(row), "agrees": row.agrees} for row in agreements],
        "mlp": {name: asdict(one) for name, one in mlps.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    console = Console(highlight=False)
    agree = [row["agrees"] for row in run(parse_options(Options, arguments), console)["agreements"]]
    console.print(f"{sum(agree)} of {len(agree)} results agree")
    if not all(agree):
        sys.exit(1)


if __name__ == "__main__":
    main()
