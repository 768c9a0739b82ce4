"""A small model with a place where FP16's range is left."""

from __future__ import annotations

import torch
from torch import nn


class Gated(nn.Module):
    """As Llama's MLP, with a residual stream around it, and a norm behind; ``up`` is multiplied by ``factor``."""

    def __init__(self, width: int = 32, factor: float = 1.0, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        with torch.no_grad():
            self.up.weight.mul_(factor)
            self.up.bias.mul_(factor)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        stream = self.embed(ids)
        inside = self.norm(stream)
        stream = stream + self.down(torch.relu(self.gate(inside)) * self.up(inside))
        logits = self.head(self.last_norm(stream))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batches(count: int, vocabulary: int = 50) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, vocabulary, (4, 16), generator=generator) for _ in range(count)]
    return [{"ids": ids, "labels": ids} for ids in made]
