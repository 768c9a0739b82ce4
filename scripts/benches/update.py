"""The update phase, in turns: from the gradients that backward left to working copies that the next forward can read.

    python scripts/bench.py update                       # GPT-2 124M
    python scripts/bench.py update --layers 2 --vocab 1000 --rounds 3   # a quick look

torch: GradScaler's unscaling (in FP16), ``clip_grad_norm_``, fused AdamW, and the casts of the weights that autocast
makes in the next forward; the same with bitsandbytes' AdamW8bit in AdamW's place. FlashOptim's FlashAdamW (arXiv
2602.23349), on a GPU where it is installed: 16-bit gradients clipped by their global norm, and its update of 24-bit
weights with 8-bit state. Ours: the measurement when backward ends, the Trainer's clipping, the guarded step, the
refreshed working copies.

The floor is what each has to move in two passes (one for the norm, one for the update), at the bandwidth of a copy
measured in the same run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import hf_mp
from _benchmarks import DEFAULT_DEVICE, UpdateBytes, Workload, copy_bytes_per_second, rounded_copies
from _contenders import LEAN_UPDATE, MIXED_UPDATE
from _results import in_turns, rows_of
from hf_mp.weights.lean.split_parameter import SplitParameter

Step = Callable[[], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
_LR = 1e-5


def fused_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """torch's AdamW, in its fused implementation."""
    return AdamW(parameters, lr=_LR, fused=True)


def adamw_8bit(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """bitsandbytes' AdamW with 8-bit moments."""
    optimizer: Optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(parameters, lr=_LR)
    return optimizer


def gradients(model: nn.Module) -> list[Tensor]:
    """One random FP32 gradient a parameter, of which the norm is above 1."""
    torch.manual_seed(0)
    return [torch.randn(parameter.shape, device=parameter.device) * 1e-3 for parameter in model.parameters()]


def torch_step(workload: Workload, make: MakeOptimizer, dtype: torch.dtype = torch.float16) -> Step:
    """torch.amp's way: gradients come scaled in FP16, weights are cast anew in each forward."""
    model = workload.model()
    optimizer = make(model.parameters())
    is_scaled = dtype is torch.float16
    scaler = torch.amp.GradScaler(workload.device, init_scale=1.0, growth_interval=10**9, enabled=is_scaled)
    scaler.scale(torch.zeros((), device=workload.device))
    given = gradients(model)

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        rounded_copies(model, dtype)

    return step


def our_step(workload: Workload, precision: str, make: MakeOptimizer) -> Step:
    """Ours, as ``MixedPrecisionTrainer`` calls it."""
    model = workload.model()
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    runtime.check.measures_norm = True
    optimizer = runtime.attach_optimizer(make(model.parameters()))
    given = gradients(model)
    if runtime.policy.is_lean:  # as backward leaves them: in 16 bits, still scaled
        given = [(gradient * runtime.scaler.get_scale()).to(runtime.policy.compute) for gradient in given]
    else:
        for parameter in model.parameters():
            runtime.layout.copies.get(parameter)

    inverse = runtime.scaler.scale_tensors(given[0].device).inverse if runtime.check.is_scaled else None

    def step() -> None:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, given, strict=True):
            if isinstance(parameter, SplitParameter):
                parameter.take_scaled_gradient(gradient, inverse)
            else:
                parameter.grad = gradient
        runtime.check.measure(runtime.check.parameters())
        if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            norm = runtime.check.norm(parameters)
            assert norm is not None
            runtime.check.clip(parameters, 1.0, norm)
        optimizer.step()

    return step


def flash_step(workload: Workload) -> Step:
    """FlashOptim's way: 16-bit parameters, their missing bits and 8-bit moments in the optimizer."""
    model: Any = workload.model()
    model.to(torch.bfloat16)
    optimizer = importlib.import_module("flashoptim").FlashAdamW(model.parameters(), lr=_LR)
    given = [gradient.bfloat16() for gradient in gradients(model)]

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


@dataclass(frozen=True)
class UpdateContender:
    """One way to update.

    Attributes:
        make: gives the update of a fresh model.
        update: what it has to move.
        package: what it needs besides torch.
        needs_gpu: whether it runs on a GPU alone.
        peer: the contender of torch's that does the same.
    """

    make: Callable[[Workload], Step]
    update: UpdateBytes
    package: str | None = None
    needs_gpu: bool = False
    peer: str = "torch.amp"

    def why_not_here(self, device: str) -> str | None:
        """None where it can run."""
        if self.needs_gpu and device == "cpu":
            return "runs on a GPU alone"
        if self.package is not None:
            try:
                importlib.import_module(self.package)
            except ImportError as error:
                return f"{self.package} cannot be imported: {error}"
        return None


_BNB = "bitsandbytes"
_IN_BF16, _IN_8BIT = "torch.amp bf16", "torch.amp + AdamW8bit"
_MIXED_8BIT, _LEAN_8BIT = UpdateBytes(4, 4, 2, 2), UpdateBytes(2, 4, 2)
CONTENDERS = {
    "torch.amp": UpdateContender(lambda w: torch_step(w, fused_adamw), MIXED_UPDATE),
    "hf_mp fp16": UpdateContender(lambda w: our_step(w, "fp16", fused_adamw), MIXED_UPDATE),
    "hf_mp fp16-lean": UpdateContender(lambda w: our_step(w, "fp16-lean", fused_adamw), LEAN_UPDATE),
    _IN_BF16: UpdateContender(lambda w: torch_step(w, fused_adamw, torch.bfloat16), MIXED_UPDATE, peer=_IN_BF16),
    "hf_mp bf16": UpdateContender(lambda w: our_step(w, "bf16", fused_adamw), MIXED_UPDATE, peer=_IN_BF16),
    "hf_mp bf16-lean": UpdateContender(lambda w: our_step(w, "bf16-lean", fused_adamw), LEAN_UPDATE, peer=_IN_BF16),
    _IN_8BIT: UpdateContender(lambda w: torch_step(w, adamw_8bit), _MIXED_8BIT, _BNB, peer=_IN_8BIT),
    "hf_mp fp16 + AdamW8bit": UpdateContender(
        lambda w: our_step(w, "fp16", adamw_8bit), _MIXED_8BIT, _BNB, peer=_IN_8BIT
    ),
    "hf_mp fp16-lean + AdamW8bit": UpdateContender(
        lambda w: our_step(w, "fp16-lean", adamw_8bit), _LEAN_8BIT, _BNB, peer=_IN_8BIT
    ),
    "FlashAdamW": UpdateContender(flash_step, UpdateBytes(2, 3, 2), "flashoptim", needs_gpu=True),
}


def measure(
    model: Annotated[str | None, typer.Option(help="gpt2 (124M), gpt2-medium, gpt2-large (774M), gpt2-xl")] = None,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    rounds: int = 10,
    contenders: Annotated[str, typer.Option(help="comma-separated names")] = ",".join(CONTENDERS),
    device: str = DEFAULT_DEVICE,
) -> Iterator[dict[str, Any]]:
    """Time one update of each contender: medians, spreads, ratios to torch's and to the floor, after each round."""
    workload = Workload.of(
        model, layers=layers, width=width, heads=heads, vocab=vocab, batch=1, seq=1, device=device
    )  # fmt: skip
    wanted = [part.strip() for part in contenders.split(",")]
    if unknown := [part for part in wanted if part not in CONTENDERS]:
        raise typer.BadParameter(f"{unknown} are not known: use some of {', '.join(CONTENDERS)}")
    reasons = {contender: CONTENDERS[contender].why_not_here(device) for contender in wanted}
    left_out = {contender: reason for contender, reason in reasons.items() if reason is not None}
    parameters, bandwidth = workload.parameters(), copy_bytes_per_second(device)
    floors = {name: CONTENDERS[name].update.total * parameters / bandwidth for name in wanted}
    peers = {name: CONTENDERS[name].peer for name in wanted}
    for seconds in two_groups([name for name in wanted if name not in left_out], workload, rounds):
        yield {
            "parameters": parameters,
            "device": device,
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            "copy_bytes_per_second": bandwidth,
            "contenders": rows_of(seconds, floors, ratio_to_torch=peers),
            "left_out": left_out,
        }


def two_groups(names: list[str], workload: Workload, rounds: int) -> Iterator[dict[str, list[float]]]:
    """Seconds of all contenders, after each round: those with AdamW8bit come last.

    It takes ten times as long on a CPU: in turns with it, the others would find their memory given away.
    """
    measured: dict[str, list[float]] = {}
    for is_8bit in (False, True):
        group = [name for name in names if (CONTENDERS[name].package == _BNB) is is_8bit]
        steps = {name: CONTENDERS[name].make(workload) for name in group}
        for seconds in in_turns(steps, rounds=rounds, warmup=2, untimed=1) if steps else ():
            measured |= seconds
            yield measured
        steps.clear()
