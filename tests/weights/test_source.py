"""``WeightSource``: the owner of an attached model's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_mp import MixedPrecision


class Model(nn.Module):
    """Notes the bytes of an element of what lies in the slot of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.sizes: list[int] = []
        self.layer.register_forward_pre_hook(
            lambda module, args: self.sizes.append(module._parameters["weight"].element_size())
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def test_a_rule_that_comes_later_takes_the_borders_with_it() -> None:
    runtime, model = MixedPrecision("fp16"), Model()
    runtime.attach(model)
    for _ in range(3):
        model(torch.rand(2, 8)).sum().backward()
    assert model.sizes == [2] * 3
    runtime.add_rules({"layer": "fp32"})
    model.sizes.clear()
    for _ in range(3):
        model(torch.rand(2, 8)).sum().backward()
    assert model.sizes == [4] * 3  # not the copy that lay there before


def test_no_copy_and_no_border_is_left_of_a_detached_model() -> None:
    runtime, model = MixedPrecision("bf16"), Model()
    runtime.attach(model)
    for _ in range(2):
        model(torch.rand(2, 8)).sum().backward()
    borders = runtime.weights.lasting_borders()
    assert len(runtime.weights.layout.copies) and borders.walk is not None and any(borders.by_kind.values())
    runtime.detach()
    assert not len(runtime.weights.layout.copies) and borders.walk is None and not borders.by_kind
    assert type(model.layer.weight) is nn.Parameter and model.layer.weight.grad_fn is None
