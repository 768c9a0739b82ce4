"""Unscale nodes that are reused from forward to forward, and the forwards that must not share one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny import copies, linear, same, unscale_node
from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.step.mixed_precision import MixedPrecision

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
every_preset = pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-lean", "fp16-lean"])


class Model(nn.Module):
    """A linear layer and a norm; records the unscale node of the layer, and may do something to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.LayerNorm(8)
        self.nodes: list[Any] = []
        self.do = lambda model: None

    def forward(self, x: Tensor) -> Tensor:
        self.do(self)
        self.nodes.append(unscale_node(self.layer.weight))
        return self.norm(self.layer(x))


def attached(precision: str) -> Model:
    model = MixedPrecision(precision).attach(Model())
    for _ in range(2):  # the first forward decides what lies in the slots
        model(X).sum().backward()
    model.zero_grad()
    model.nodes.clear()
    return model


def clear_alias_cache(model: Any) -> None:
    model.forward.runtime.weights.clear_alias_cache()


@every_preset
def test_an_unscale_node_is_reused(precision: str) -> None:
    model = attached(precision)
    for _ in range(3):
        model(X).square().sum().backward()
    assert len(set(model.nodes)) == 1


@every_preset
@pytest.mark.parametrize("change", ["unfreeze", "replace", "hook", "move", "nothing of a weight"])
def test_an_unscale_node_is_freed_with_its_weight(precision: str, change: str) -> None:
    model = attached(precision)
    model(X).sum().backward()
    if change == "unfreeze":
        model.norm.bias.requires_grad_(False)
    elif change == "replace":
        model.norm = nn.LayerNorm(8)
    elif change == "hook":
        model.norm.weight.register_hook(lambda gradient: None)
    elif change == "move":
        model.layer.weight.data = model.layer.weight.data.clone()
    else:
        model.note = "new"
    model(X).sum().backward()
    first, second = model.nodes
    assert (first is second) == (change == "nothing of a weight")


@every_preset
def test_two_forwards_in_one_backward_have_separate_unscale_nodes(precision: str) -> None:
    model = attached(precision)
    (model(X).square().sum() + model(2 * X).square().sum()).backward()
    first, second = model.nodes
    assert first is not second
    model(X).square().sum().backward()
    assert model.nodes[2] in (first, second)


@every_preset
@pytest.mark.parametrize("kept", [True, False])
def test_a_graph_without_a_backward_keeps_its_unscale_nodes_while_it_lives(precision: str, kept: bool) -> None:
    model = attached(precision)
    outputs = [model(X)]
    if not kept:
        outputs.clear()
    model(X).sum().backward()
    first, second = model.nodes
    assert (first is second) == (not kept)


@every_preset
def test_a_retained_graph_keeps_its_unscale_nodes(precision: str) -> None:
    model, fresh = attached(precision), attached(precision)
    fresh.do = clear_alias_cache
    for each in (model, fresh):
        loss = each(X).square().sum()
        loss.backward(retain_graph=True)
        (loss + each(2 * X).square().sum()).backward()
        assert each.nodes[0] is not each.nodes[1]
    assert same(*[copies(p.grad for p in each.parameters()) for each in (model, fresh)])


@every_preset
def test_many_forwards_in_one_backward_are_those_of_new_unscale_nodes(precision: str) -> None:
    def gradients(model: Model) -> list[Tensor]:
        torch.stack([model(factor * X).square().sum() for factor in range(7)]).sum().backward()
        return copies(p.grad for p in model.parameters())

    kept, fresh = attached(precision), attached(precision)
    fresh.do = clear_alias_cache
    assert same(gradients(kept), gradients(fresh))
    assert len(set(kept.nodes)) == len(set(fresh.nodes)) == 7


def test_a_graph_that_saved_an_older_value_is_refused() -> None:
    model = attached("bf16")
    loss = model(X.clone().requires_grad_()).sum()
    with torch.no_grad():
        model.layer.weight.mul_(2)
    model(X)  # rounds the weight anew
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_preset
def test_a_hook_that_a_forward_adds_to_a_weight_is_the_weights_and_gets_its_unscaled_gradient(precision: str) -> None:
    model, calls = attached(precision), list[Tensor]()
    model.do = lambda model: model.layer.weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    model(X).square().sum().backward()
    model.do = lambda model: None
    model.zero_grad()
    model(X).square().sum().backward()
    assert len(calls) == 2 and torch.equal(calls[1], model.layer.weight.grad)


@every_preset
def test_a_gradient_that_a_forward_retains_is_gone_in_the_next(precision: str) -> None:
    model = attached(precision)
    model.do = lambda model: model.norm.weight.retain_grad()
    for _ in range(2):
        model(X).square().sum().backward()
        model.do = lambda model: None
    assert (model.nodes[0] is model.nodes[1]) == (precision == "bf16")  # which has no alias of a norm


@every_preset
def test_unscale_nodes_are_freed_with_the_model_and_by_detach(precision: str) -> None:
    model = attached(precision)
    model(X).sum().backward()
    node, weight = weakref.ref(model.nodes.pop()), weakref.ref(model.layer.weight)
    runtime = model.forward.runtime  # type: ignore[attr-defined]
    runtime.detach()
    assert node() is None
    runtime = MixedPrecision(precision)
    runtime.attach(model)
    for _ in range(3):
        model(X).sum().backward()
    node = weakref.ref(model.nodes.pop())
    model.nodes.clear()
    del model, runtime
    gc.collect()
    assert node() is None and weight() is None


@every_preset
def test_a_forward_that_raises_returns_its_unscale_nodes(precision: str) -> None:
    model = attached(precision)

    def fail(model: Model) -> None:
        model.nodes.append(unscale_node(model.layer.weight))
        raise KeyError("of the model")

    model.do = fail
    with pytest.raises(KeyError):
        model(X)
    model.do = lambda model: None
    model(X).sum().backward()
    assert model.nodes[0] is model.nodes[1]


@every_preset
def test_gradients_of_accumulated_backwards_are_those_of_a_loop(precision: str) -> None:
    model, other = attached(precision), attached(precision)
    other.do = clear_alias_cache
    for factor in (1, 2, 3):
        F.mse_loss(model(factor * X), X).backward()
        F.mse_loss(other(factor * X), X).backward()
    assert same(*[copies(p.grad for p in each.parameters()) for each in (model, other)])
