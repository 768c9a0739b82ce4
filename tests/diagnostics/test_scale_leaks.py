"""Leaks of the loss scale are found by what they do to gradients, and reported by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Using
from torch import Tensor, nn

import hf_mp
from hf_mp import DynamicLossScaler, MixedPrecision, StaticLossScaler

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.last = nn.LayerNorm(6)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.last(F.dropout(self.norm(self.first(x)), 0.3)))
        self.features.append(hidden)
        return self.second(hidden)


def with_hidden_features(model: Body) -> Any:
    """A loss from what forward() returns, and from a feature that it does not return."""

    def loss(outputs: Tensor) -> Tensor:
        hidden = model.features[-1].float()
        model.features.clear()
        return outputs.float().pow(2).mean() + hidden.pow(2).mean()

    return loss


@pytest.mark.parametrize("scaler", [StaticLossScaler(1024.0), DynamicLossScaler("cpu", 2.0**24)])
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_a_model_without_leaks_passes_and_is_left_as_it_was(precision: str, scaler: Any) -> None:
    model = Body()
    runtime = MixedPrecision(precision, loss_scaler=scaler)
    runtime.attach(model)
    model(X).float().sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random, state = torch.get_rng_state(), scaler.state
    hf_mp.check_gradients(model, X, lambda outputs: outputs.float().pow(2).mean())
    hf_mp.check_gradients(runtime, (X,), lambda outputs: outputs.float().abs().mean())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(found, gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random) and scaler.state is state


def test_a_feature_that_a_hook_or_attribute_kept_is_found() -> None:
    model = Body()
    MixedPrecision("fp16").attach(model)
    with pytest.raises(hf_mp.ScaleLeakError, match=r"first\.weight \(.*last\.bias \([^)]*\)\. The loss.*return it"):
        hf_mp.check_gradients(model, X, with_hidden_features(model))


class _Accumulating(torch.autograd.Function):
    """Adds to the gradient of its weight itself, as a fused accumulation of gradients does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: list[nn.Parameter]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight[0]
        return x * weight[0].detach().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            own = (gradient.float() * x.float()).sum(0)
            ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return gradient * ctx.weight.detach().to(gradient.dtype), None


class _AddingInPlace(_Accumulating):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.add_((gradient.float() * x.float()).sum(0))
        return gradient * ctx.weight.detach().to(gradient.dtype), None


def _accumulating(function: type[_Accumulating]) -> Any:
    model: Any = nn.Sequential(nn.Linear(6, 6))
    model.scale = weight = nn.Parameter(torch.ones(6))
    model.forward = lambda x: function.apply(model[0](x), [weight])
    return MixedPrecision("fp16").attach(model)


def test_a_gradient_that_backward_adds_in_place_has_the_scale_in_it() -> None:
    with pytest.raises(hf_mp.ScaleLeakError, match=r": scale \([^)]*\)\. These are multiplied by the loss scale.*Call"):
        hf_mp.check_gradients(_accumulating(_AddingInPlace), X, lambda outputs: outputs.float().pow(2).mean())


def test_a_gradient_that_backward_writes_itself_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"_Accumulating wrote \.grad of a weight"):
        _accumulating(_Accumulating)(X).sum().backward()


@pytest.mark.parametrize("bound", [1e-3, 1.0, 30.0])
def test_a_hook_that_is_not_linear_is_told_apart(bound: float) -> None:
    def clamp(gradient: Tensor) -> Tensor:
        return gradient.clamp(-bound, bound)

    def use(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x)
        hidden.register_hook(clamp if m.is_plain else hf_mp.unscaled_gradients(clamp))
        return m.last(hidden)

    model = Using(use, first=nn.Linear(6, 6), last=nn.Linear(6, 6), is_plain=True)
    MixedPrecision("fp16").attach(model)
    with pytest.raises(hf_mp.ScaleLeakError, match=r": first\.weight \(.*is not linear.*unscaled_gradients"):
        hf_mp.check_gradients(model, X, lambda outputs: outputs.float().pow(2).mean())
    model.is_plain = False
    hf_mp.check_gradients(model, X, lambda outputs: outputs.float().pow(2).mean())


def test_where_nothing_is_scaled_nothing_is_run() -> None:
    model = Body()
    MixedPrecision("bf16").attach(model)
    hf_mp.check_gradients(model, X, lambda outputs: pytest.fail("it was run"))


def test_a_loss_that_is_inf_at_every_scale_is_no_leak() -> None:
    model, scales = Body(), list[float]()
    runtime = MixedPrecision("fp16", loss_scaler=StaticLossScaler(2.0**20))
    runtime.attach(model)

    def loss(outputs: Tensor) -> Tensor:
        scales.append(runtime.scaler.get_scale())
        return outputs.sum() * torch.inf

    hf_mp.check_gradients(model, X, loss)
    assert scales == [2.0**20, 2.0**12, 2.0**4, 2.0**-4]


def test_it_wants_an_attached_model() -> None:
    with pytest.raises(ValueError, match="no mixed precision is attached"):
        hf_mp.check_gradients(nn.Linear(2, 2), X)


def test_it_wants_a_loss() -> None:
    model = Body()
    MixedPrecision("fp16").attach(model)
    with pytest.raises(ValueError, match="Body returned no loss: put labels into"):
        hf_mp.check_gradients(model, X)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_gradient_that_cancels_out_is_no_leak(size: float) -> None:
    """That of a key's bias is zero but for rounding errors, which grow as the scale shrinks."""
    torch.manual_seed(0)
    model = Attention()
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    hf_mp.check_gradients(model, torch.randn(8, 2, 12, 16), lambda outputs: size * outputs.square().mean())
