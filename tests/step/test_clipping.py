"""A step after clipping looks at the gradients that are there, however they were clipped or written."""

from __future__ import annotations

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


def after_backward(precision: str = "bf16", factor: float = 1.0, **settings: Any) -> tuple[Any, Any]:
    use = lambda m, x: m.second(m.first(x).tanh()).float().square().mean()  # noqa: E731
    model: Any = Using(use, first=linear(), second=nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model, optimizer = hf_mp.prepare(model, optimizer, precision, **settings)
    (model(torch.randn(3, 8)) * factor).backward()
    return model, optimizer


def clip(model: nn.Module, optimizer: Any, max_norm: float = 1e-3) -> Tensor:
    if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return clip_grad_norm_(model.parameters(), max_norm)


def again(model: Any, factor: float) -> None:
    (model(torch.randn(3, 8)) * factor).backward()


# What is done to gradients after they were clipped, or instead of it.
SPOILS: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda model: model.second.weight.grad.fill_(torch.nan),
    "an element": lambda model: model.first.weight.grad.__setitem__((0, 0), torch.inf),
    "data": lambda model: model.second.weight.grad.data.fill_(torch.nan),
    "numpy": lambda model: model.second.weight.grad.numpy().fill(torch.nan),
    "another .grad": lambda model: setattr(model.second.weight, "grad", torch.full((4, 8), torch.nan)),
    "a backward that overflows": lambda model: again(model, torch.inf),
    "a backward that is NaN": lambda model: again(model, torch.nan),
    "clipped to NaN": lambda model: clip_grad_norm_(model.parameters(), torch.nan),
    "clipped to minus infinity": lambda model: clip_grad_norm_(model.parameters(), -torch.inf),
    "a norm of one's own": lambda model: clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(torch.nan)),
    # these two norms hide an infinity
    "zero norm": lambda model: (again(model, torch.inf), clip_grad_norm_(model.parameters(), 1e9, norm_type=0.0)),
    "least norm": lambda model: (again(model, torch.inf), clip_grad_norm_(model.parameters(), 1e9, -torch.inf)),
    "a norm that was written": lambda model: (
        again(model, torch.inf),
        clip_grad_norm_(model.parameters(), 1.0).unsqueeze_(0).nan_to_num_(0.0, 0.0, 0.0),
    ),
}


@by_precision
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("before", ["", "clipped", "clipped by torch", "stepped"])
def test_gradients_that_are_spoilt_skip_the_step(precision: str, spoil: str, before: str) -> None:
    model, optimizer = after_backward(precision)
    if before.startswith("clipped"):
        norm = clip(model, optimizer) if before == "clipped" else clip_grad_norm_(model.parameters(), 1e-3)
        assert norm.isfinite()
    elif before == "stepped":  # gradients are kept, and written without a backward or after another one
        optimizer.step()
        assert not optimizer.step_was_skipped
        again(model, 1.0)
    SPOILS[spoil](model)
    weights = copies(model.parameters())
    optimizer.step()
    assert optimizer.step_was_skipped and same(weights, model.parameters())


@by_precision
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_norm_that_is_not_finite_skips_the_step(precision: str, factor: float) -> None:
    model, optimizer = after_backward(precision, factor)
    clip(model, optimizer).nan_to_num_(0.0, 0.0, 0.0)  # what the caller does with the norm changes nothing
    optimizer.step()
    assert optimizer.step_was_skipped


def test_an_infinite_norm_of_finite_gradients_skips_nothing() -> None:
    model, optimizer = after_backward()
    for parameter in model.parameters():
        parameter.grad.fill_(2.0**63)
    model.first.weight.grad.fill_(2.0**63.9)
    assert clip(model, optimizer).isinf()  # which makes zeros of them
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_gradients_that_are_only_measured_stay_as_they_are() -> None:
    model, optimizer = after_backward(max_grad_norm=torch.inf)
    for parameter in model.parameters():
        parameter.grad.fill_(2.0**63.9)
    optimizer.step()
    assert model.forward.runtime.grad_norm.isinf() and not optimizer.step_was_skipped
    assert all((parameter.grad == 2.0**63.9).all() for parameter in model.parameters())


class TestInTheStep:
    """``prepare(..., max_grad_norm=...)``."""

    def train(self, precision: str, by: Callable[..., Tensor] | None, factors: list[float], **settings: Any) -> Any:
        torch.manual_seed(0)
        model: Any = Using(lambda m, x: m.second(m.first(x).tanh()), first=linear(), second=nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        model, optimizer = hf_mp.prepare(model, optimizer, precision, **settings)
        norms = []
        for factor in factors:
            for _ in range(2):
                (model(torch.randn(3, 8)).square().mean() * factor).backward()
            given = None if by is None else by(model, optimizer, 0.01)
            optimizer.step()
            norms.append(model.forward.runtime.grad_norm if given is None else given)
            optimizer.zero_grad()
        masters = [getattr(optimizer, "master", Tensor.detach)(parameter) for parameter in model.parameters()]
        return norms, masters, model.forward.runtime.stats

    @by_precision
    def test_weights_are_bit_for_bit_those_of_clipping_before_it(self, precision: str) -> None:
        factors = [1.0, torch.inf, 1e-9, 3.0, torch.nan, 1e30, 1.0]  # 1e-9 is below the norm; BF16 holds 1e30,
        ours = self.train(precision, None, factors, max_grad_norm=0.01)
        theirs = self.train(precision, clip, factors)
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
        assert same(ours[1], theirs[1]) and ours[2] == theirs[2]
        assert not ours[0][5].isfinite() and ours[2].skipped_steps == (
            2 if precision.startswith("bf16") else 3
        )  # no square
        assert not same(ours[1], self.train(precision, lambda *given: torch.zeros(()), factors)[1])

    @by_precision
    def test_infinity_only_measures(self, precision: str) -> None:
        norms, masters, _ = self.train(precision, None, [1.0, 2.0], max_grad_norm=torch.inf)
        measured = lambda model, optimizer, max_norm: clip(model, optimizer, torch.inf)  # noqa: E731
        expected, unclipped, _ = self.train(precision, measured, [1.0, 2.0])
        assert same(norms, expected) and same(masters, unclipped) and all(norm > 0 for norm in norms)

    @pytest.mark.parametrize("max_norm", [1.0, torch.inf])
    @by_precision
    def test_what_overflows_in_another_optimizer_skips_nothing(self, precision: str, max_norm: float) -> None:
        model: Any = Using(lambda m, x: (m.first(x), m.second(x)), first=linear(), second=linear())
        runtime = hf_mp.MixedPrecision(precision, max_grad_norm=max_norm)
        runtime.attach(model)
        optimizers = [
            runtime.attach_optimizer(torch.optim.SGD(part.parameters(), 1.0)) for part in (model.first, model.second)
        ]
        first, second = model(torch.randn(3, 8))
        (first.sum() + second.sum() * torch.inf).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, True]

    def test_two_models_of_one_optimizer_are_clipped_once(self) -> None:
        models = linear(), linear()
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 1.0)
        runtimes = [hf_mp.MixedPrecision("fp16", max_grad_norm=0.01) for _ in models]
        for runtime, model in zip(runtimes, models, strict=True):
            runtime.attach(model)
            runtime.attach_optimizer(optimizer)
        models[1](models[0](torch.randn(3, 8))).square().mean().backward()
        expected = get_total_norm([p.grad for p in optimizer.param_groups[0]["params"]])
        before = copies(optimizer.param_groups[0]["params"])
        optimizer.step()
        steps = [old - new.detach() for old, new in zip(before, optimizer.param_groups[0]["params"], strict=True)]
        assert get_total_norm(steps) == pytest.approx(0.01, rel=1e-3)
        assert [runtime.grad_norm for runtime in runtimes] == [expected, expected]

    def test_gradients_of_which_the_norm_is_not_known_are_measured_anew(self) -> None:
        model, _ = after_backward()
        hf_mp.detach(model)
        model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 1.0), "bf16", max_grad_norm=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = copies(model.parameters())
        optimizer.step()
        steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
        assert get_total_norm(steps) == pytest.approx(1e-3, rel=1e-3)
        assert model.forward.runtime.grad_norm == sum(p.numel() for p in model.parameters()) ** 0.5
