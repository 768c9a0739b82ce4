"""Models that are read and not trained: in which dtypes, and what is left when they have been read."""

from __future__ import annotations

import pytest
import torch
from tiny import copies, same
from torch import nn

from hf_mp.policy import PrecisionPolicy
from hf_mp.weights.reading_layout import InferenceLayout

FP16, FP32 = torch.float16, torch.float32
# By policy: of the embedding, of the product's weight and bias, of the norm's weight and statistics; None is its own.
INSIDE = {"fp16": [FP32, None, FP32, FP32, FP32], "fp16-lean": [FP16, FP16, FP16, None, FP32]}


def dtypes(model: nn.Sequential) -> list[torch.dtype]:
    tensors = (model[0].weight, model[1].weight, model[1].bias, model[2].weight, model[2].running_mean)
    return [tensor.dtype for tensor in tensors]


@pytest.mark.parametrize("policy", INSIDE)
@pytest.mark.parametrize("dtype", [FP16, FP32, torch.bfloat16], ids=str)
def test_what_is_read_and_what_is_left(dtype: torch.dtype, policy: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)).to(dtype)
    model.register_buffer("nothing", None)
    before, layout = copies(model.state_dict().values()), InferenceLayout(PrecisionPolicy.parse(policy))
    layout.prepare_weights(model)
    assert dtypes(model) == [one or dtype for one in INSIDE[policy]]
    with torch.no_grad():
        model[1].weight[0, 0] = 3.0  # as a reference does that follows its policy
    layout.restore(model)
    assert dtypes(model) == [dtype] * 5
    before[1][0, 0] = 3.0
    found = copies(model.state_dict().values())
    if policy == "fp16-lean":  # a weight that was written was written in 16 bits
        torch.testing.assert_close(found[1], before[1], rtol=2**-10, atol=2**-10)
        found[1] = before[1]
    assert same(before, found)
    with torch.no_grad():
        model[1].bias.add_(1.0)
    kept = model[1].bias.clone()
    layout.restore(model)  # has nothing to give back any more
    assert torch.equal(model[1].bias, kept)


@pytest.mark.parametrize("only_trainable", [True, False])
def test_frozen_weights_of_a_lean_layout(only_trainable: bool) -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    InferenceLayout(PrecisionPolicy.parse("fp16-lean"), only_trainable=only_trainable).prepare_weights(model)
    assert model.weight.dtype is (FP32 if only_trainable else FP16)
