"""Small mixtures of experts of five classes, trained in each preset and in FP32 on the same tokens.

    OMP_NUM_THREADS=1 python scripts/bench.py expert_training  # 16 minutes of one core
    python scripts/bench.py expert_training --steps 20 --seeds 1 --kinds Mixtral --output-dir /tmp

The tokens are walks over a random graph of four successors each, so that no loss comes below log 4. None is a padding
token: its embedding stays 0, and norms of zeros multiply gradients by 1,000 each. Compared is the mean loss of the last
fifth of the steps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor

import hf_mp
from _mixtures import KINDS, config_of
from hf_mp.policy import mixed_presets

NAME = "compare_experts"
VOCABULARY = 96
FP32, STOCK = "FP32", "torch.autocast, BF16"
WAYS = (FP32, *mixed_presets(), STOCK)


def walks(seed: int, steps: int) -> Tensor:
    """Tokens of shape (steps, 8, 32)."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    tokens = [torch.randint(VOCABULARY, (steps, 8), generator=generator)]
    for _ in range(31):
        tokens.append(successors[tokens[-1], torch.randint(4, (steps, 8), generator=generator)])
    return torch.stack(tokens, -1)


def final_loss(kind: str, way: str, seed: int, steps: int) -> float:
    """The mean loss of the last fifth of a training."""
    torch.manual_seed(seed)
    config = config_of(kind, experts=8, vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=None)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    if way not in (FP32, STOCK):
        model, optimizer = hf_mp.prepare(model, optimizer, way)
    losses = []
    for ids in walks(seed, steps):
        with torch.autocast("cpu", torch.bfloat16) if way == STOCK else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.fmean(losses[-max(1, steps // 5) :])


def measure(
    steps: int = 200,
    seeds: Annotated[int, typer.Option(help="trainings of each kind in each way")] = 5,
    kinds: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(KINDS)}; default: all")] = None,
    workers: Annotated[int, typer.Option(help="trainings at once")] = os.cpu_count() or 1,
) -> dict[str, Any]:
    """Train each kind in each way from each seed, and compare the means over the seeds with FP32's."""
    cases = list(itertools.product(kinds or KINDS, WAYS, range(seeds)))
    with ProcessPoolExecutor(workers) as pool:
        losses = dict(zip(cases, pool.map(final_loss, *zip(*cases, strict=True), [steps] * len(cases)), strict=True))
    found = {}
    for kind in kinds or KINDS:
        of_kind = {way: [losses[kind, way, seed] for seed in range(seeds)] for way in WAYS}
        expected = statistics.fmean(of_kind[FP32])
        off = {way: abs(statistics.fmean(one) / expected - 1) for way, one in of_kind.items() if way != FP32}
        found[kind] = {"losses": of_kind, "fp32": expected, "off": off}
    return {"steps": steps, "seeds": seeds, "kinds": found}
