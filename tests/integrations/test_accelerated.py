"""What accelerate's ``tests/test_optimizer.py`` and ``test_scheduler.py`` expect of a prepared optimizer, with ours.

Ported by behaviour, in both orders: ``hf_mp.prepare`` before ``accelerator.prepare``, and after it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from tiny import same, take_step
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hf_mp

ORDERS = ("ours first", "accelerate first")
PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")

both_orders = pytest.mark.parametrize("order", ORDERS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(autouse=True)
def accelerate_state() -> Iterator[None]:
    """As in a new process, whatever Trainers ran before."""
    for is_over in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if not is_over:
            yield


class Loop:
    """A loop with accelerate: model, optimizer and LR scheduler, prepared by both."""

    def __init__(
        self, order: str, precision: str, *, optim: Callable[..., Any] = torch.optim.SGD, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **settings)
        self.plain: Any = nn.Linear(5, 5)
        self.model: Any = self.plain
        self.optimizer: Any = optim(self.model.parameters(), 0.1)
        ours_first = order == "ours first"
        if ours_first:
            self.model, self.optimizer = hf_mp.prepare(self.model, self.optimizer, precision)
        self.scheduler: Any = LambdaLR(self.optimizer, lambda step: 0.5**step)
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.scheduler)
        self.model, self.optimizer, self.scheduler = prepared
        if not ours_first:
            self.model, self.optimizer = hf_mp.prepare(self.model, self.optimizer, precision)

    def step(self, gradient: float = 0.01) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(torch.randn(2, 5)).sum())
            for parameter in self.plain.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.plain.state_dict().values()]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@both_orders
def test_step_was_skipped_and_the_scheduler_stands_still(order: str, precision: str) -> None:
    loop = Loop(order, precision)
    assert isinstance(loop.scheduler, AcceleratedScheduler)
    told, rates = [], []
    for gradient in (0.01, float("nan"), float("nan"), 0.01, float("inf"), 0.01):
        before = loop.weights()
        loop.step(gradient)
        told.append(loop.optimizer.step_was_skipped)
        rates.append(loop.scheduler.get_last_lr()[0])
        assert same(before, loop.weights()) is told[-1]
        assert loop.accelerator.optimizer_step_was_skipped is told[-1]
    assert told == [False, True, True, False, True, False]
    assert rates == [0.05, 0.05, 0.05, 0.025, 0.025, 0.0125]


@pytest.mark.parametrize("skips", ["the host", "the update itself"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@both_orders
def test_a_skipped_step_of_adamw_changes_nothing(
    order: str, precision: str, fused: bool, skips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate 4242: weights, step counters, the flag, the scheduler and the loss scale agree."""
    if skips == "the update itself":  # as on a GPU, where the host has not read found_inf when the scheduler steps
        monkeypatch.setattr("hf_mp.step.gradients._DEVICES_WITH_FOUND_INF", ("cpu",))
    loop = Loop(order, precision, optim=functools.partial(torch.optim.AdamW, fused=fused))
    scaler = loop.plain.forward.runtime.scaler
    taken = 0
    loop.step()
    for gradient in (float("inf"), float("nan"), 0.01, float("inf"), 0.01, 0.01):
        weights, rate, scale = loop.weights(), loop.scheduler.get_last_lr(), scaler.get_scale()
        loop.step(gradient)
        is_skipped = not math.isfinite(gradient)
        taken += not is_skipped
        assert loop.optimizer.step_was_skipped is is_skipped
        assert same(weights, loop.weights()) is is_skipped
        assert (loop.scheduler.get_last_lr() == rate) is is_skipped
        assert (scaler.get_scale() < scale) is is_skipped
        assert {float(state["step"]) for state in loop.optimizer.state.values()} == {1.0 + taken}
    assert loop.scheduler.get_last_lr() == [0.1 * 0.5**4]


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@both_orders
def test_accumulation_counts_optimizer_steps(order: str, precision: str) -> None:
    loop = Loop(order, precision, gradient_accumulation_steps=3)
    start = loop.weights()
    for micro_step in range(1, 7):
        loop.step()
        assert all(map(torch.equal, start, loop.weights())) is (micro_step < 3)
    assert loop.scheduler.get_last_lr() == [0.025]


@each_precision
@both_orders
def test_both_orders_train_as_the_plain_loop(order: str, precision: str) -> None:
    """Bit for bit as ``hf_mp.prepare`` alone."""
    loop = Loop(order, precision, optim=torch.optim.AdamW)
    torch.manual_seed(0)
    model, optimizer = nn.Linear(5, 5), None
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), precision)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    batches = torch.randn(4, 2, 5)
    for batch in batches:
        loop.accelerator.backward(loop.model(batch).square().sum())
        loop.optimizer.step()
        loop.scheduler.step()
        loop.optimizer.zero_grad()
        take_step(model(batch).square().sum(), optimizer)
        scheduler.step()
    assert all(map(torch.equal, loop.weights(), model.state_dict().values()))


@each_precision
@both_orders
def test_the_state_is_saved_and_loaded(order: str, precision: str, tmp_path: Any) -> None:
    loop = Loop(order, precision, optim=torch.optim.AdamW)
    loop.step()
    loop.accelerator.save_state(str(tmp_path))
    saved = loop.weights()
    rng = torch.get_rng_state()
    loop.step(0.5)
    straight = loop.weights()
    loop.accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, loop.weights(), saved))
    torch.set_rng_state(rng)
    loop.step(0.5)
    assert all(map(torch.equal, loop.weights(), straight))


@both_orders
def test_detached_it_is_an_ordinary_optimizer(order: str) -> None:
    own = AcceleratedOptimizer.__dict__["step_was_skipped"]
    loop = Loop(order, "fp16")
    loop.step(float("nan"))
    assert loop.optimizer.step_was_skipped is True
    loop.plain.forward.runtime.detach()
    assert loop.optimizer.step_was_skipped is False
    assert AcceleratedOptimizer.__dict__["step_was_skipped"] is own
    loop.step()
    assert loop.scheduler.get_last_lr() == [0.05]
    assert "step_was_skipped" not in vars(loop.optimizer.optimizer)


def test_accelerate_that_is_imported_later_is_told() -> None:
    """The wrapper is patched at a step where it was not there when the optimizer was guarded."""
    import hf_mp.integrations.accelerated as accelerated

    model = nn.Linear(5, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(accelerated.sys.modules, "accelerate.optimizer")
        model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp16")
    wrapped = Accelerator(cpu=True).prepare(optimizer)
    model(torch.full((1, 5), torch.inf)).sum().backward()
    wrapped.step()
    assert wrapped.step_was_skipped is True
