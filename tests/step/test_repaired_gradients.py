"""Gradients repaired between ``backward()`` and ``step()``: the step follows what is there when it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import copies, same
from torch import Tensor, nn

import hf_mp
from hf_mp import StaticLossScaler

X = torch.ones(4, 8)


REPAIRS: dict[str, Callable[[Any], Any]] = {
    "nan_to_num_": lambda weight: weight.grad.nan_to_num_(0.5, 0.5, 0.5),
    "clamp_ by hand": lambda weight: weight.grad.copy_(weight.grad.nan_to_num(0.0).clamp(-0.5, 0.5)),
    "through data": lambda weight: weight.grad.data.fill_(0.5),
    "a new .grad": lambda weight: setattr(weight, "grad", torch.full(weight.shape, 0.5)),
}


def repair(model: nn.Module, how: str = "nan_to_num_") -> None:
    for parameter in model.parameters():
        REPAIRS[how](parameter)


def made(precision: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    settings = {"loss_scaler": StaticLossScaler(2.0**8)} if precision.startswith("fp16") else {}
    return hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), precision, **settings)


def overflow(model: nn.Module) -> None:
    (model(X).sum() * float("inf")).backward()
    assert not all(p.grad.isfinite().all() for p in model.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("how", REPAIRS)
def test_a_step_with_finite_gradients_is_taken(precision: str, how: str) -> None:
    model, optimizer = made(precision)
    overflow(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    repair(model, how)
    expected = {name: before[name] - 0.1 * p.grad for name, p in model.named_parameters()}  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradients were inf or NaN when the backward ended")
        optimizer.step()
    assert not optimizer.step_was_skipped
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def test_it_is_told_once() -> None:
    model, optimizer = made("fp16")
    with pytest.warns(UserWarning, match="are finite at optimizer.step.*does not learn of the overflow") as told:
        for _ in range(3):
            overflow(model)
            repair(model)
            optimizer.step()
            optimizer.zero_grad()
    assert len([each for each in told if "does not learn" in str(each.message)]) == 1


def test_a_repair_between_micro_batches_counts_too() -> None:
    """Where the backward's own measurement decides, as in the Trainer: the last one does."""
    model, optimizer = made("fp16")
    model.forward.runtime.check.measures_norm = True  # type: ignore[attr-defined]
    overflow(model)
    repair(model)
    model(X).sum().backward()
    with pytest.warns(UserWarning, match="are finite at optimizer.step"):
        optimizer.step()
    assert not optimizer.step_was_skipped
    overflow(model)  # and one that nobody repairs is skipped
    optimizer.step()
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "compute=fp16", "compute=fp16,loss_scale=dynamic"])
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_clip_grad_value_repairs_nothing(precision: str, factor: float) -> None:
    """It makes a small number of inf; torch's recipe with GradScaler looks for an overflow before it clips."""
    model, optimizer = made(precision)
    for by, skipped in ((factor, True), (1.0, False)):
        before = copies(model.parameters())
        (model(X).mean() * by).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is skipped and same(before, model.parameters()) is skipped


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_clip_grad_value_repairs_no_weight_that_no_product_uses(precision: str) -> None:
    def spoil(linear: nn.Module, given: tuple[Tensor]) -> None:
        given[0].register_hook(lambda gradient: gradient * factor)

    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].requires_grad_(False)  # torch's function fails where no gradient is left
    model[1].register_forward_pre_hook(spoil)
    other, x = nn.Linear(8, 8), torch.arange(32.0).view(4, 8) / 7
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), precision)
    for factor in (torch.inf, 1.0):
        (model(x).mean() + other(x).mean() * 1e6).backward()
        nn.utils.clip_grad_value_([*model.parameters(), *other.parameters()], 0.5)
        assert other.weight.grad is not None and other.weight.grad.abs().max() == 0.5
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is (factor == torch.inf)
