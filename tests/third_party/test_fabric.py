"""Lightning Fabric prepares what is attached already: the same training, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hf_mp

fabric_module = pytest.importorskip("lightning_fabric")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fabric_changes_nothing(precision: str, tmp_path: Path) -> None:
    def train(with_fabric: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        runtime = hf_mp.MixedPrecision(precision)
        runtime.attach(model)
        optimizer = runtime.attach_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        if with_fabric:
            fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
            model, optimizer = fabric.setup(model, optimizer)
        inputs = torch.randn(32, 8)
        for factor in (1.0, 1.0, float("inf"), 1.0):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() * factor
            if with_fabric:
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert (runtime.stats.steps, runtime.stats.skipped_steps) == (4, 1)
        if with_fabric:
            state = {"model": model, "optimizer": optimizer, "precision": runtime.state_dict()}
            fabric.save(tmp_path / "state.ckpt", state)
            left = fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
            hf_mp.MixedPrecision(precision).load_state_dict(left["precision"])
            assert left["precision"] == runtime.state_dict()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(train(False), train(True), strict=True))
