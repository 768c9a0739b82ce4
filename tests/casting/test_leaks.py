"""Hundreds of enters and exits: no tensor, no object, no mode stays."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from hf_mp.casting.mode import active_autocast, autocast
from hf_mp.kernels.nested import apply_to_tensors
from hf_mp.step.mixed_precision import MixedPrecision

FP16 = torch.float16
TIMES = 300


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(16, 16)


def live_tensors() -> tuple[int, int]:
    """How many tensors live, and the bytes of the memory that they share."""
    gc.collect()
    storages: dict[int, int] = {}
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # fake tensors, which other tests left to torch's caches
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return len(tensors), sum(storages.values())


def assert_nothing_stays(once: Callable[[], Any], times: int = TIMES) -> None:
    """What lives after many calls lived after a few."""
    for _ in range(3):
        once()
    modes = list(_get_current_function_mode_stack())
    tensors, objects = live_tensors(), len(gc.get_objects())
    for _ in range(times):
        once()
    count, size = live_tensors()
    assert count <= tensors[0] and size <= tensors[1]  # fewer where other tests left caches that emptied meanwhile
    assert len(gc.get_objects()) < objects + times / 10  # one object a call would be ten times as many
    assert list(_get_current_function_mode_stack()) == modes
    assert active_autocast() is None


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
REUSED: dict[str, Any] = {}  # an autocast and a disabled region of torch


def in_one_again(layer: nn.Linear) -> None:
    with REUSED["autocast"], REUSED["autocast"]:
        layer(X)


def backward(layer: nn.Linear) -> None:
    with autocast(FP16):
        loss = layer(layer(X)).float().square().sum()
    loss.backward()
    layer.zero_grad(set_to_none=False)


def a_graph_that_is_never_run(layer: nn.Linear) -> None:
    x = X.clone().requires_grad_()
    with autocast(FP16):
        torch.softmax(layer(x), -1) @ torch.einsum("ij,jk->ik", x, layer.weight).t()


def exceptions(layer: nn.Linear) -> None:
    with pytest.raises(RuntimeError), autocast(FP16):
        layer(layer(X)[:, :3])


def islands_and_rules(layer: nn.Linear) -> None:
    model = nn.Sequential(layer, nn.Linear(16, 16))
    with autocast(FP16, rules={"1": "fp32", torch.tanh: "fp32"}, model=model):
        model(X)
        with torch.autocast("cpu", enabled=False), autocast(torch.bfloat16):
            model(X)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model)


def one_island_again(layer: nn.Linear) -> None:
    with autocast(FP16), REUSED["disabled"]:
        layer(X)


def attaching_and_detaching(layer: nn.Linear) -> None:
    runtime = MixedPrecision("fp16")
    runtime.attach_optimizer(torch.optim.SGD(runtime.attach(layer).parameters(), lr=0.1))
    layer(X)
    runtime.detach()


def an_attached_model(model: nn.Module) -> None:
    model(X).square().sum().backward()
    model.zero_grad(set_to_none=False)
    with torch.no_grad():
        model(X)


def an_attached_model_that_raises(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        model(X[:, :3])


@pytest.mark.parametrize(
    ("once", "times"),
    [
        (in_one_again, TIMES),
        (backward, TIMES),
        (a_graph_that_is_never_run, TIMES),
        (exceptions, 300),
        (islands_and_rules, 200),
        (one_island_again, TIMES),
        (attaching_and_detaching, 200),
        (an_attached_model, 500),
        (an_attached_model_that_raises, 300),
        (lambda layer: autocast.explain(layer, X), 200),
    ],
)
def test_nothing_stays(once: Callable[[Any], Any], times: int, layer: nn.Linear) -> None:
    if once in (an_attached_model, an_attached_model_that_raises):
        MixedPrecision("fp16").attach(layer)
    REUSED.update(autocast=autocast(FP16), disabled=torch.autocast("cpu", enabled=False))
    layer(X).sum().backward()
    assert_nothing_stays(lambda: once(layer), times)
    assert REUSED.pop("autocast")._casts == {}
    assert REUSED.pop("disabled").__dict__.get("_hf_mp_nested", []) == []


def test_outputs_that_were_traversed_are_freed_at_once() -> None:
    gc.collect()
    gc.disable()  # a cycle of references would live on
    try:
        outputs = {"logits": [torch.ones(2)]}
        gone = weakref.ref(apply_to_tensors(lambda tensor: tensor * 2, outputs, objects=True)["logits"][0])
        assert gone() is None
    finally:
        gc.enable()
