"""A thousand enters and exits: no tensor, no object, no mode stays."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from hf_mp.casting.mode import active_autocast, autocast
from hf_mp.step.mixed_precision import MixedPrecision

FP16 = torch.float16
TIMES = 1000


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


def test_a_new_autocast_each_time(layer: nn.Linear) -> None:
    x = torch.randn(4, 16)

    def once() -> None:
        with autocast(FP16):
            layer(x)

    assert_nothing_stays(once)


def test_one_autocast_entered_again_and_again(layer: nn.Linear) -> None:
    x, mode = torch.randn(4, 16), autocast(FP16)

    def once() -> None:
        with mode, mode:
            layer(x)

    assert_nothing_stays(once)
    assert mode._casts == {}


def test_with_backward(layer: nn.Linear) -> None:
    x = torch.randn(4, 16)
    layer(x).sum().backward()

    def once() -> None:
        with autocast(FP16):
            loss = layer(layer(x)).float().square().sum()
        loss.backward()
        layer.zero_grad(set_to_none=False)

    assert_nothing_stays(once)


def test_a_graph_that_is_never_run(layer: nn.Linear) -> None:
    x = torch.randn(4, 16, requires_grad=True)

    def once() -> None:
        with autocast(FP16):
            torch.softmax(layer(x), -1) @ torch.einsum("ij,jk->ik", x, layer.weight).t()

    assert_nothing_stays(once)


def test_exceptions(layer: nn.Linear) -> None:
    x = torch.randn(4, 16)

    def once() -> None:
        with pytest.raises(RuntimeError), autocast(FP16):
            layer(layer(x)[:, :3])

    assert_nothing_stays(once, times=300)


def test_islands_and_rules(layer: nn.Linear) -> None:
    model, x = nn.Sequential(layer, nn.Linear(16, 16)), torch.randn(4, 16)

    def once() -> None:
        with autocast(FP16, rules={"1": "fp32", torch.tanh: "fp32"}, model=model):
            model(x)
            with torch.autocast("cpu", enabled=False), autocast(torch.bfloat16):
                model(x)

    assert_nothing_stays(once, times=200)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model)


def test_one_island_of_torchs_used_again_and_again(layer: nn.Linear) -> None:
    island, x = torch.autocast("cpu", enabled=False), torch.randn(4, 16)

    def once() -> None:
        with autocast(FP16), island:
            layer(x)

    assert_nothing_stays(once)
    assert island.__dict__.get("_hf_mp_islands") == []


class Raises(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.fails = layer, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.fails:
            raise ValueError("no")
        return x


def test_an_attached_model(layer: nn.Linear) -> None:
    model, x = Raises(layer), torch.randn(4, 16)
    MixedPrecision("fp16").attach(model)
    model(x).square().sum().backward()

    def once() -> None:
        model(x).square().sum().backward()
        model.zero_grad(set_to_none=False)
        with torch.no_grad():
            model(x)

    assert_nothing_stays(once, times=500)


def test_an_attached_model_that_raises(layer: nn.Linear) -> None:
    model, x = Raises(layer), torch.randn(4, 16)
    MixedPrecision("fp16").attach(model)
    model(x)
    model.fails = True

    def once() -> None:
        with pytest.raises(ValueError, match="no"):
            model(x)

    assert_nothing_stays(once, times=300)
    model.fails = False
    assert model(x).dtype is torch.float32


def test_attaching_and_detaching(layer: nn.Linear) -> None:
    x = torch.randn(4, 16)

    def once() -> None:
        runtime = MixedPrecision("fp16")
        model = runtime.attach(layer)
        runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(x)
        runtime.detach()

    assert_nothing_stays(once, times=200)


def test_explaining(layer: nn.Linear) -> None:
    x = torch.randn(4, 16)
    assert_nothing_stays(lambda: autocast.explain(layer, x), times=200)


def test_fifty_deep() -> None:
    modes = [autocast(FP16) for _ in range(50)]
    for mode in modes:
        mode.__enter__()
    assert active_autocast() is modes[-1]
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FP16
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    assert active_autocast() is None and _get_current_function_mode_stack() == []
