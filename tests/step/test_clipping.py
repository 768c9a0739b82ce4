"""A step after clipping looks at the gradients that are there, however they were clipped or written."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Using, copies, linear, same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import hf_mp

PRECISIONS = ["bf16", "fp16", "bf16-lean", "fp16-lean"]
by_precision = pytest.mark.parametrize("precision", PRECISIONS)


def after_backward(precision: str = "bf16", factor: float = 1.0) -> tuple[Any, Any]:
    use = lambda m, x: m.second(m.first(x).tanh()).float().square().mean()  # noqa: E731
    model: Any = Using(use, first=linear(), second=nn.Linear(8, 4))
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), precision)
    (model(torch.randn(3, 8)) * factor).backward()
    return model, optimizer


def clip(model: nn.Module, optimizer: Any, max_norm: float = 1e-3) -> Tensor:
    if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return clip_grad_norm_(model.parameters(), max_norm)


def clip_by_torch(model: nn.Module, optimizer: Any, max_norm: float = 1e-3) -> Tensor:
    return clip_grad_norm_(model.parameters(), max_norm)


@by_precision
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_norm_that_is_not_finite_skips_the_step(precision: str, factor: float) -> None:
    model, optimizer = after_backward(precision, factor)
    before = copies(model.parameters())
    assert not clip(model, optimizer).isfinite()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert same(before, model.parameters())


def test_an_infinite_norm_of_finite_gradients_skips_nothing() -> None:
    model, optimizer = after_backward()
    for parameter in model.parameters():
        parameter.grad.fill_(2.0**63)
    model.first.weight.grad.fill_(2.0**63.9)
    assert clip(model, optimizer).isinf()  # which makes zeros of them
    optimizer.step()
    assert not optimizer.step_was_skipped


def replace_gradient(weight: nn.Parameter) -> None:
    weight.grad = torch.full_like(weight, torch.nan)


@by_precision
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.grad.fill_(torch.nan),
        lambda weight: weight.grad.__setitem__((0, 0), torch.inf),
        lambda weight: weight.grad.data.fill_(torch.nan),
        lambda weight: weight.grad.numpy().fill(torch.nan),
        replace_gradient,
    ],
    ids=["fill_", "an element", "data", "numpy", "replaced"],
)
@pytest.mark.parametrize("by", [clip_by_torch, lambda *given: None], ids=["clipped", "not clipped"])
def test_what_is_written_after_backward_is_seen(
    precision: str, write: Callable[[nn.Parameter], None], by: Callable[..., Any]
) -> None:
    model, optimizer = after_backward(precision)
    by(model, optimizer)
    write(model.second.weight)
    before = copies(model.parameters())
    optimizer.step()
    assert optimizer.step_was_skipped and same(before, model.parameters())


@by_precision
@pytest.mark.parametrize("by", [clip, clip_by_torch])
def test_another_backward_after_clipping_is_seen(precision: str, by: Callable[..., Tensor]) -> None:
    model, optimizer = after_backward(precision)
    by(model, optimizer)
    (model(torch.randn(3, 8)) * torch.inf).backward()
    optimizer.step()
    assert optimizer.step_was_skipped


def test_a_lean_gradient_that_was_read_and_written_after_clipping_is_seen() -> None:
    model, optimizer = after_backward("fp16-lean")
    clip(model, optimizer)
    model.first.weight.grad[0, 0] = torch.inf
    optimizer.step()
    assert optimizer.step_was_skipped


def scaled_to_nan(model: nn.Module) -> None:
    norm = get_total_norm([parameter.grad for parameter in model.parameters()])
    clip_grads_with_norm_(model.parameters(), 1.0, norm * torch.nan)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: clip_grad_norm_(model.parameters(), torch.nan),
        lambda model: clip_grad_norm_(model.parameters(), -torch.inf),
        scaled_to_nan,
    ],
    ids=["nan", "minus infinity", "norm of one's own"],
)
@by_precision
def test_clipping_that_spoils_gradients_is_seen(precision: str, spoil: Callable[[nn.Module], Any]) -> None:
    model, optimizer = after_backward(precision)
    model.first.bias.grad.zero_()
    spoil(model)
    optimizer.step()
    assert optimizer.step_was_skipped


@by_precision
@pytest.mark.parametrize("norm_type", [0.0, -torch.inf])
def test_a_norm_that_hides_an_infinity(precision: str, norm_type: float) -> None:
    model, optimizer = after_backward(precision)
    model.first.weight.grad[0, 0] = torch.inf
    assert clip_grad_norm_(model.parameters(), 1e9, norm_type=norm_type).isfinite()
    optimizer.step()
    assert optimizer.step_was_skipped


def test_gradients_are_not_kept() -> None:
    model, optimizer = after_backward()
    clip(model, optimizer)
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    assert all(reference() is None for reference in gradients)


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
def test_what_the_caller_does_with_the_norm_changes_nothing(precision: str) -> None:
    model, optimizer = after_backward(precision, torch.inf)
    clip(model, optimizer).unsqueeze_(0).nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    assert optimizer.step_was_skipped


def test_gradients_that_are_kept_and_written_are_seen() -> None:
    model, optimizer = after_backward()
    clip(model, optimizer)
    optimizer.step()
    model.second.weight.grad.data.fill_(torch.nan)  # kept, and written anew without a backward
    optimizer.step()
    assert optimizer.step_was_skipped


def test_compiled_clipping_works() -> None:
    model, optimizer = after_backward()
    norm = torch.compile(lambda: clip_grad_norm_(model.parameters(), 1e-3), backend="eager")()
    expected = get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(expected, torch.tensor(1e-3), rtol=1e-2, atol=0.0)
    assert norm > expected
    optimizer.step()
    assert not optimizer.step_was_skipped
