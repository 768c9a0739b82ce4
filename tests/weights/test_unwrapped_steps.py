"""Optimizers that a lean model was never given to."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as pre_hooks

import hf_mp
from hf_mp.weights.fused_adamw import can_skip


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_refused_and_changes_nothing(precision: str, kind: type[torch.optim.Optimizer]) -> None:
    model = hf_mp.MixedPrecision(precision).attach(nn.Linear(8, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"this \w+ would round its updates to the 16 bits .* attach_optimizer"):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_other_models_step_as_before_and_detach_ends_it() -> None:
    before = len(pre_hooks)
    runtime = hf_mp.MixedPrecision("bf16-lean")
    model = runtime.attach(nn.Linear(8, 2))
    other = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    other(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    assert can_skip(optimizer, None)  # a fused step with a hook of anybody else's is not replaced
    runtime.detach()
    assert len(pre_hooks) == before
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    own.step()


def test_nothing_stays_of_a_model_that_is_gone() -> None:
    before = len(pre_hooks)
    model = hf_mp.MixedPrecision("bf16-lean").attach(nn.Linear(8, 2))
    assert len(pre_hooks) == before + 1
    del model
    gc.collect()
    assert len(pre_hooks) <= before
