"""A wrapper that hands reads and writes of attributes on to the module inside it, as Lightning Fabric's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_mp


class Delegating(nn.Module):
    """Its attributes are those of ``module``, which it has only once it is made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.is_made = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "is_made" in self.__dict__ and name not in self.__dict__:
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
def test_a_delegating_wrapper_trains_as_the_module(precision: str) -> None:
    inputs = torch.randn(4, 3)
    ends = []
    for wraps in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))
        model: Any = Delegating(module) if wraps else module
        model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), precision)
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([value.clone() for value in module.state_dict().values()])
        vars(model)["forward"].runtime.detach()
        assert "forward" not in vars(model) and "forward" not in vars(module)
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        model(inputs)
    assert all(map(torch.equal, *ends))
