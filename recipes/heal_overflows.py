"""A model that FP16 does not hold, trained in FP16 all the same.

    python recipes/heal_overflows.py

Two small models behave as many do that were trained in BF16: in one, activations pass 65504, FP16's end, from the first
step on; in the other they grow until they do. Three loops train them: FP32, FP16 with loss scaling alone, which cannot
help and skips every step until it gives up, and FP16 with ``on_overflow="heal"``. Prints their losses, the steps that
they lost, and what was healed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import hf_mp

VOCABULARY, WIDTH = 64, 64


class Block(nn.Module):
    """A residual block with a norm before its MLP, whose inside is ``amplitude`` times as large as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.amplitude = nn.Parameter(torch.zeros(()))  # its logarithm to base 2

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.down(F.gelu(self.up(self.norm(stream) * self.amplitude.exp2())))


class Model(nn.Module):
    """Predicts the next token from the last ones."""

    def __init__(self, *, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        stream = self.embed(ids[:, :-1])
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}


@dataclass(frozen=True)
class Case:
    """A way in which a model leaves FP16's range: the amplitude of its fourth block, and its growth a step."""

    name: str
    amplitude: float
    growth: float


CASES = (Case("beyond 65504 from step 1", 17.0, 0.0), Case("gets there while it trains", 13.0, 0.1))


@dataclass
class Run:
    """What one training came to."""

    name: str
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    healed: list[str] = field(default_factory=list)
    end: str = ""

    @property
    def last(self) -> float:
        """The mean loss of the last ten steps."""
        return sum(self.losses[-10:]) / len(self.losses[-10:])


def make(case: Case) -> Model:
    """A model of fixed random weights."""
    torch.manual_seed(0)
    model = Model()
    block = model.blocks[3]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.amplitude.fill_(case.amplitude)
    for one in model.blocks:
        one.get_parameter("amplitude").requires_grad_(False)
    return model


def batches(steps: int) -> Iterator[Tensor]:
    """Sentences in which each token follows from the one before."""
    generator = torch.Generator().manual_seed(1)
    follower = torch.randperm(VOCABULARY, generator=generator)
    for _ in range(steps):
        ids = [torch.randint(0, VOCABULARY, (8,), generator=generator)]
        for _ in range(16):
            ids.append(follower[ids[-1]])
        yield torch.stack(ids, 1)


def train(case: Case, steps: int, precision: str, on_overflow: str) -> Run:
    """A plain loop; ``precision="fp32"`` leaves hf_mp out."""
    model = make(case)
    optimizer: torch.optim.Optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run = Run({"fp32": "FP32", "fp16": f"FP16, {on_overflow}"}[precision])
    if precision != "fp32":
        model, optimizer = hf_mp.prepare(model, optimizer, precision, on_overflow=on_overflow)
    for ids in batches(steps):
        loss = model(ids)["loss"]
        loss.backward()
        try:
            optimizer.step()
        except hf_mp.LossScaleError:
            run.end = f"stopped at step {len(run.losses) + 1}"
            break
        run.skipped += getattr(optimizer, "step_was_skipped", False)
        optimizer.zero_grad()
        run.losses.append(loss.item())
        with torch.no_grad():
            model.blocks[3].get_parameter("amplitude").add_(case.growth)
    if on_overflow == "heal":
        run.healed = [f"step {one.step}: {one}" for one in hf_mp.heal_overflows(model).healed]
    return run


def table(case: Case, runs: list[Run]) -> Table:
    """The runs, side by side."""
    found = Table(title=case.name)
    for column in ("run", "loss of the last 10 steps", "steps lost", "end"):
        found.add_column(column, justify="right" if "l" in column else "left")
    for run in runs:
        found.add_row(run.name, f"{run.last:.4f}", str(run.skipped), run.end)
    return found


def main(steps: int = 100) -> None:
    """Train, and print."""
    console = Console()
    for case in CASES:
        runs = [train(case, steps, *how) for how in (("fp32", ""), ("fp16", "skip"), ("fp16", "heal"))]
        console.print(table(case, runs))
        for line in runs[-1].healed:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each training (default: 100)")
    main(parser.parse_args().steps)
