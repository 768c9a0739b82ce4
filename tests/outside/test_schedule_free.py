"""What an optimizer has besides ``step()``, behind a lean layout: ``train()`` and ``eval()`` of schedule-free and more.

``ScheduleFreeSGD`` does what ``schedulefree.SGDScheduleFree`` (1.4.1) does, without warmup and decay. ``eval()`` turns
the weights into their average and ``train()`` turns them back: both write all weights between two steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import take_step
from torch import Tensor, nn

import hf_mp

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _turn(self, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is to_train:
                continue
            group["train_mode"] = to_train
            weight = 1 - group["momentum"] if to_train else 1 - 1 / group["momentum"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=weight)

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    def largest_gradient(self) -> float:
        return max(p.grad.abs().max().item() for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "step() in eval mode"
            group["k"] += 1
            share, lr, momentum = 1 / group["k"], group["lr"], group["momentum"]
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(end=z, weight=share)
                y.add_(y.grad, alpha=lr * (momentum * (1 - share) - 1))
                z.sub_(y.grad, alpha=lr)


def prepared(model: nn.Module, precision: str) -> Any:
    """The optimizer of ``model`` that ``prepare`` returns."""
    return hf_mp.prepare(model, ScheduleFreeSGD(model.parameters()), precision)[1]


def train(precision: str, steps: int = 8) -> tuple[list[Tensor], list[float], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = prepared(model, precision)
    evaluated = []
    for step in range(steps):
        optimizer.train()
        take_step((model(X) - X[:, :1]).square().mean(), optimizer)
        if step % 3 == 2:
            optimizer.eval()
            with torch.no_grad():
                evaluated.append((model(X) - X[:, :1]).square().mean().item())
    optimizer.eval()
    return [value.clone() for value in model.state_dict().values()], evaluated, optimizer


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_train_and_eval_work_on_the_masters(precision: str) -> None:
    expected, losses, _ = train("fp32")
    found, ours, optimizer = train(precision)
    for value, reference in zip(found, expected, strict=True):
        # The layer norm's gradients alone are 16-bit roundings: 2**-8 of BF16, summed over steps.
        torch.testing.assert_close(value, reference, rtol=0, atol=2e-3)
    assert ours == pytest.approx(losses, rel=2e-2)
    assert not optimizer.param_groups[0]["train_mode"]


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_eval_and_train_again_cost_no_bits(precision: str) -> None:
    """In 16 bits, each turn would round each weight: FP32 comes back within its own rounding."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = prepared(model, precision)
    for _ in range(3):
        optimizer.train()
        take_step(model(X).square().mean(), optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(10):
        optimizer.eval()
        optimizer.train()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)


def test_methods_see_true_gradients_and_leave_what_they_only_read() -> None:
    model = nn.Linear(8, 4)
    optimizer = prepared(model, "fp16-lean")
    optimizer.train()
    model(X).square().mean().backward()
    before = [
        (p._version, value.clone()) for p, value in zip(model.parameters(), model.state_dict().values(), strict=True)
    ]
    assert optimizer.largest_gradient() == max(p.grad.abs().max().item() for p in model.parameters())  # type: ignore[union-attr]
    after = [(p._version, value) for p, value in zip(model.parameters(), model.state_dict().values(), strict=True)]
    assert all(v == w and torch.equal(a, b) for (v, a), (w, b) in zip(before, after, strict=True))
