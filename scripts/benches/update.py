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
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import hf_mp
from _benchmarks import DEFAULT_DEVICE, Workload, copy_bytes_per_second, rounded_copies, update_bytes
from _contenders import LEAN_UPDATE, MIXED_UPDATE, Step
from _results import in_turns, rows_of
from hf_mp.weights.split_parameter import SplitParameter

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
            runtime.weights.layout.copies.get(parameter)

    inverse = runtime.scaler.scale_and_inverse(given[0].device).inverse if runtime.check.is_scaled else None

    def step() -> None:
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, given, strict=True):
            if isinstance(parameter, SplitParameter):
                parameter.store_scaled_gradient(gradient, inverse)
            else:
                parameter.grad = gradient
        runtime.check.measure(runtime.check.parameters())
        if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
            optimizer.clip_grad_norm_(1.0)
        else:
            norm = runtime.check.norm(parameters)
            assert norm is not None
            runtime.check.defer_clipping(parameters, 1.0, norm)
        optimizer.step()

    return step


def flash_step(workload: Workload) -> Step:
    """FlashOptim's way: 16-bit parameters, their missing bits and 8-bit moments in the optimizer."""
    flashoptim = importlib.import_module("flashoptim")
    model: Any = workload.model()
    model.to(torch.bfloat16)
    optimizer = flashoptim.FlashAdamW(model.parameters(), lr=_LR)
    given = [gradient.bfloat16() for gradient in gradients(model)]

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), given, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class UpdateContender(NamedTuple):
    """One way to update.

    Attributes:
        make: gives the update of a fresh model.
        bytes: a parameter, that it has to move.
        peer: the contender of torch's that does the same.
        package: what it needs besides torch.
    """

    make: Callable[[Workload], Step]
    bytes: int
    peer: str = "torch.amp"
    package: str = "torch"


_BNB = "bitsandbytes"
_IN_BF16, _IN_8BIT = "torch.amp bf16", "torch.amp + AdamW8bit"
_MIXED_8BIT = update_bytes(gradient=4, master=4, moments=2, copy=2)
_LEAN_8BIT = update_bytes(gradient=2, master=4, moments=2)
CONTENDERS = {
    "torch.amp": UpdateContender(lambda w: torch_step(w, fused_adamw), MIXED_UPDATE),
    "hf_mp fp16": UpdateContender(lambda w: our_step(w, "fp16", fused_adamw), MIXED_UPDATE),
    "hf_mp fp16-lean": UpdateContender(lambda w: our_step(w, "fp16-lean", fused_adamw), LEAN_UPDATE),
    _IN_BF16: UpdateContender(lambda w: torch_step(w, fused_adamw, torch.bfloat16), MIXED_UPDATE, _IN_BF16),
    "hf_mp bf16": UpdateContender(lambda w: our_step(w, "bf16", fused_adamw), MIXED_UPDATE, _IN_BF16),
    "hf_mp bf16-lean": UpdateContender(lambda w: our_step(w, "bf16-lean", fused_adamw), LEAN_UPDATE, _IN_BF16),
    _IN_8BIT: UpdateContender(lambda w: torch_step(w, adamw_8bit), _MIXED_8BIT, _IN_8BIT, _BNB),
    "hf_mp fp16 + AdamW8bit": UpdateContender(lambda w: our_step(w, "fp16", adamw_8bit), _MIXED_8BIT, _IN_8BIT, _BNB),
    "hf_mp fp16-lean + AdamW8bit": UpdateContender(
        lambda w: our_step(w, "fp16-lean", adamw_8bit), _LEAN_8BIT, _IN_8BIT, _BNB
    ),
    "FlashAdamW": UpdateContender(flash_step, update_bytes(gradient=2, master=3, moments=2), package="flashoptim"),
}


def measure(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    rounds: int = 10,
    contenders: Annotated[str, typer.Option(help="comma-separated names")] = ",".join(CONTENDERS),
    device: str = DEFAULT_DEVICE,
) -> Iterator[dict[str, Any]]:
    """Time one update of each contender: medians, spreads, ratios to torch's and to the floor, after each round."""
    workload = Workload(layers, width, heads, vocab, batch=1, seq=1, device=device)
    wanted = [part.strip() for part in contenders.split(",")]
    if unknown := [part for part in wanted if part not in CONTENDERS]:
        raise typer.BadParameter(f"{unknown} are not known: use some of {', '.join(CONTENDERS)}")
    parameters, bandwidth = workload.parameters(), copy_bytes_per_second(device)
    floors = {name: CONTENDERS[name].bytes * parameters / bandwidth for name in wanted}
    peers = {name: CONTENDERS[name].peer for name in wanted}
    measured: dict[str, list[float]] = {}
    packages = {name: CONTENDERS[name].package for name in wanted}
    left_out = {name: f"{one} is not installed" for name, one in packages.items() if find_spec(one) is None}
    # AdamW8bit takes ten times as long on a CPU: in turns with it, the others would find their memory given away.
    for is_8bit in (False, True):
        group = [name for name in wanted if name not in left_out and (packages[name] == _BNB) is is_8bit]
        steps = {name: CONTENDERS[name].make(workload) for name in group}
        for seconds in in_turns(steps, rounds=rounds, warmup=2, untimed=1) if steps else ():
            measured |= seconds
            yield {
                "parameters": parameters,
                "device": device,
                "rounds": rounds,
                "threads": torch.get_num_threads(),
                "copy_bytes_per_second": bandwidth,
                "contenders": rows_of(measured, floors, ratio_to_torch=peers),
                "left_out": left_out,
            }
