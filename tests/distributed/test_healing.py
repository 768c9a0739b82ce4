"""Two processes under DDP: one of them overflows, both are healed, and no step is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_mp


class Model(nn.Module):
    """Overflows for large inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.head = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.head(self.norm(self.up(x))) - 1.0).square().mean()}


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator) * (1e5 if rank else 1.0)


def work(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    runtime = hf_mp.MixedPrecision("fp16", on_overflow="heal")
    model = DistributedDataParallel(runtime.attach(Model()))
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    skipped = []
    for step in range(4):
        model(inputs(rank, step))["loss"].backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    weights = [parameter.flatten().tolist() for parameter in model.parameters()]
    found = {"skipped": skipped, "remedies": runtime.remedies, "weights": weights}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.exhaustive
def test_two_processes_heal_alike(tmp_path: Path) -> None:
    processes.spawn(work, (str(tmp_path),), nprocs=2)
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == two
    assert one["skipped"] == [False] * 4 and list(one["remedies"]) == ["up:linear"]
    reference: Any = Model()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(4):
        (sum(reference(inputs(rank, step))["loss"] for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, expected in zip(one["weights"], reference.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(found), expected.detach().flatten(), rtol=5e-2, atol=5e-3)
