"""``WeightStore``: the owner of an attached model's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_mp import MixedPrecision


class Model(nn.Module):
    """Records whether matmuls of its layer read a working copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        self.dtypes.append(result.dtype)
        return result


def test_a_later_rule_clears_the_unscale_nodes() -> None:
    runtime, model = MixedPrecision("fp16"), Model()
    runtime.attach(model)
    for _ in range(3):
        model(torch.rand(2, 8)).sum().backward()
    assert model.dtypes == [torch.float16] * 3
    runtime.add_rules({"layer": "fp32"})
    model.dtypes.clear()
    for _ in range(3):
        model(torch.rand(2, 8)).sum().backward()
    assert model.dtypes == [torch.float32] * 3


def test_no_copy_and_no_unscale_node_is_left_of_a_detached_model() -> None:
    runtime, model = MixedPrecision("bf16"), Model()
    runtime.attach(model)
    for _ in range(2):
        model(torch.rand(2, 8)).sum().backward()
    cache = runtime.weights.alias_cache()
    assert len(runtime.weights.layout.copies) and cache.index is not None and any(cache.by_key.values())
    runtime.detach()
    assert not len(runtime.weights.layout.copies) and cache.index is None and not cache.by_key
    assert type(model.layer.weight) is nn.Parameter and model.layer.weight.grad_fn is None
