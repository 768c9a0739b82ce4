"""Optimizers that a lean model was never given to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hf_mp
from hf_mp.weights.fused_adamw import can_skip


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_refused_and_changes_nothing(precision: str, kind: type[torch.optim.Optimizer]) -> None:
    model = hf_mp.MixedPrecision(precision).attach(nn.Linear(8, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"this \w+ was not attached, and would round its updates to the 16 bits .* attach_optimizer"
    ):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_so_it_is_for_a_copy_that_outlives_its_model() -> None:
    model, _ = _prepared()
    copied = copy.deepcopy(model)
    del model
    copied(torch.ones(4, 8)).sum().backward()  # a copy is FP32 until it is trained
    with pytest.raises(RuntimeError, match="this SGD was not attached, and would round its updates"):
        torch.optim.SGD(copied.parameters(), lr=0.1).step()


def test_an_optimizer_around_the_wrapper_steps_it() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: None = None) -> None:
            self.inner.step()

    model, optimizer = _prepared()
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 8)).sum().backward()
    Around(optimizer).step()
    assert not torch.equal(model.state_dict()["weight"], before["weight"])


def test_other_models_step_as_before_and_a_detached_one_as_any() -> None:
    runtime = hf_mp.MixedPrecision("bf16-lean")
    model = runtime.attach(nn.Linear(8, 2))
    other = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    other(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    assert can_skip(optimizer, None)  # a fused step with a hook of anybody else's is not replaced
    runtime.detach()
    model(torch.ones(4, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 2)
    return hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-lean")
