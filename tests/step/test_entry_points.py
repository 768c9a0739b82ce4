"""Code that calls something else than ``forward``: methods, and the children of containers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import linear, same
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, GPT2Config, GPT2LMHeadModel

import hf_mp
from hf_mp import MixedPrecision

PRECISIONS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Agent(nn.Module):
    """Has a ``forward``, and other methods that a loop calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = linear(), linear(8, 1)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.get_value(x)

    def get_value(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.dtypes.append(hidden.dtype)
        value: Tensor = self.value(hidden)
        return value


class Without(Agent):
    """Has no ``forward``."""

    forward = nn.Module.forward


def train(model: Any, call: Callable[[Any, Tensor], Tensor], precision: str, **settings: Any) -> list[Tensor]:
    """The losses and gradients of three steps."""
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), precision, **settings)
    found = []
    for _ in range(3):
        loss = call(model, X).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_method_is_a_forward(precision: str) -> None:
    agent = Agent()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(agent, lambda m, x: m.get_value(x), precision, methods=["get_value"])
    assert set(agent.dtypes) == {MixedPrecision(precision).policy.compute}
    assert same(found, train(Agent(), lambda m, x: m(x), precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_children_of_a_container_are_called(precision: str) -> None:
    dtypes: list[torch.dtype] = []

    def call(model: nn.ModuleDict, x: Tensor) -> Tensor:
        for block in model["blocks"]:  # type: ignore[union-attr]
            x = torch.relu(block(x))
            dtypes.append(block.weight.dtype)
        head: Tensor = model["head"](x)
        return head

    def container() -> nn.ModuleDict:
        return nn.ModuleDict({"blocks": nn.ModuleList([linear(), linear()]), "head": linear(8, 1)})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(container(), call, precision)
    expected = train(container(), call, "fp32")
    differ = [(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    assert 0 < max(differ) < {"fp16": 1e-2, "bf16": 5e-2}[precision[:4]]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_class_without_forward_is_a_container(precision: str) -> None:
    agent = Without()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(agent, lambda m, x: m.get_value(x), precision)
    assert "forward" in vars(agent.body) and set(agent.dtypes) == {torch.float32}  # an output of a forward
    hf_mp.detach(agent)
    assert "forward" not in vars(agent.body)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_attached_is_warned_of_once(precision: str) -> None:
    with pytest.warns(UserWarning, match=r"the attached model was not called.*methods=\['get_value'\]") as caught:
        found = train(Agent(), lambda m, x: m.get_value(x), precision)
    assert len(caught) == 1
    if not precision.endswith("lean"):
        assert same(found, train(Agent(), lambda m, x: m(x), "fp32"))


def test_several_optimizers_and_evaluations_are_not_warned_of() -> None:
    model: Any = Agent()
    precision = MixedPrecision("bf16")
    precision.attach(model)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.body, model.value)]
    for optimizer in optimizers:
        precision.attach_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    model.get_value(X).sum().backward()
    with torch.no_grad():
        model(X)
    with pytest.warns(UserWarning, match="the attached model was not called"):
        optimizers[0].step()


def test_a_method_of_transformers() -> None:
    text = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = CLIPConfig(text_config=text, vision_config=vision | {"image_size": 8, "patch_size": 4}, projection_dim=8)
    model: Any = CLIPModel(config)
    dtypes: list[torch.dtype] = []
    model.visual_projection.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    MixedPrecision("bf16").attach(model, methods=["get_image_features"])
    outputs = model.get_image_features(pixel_values=torch.randn(2, 3, 8, 8))
    assert dtypes == [torch.bfloat16]
    assert getattr(outputs, "pooler_output", outputs).dtype is torch.float32


def test_a_method_of_a_module_inside_is_attached_copied_pickled_and_detached() -> None:
    model: Any = nn.ModuleDict({"agent": Agent()})
    MixedPrecision("bf16").attach(model, methods=["agent.get_value"])
    copied = copy.deepcopy(model)
    for one in (model, copied):
        agent = one["agent"]
        agent.get_value(X)
        assert agent.dtypes[-1] is torch.bfloat16
        loaded = pickle.loads(pickle.dumps(agent))
        assert loaded.get_value.__func__ is Agent.get_value and loaded.get_value(X).dtype is torch.float32
        hf_mp.detach(one)
        assert "get_value" not in vars(agent) and "forward" not in vars(agent)


@pytest.mark.parametrize("names", [["values"], ["body"], ["body.values"], ["nothing.forward"], ["dtypes"]])
def test_a_name_that_is_no_method_is_refused(names: list[str]) -> None:
    agent = Agent()
    with pytest.raises(ValueError, match=rf"methods=\['{names[0]}'\] names no method of Agent: use the name"):
        MixedPrecision("bf16").attach(agent, methods=names)
    assert "forward" not in vars(agent)
    with pytest.raises(TypeError, match=r"use methods=\['get_value'\]"):
        MixedPrecision("bf16").attach(agent, methods="get_value")


def test_a_transformers_model_inside_is_called_by_itself() -> None:
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    MixedPrecision("bf16-lean").attach(model)
    dtypes: list[torch.dtype] = []
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    model.transformer(torch.arange(4)[None])
    assert dtypes == [torch.bfloat16]


def test_a_generator_is_refused() -> None:
    class Streams(nn.Linear):
        def stream(self, x: Tensor) -> Any:
            yield self(x)

    model = Streams(4, 4)
    with pytest.raises(ValueError, match=r"methods=\['stream'\] names a generator"):
        hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", methods=["stream"])
