"""``hf_mp.unscaled_gradients``: hooks that are not linear in the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Using, linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_mp
from hf_mp import MixedPrecision

PRECISIONS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
BOUND = 0.01


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-BOUND, BOUND)


def gradients(use: Callable[[Any, Tensor], Tensor], precision: str, prepare: Any = None) -> list[Tensor]:
    """Those of the second backward: of the first one, a mode sees the calls."""
    model: Any = Using(use, first=linear(), last=linear())
    model.external = [torch.ones(8, requires_grad=True)]
    if prepare is not None:
        prepare(model)
    if precision != "fp32":
        MixedPrecision(precision).attach(model)
    for _ in range(2):
        model.external[0].grad = None
        model.zero_grad()
        model(X).square().mean().backward()
    external = model.external[0].grad
    return [p.grad.clone() for p in model.parameters()] + ([] if external is None else [external])


def equal(found: list[Tensor], expected: list[Tensor], precision: str) -> bool:
    tolerance = 1e-2 if precision.startswith("fp16") else 5e-2
    assert len(found) == len(expected)
    return all([(a - b).norm() <= tolerance * b.norm() for a, b in zip(found, expected, strict=True)])


def on_an_activation(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    if hidden.requires_grad:  # not while a reentrant checkpoint runs for the first time
        hidden.register_hook(hf_mp.unscaled_gradients(clamp))
    last: Tensor = model.last(hidden)
    return last


def in_a_checkpoint(model: Any, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(on_an_activation, model, model.first(x), use_reentrant=True)
    return found


def on_a_weight(model: Any, x: Tensor) -> Tensor:
    """What the module holds in a forward."""
    weight = model.first.weight * 1.0
    weight.register_hook(hf_mp.unscaled_gradients(clamp))
    last: Tensor = model.last(x @ weight.t() + model.first.bias)
    return last


def on_an_external_leaf(model: Any, x: Tensor) -> Tensor:
    handle = model.external[0].register_hook(hf_mp.unscaled_gradients(clamp))
    model.handles = [*getattr(model, "handles", []), handle]
    for old in model.handles[:-1]:
        old.remove()
    last: Tensor = model.last(model.first(x) * model.external[0])
    return last


def that_measures(model: Any, x: Tensor) -> Tensor:
    """Returns None, and so leaves the gradient as it is."""
    hidden = model.first(x)
    hidden.register_hook(hf_mp.unscaled_gradients(lambda gradient: model.seen.append(gradient)))
    last: Tensor = model.last(hidden)
    return last


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("use", [on_an_activation, in_a_checkpoint, on_a_weight, on_an_external_leaf])
def test_a_hook_of_a_tensor(use: Any, precision: str) -> None:
    found = gradients(use, precision)
    expected = gradients(use, "fp32")
    plain = gradients(lambda m, x: m.last(m.first(x)), "fp32")
    assert equal(found, expected, precision)
    assert not equal(expected[:2], plain[:2], precision) or use is on_an_external_leaf


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_hook_sees_is_fp32_and_unscaled(precision: str) -> None:
    seen: list[Tensor] = []
    gradients(that_measures, precision, lambda model: setattr(model, "seen", seen))
    expected: list[Tensor] = []
    gradients(that_measures, "fp32", lambda model: setattr(model, "seen", expected))
    assert len(seen) == 2 and equal(seen, expected, precision)
    assert precision.startswith("bf16") or {one.dtype for one in seen} == {torch.float32}


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hook_of_a_module(precision: str, register: str) -> None:
    def hook(module: nn.Module, *gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else clamp(one) for one in gradients[0])

    def prepare(model: Any) -> None:
        getattr(model.last, register)(hf_mp.unscaled_gradients(hook))

    def use(model: Any, x: Tensor) -> Tensor:
        last: Tensor = model.last(model.first(x))
        return last

    assert equal(gradients(use, precision, prepare), gradients(use, "fp32", prepare), precision)


def test_a_hook_of_the_whole_model_sees_what_its_caller_sees() -> None:
    seen: list[Tensor] = []
    model = MixedPrecision("fp16").attach(linear())
    model.register_full_backward_hook(hf_mp.unscaled_gradients(lambda module, inputs, outputs: seen.extend(outputs)))
    model(X.clone().requires_grad_()).sum().backward()
    assert torch.equal(seen[0], torch.ones(4, 8))


def test_a_hook_of_a_tensor_is_decorated_in_the_forward() -> None:
    decorated = hf_mp.unscaled_gradients(clamp)

    def use(model: Any, x: Tensor) -> Tensor:
        hidden = model.first(x)
        hidden.register_hook(decorated)
        last: Tensor = model.last(hidden)
        return last

    gradients(use, "bf16")  # nothing is scaled
    with pytest.raises(RuntimeError, match=r"decorated .* outside of a forward of the attached model.*in forward\(\)"):
        gradients(use, "fp16")


def test_two_attached_models_have_a_scale_each() -> None:
    """The gradient of one passes through the other."""
    found = []
    for scales in ((2.0**4, 2.0**10), (2.0**8, 2.0**3)):
        models: list[Any] = [Using(on_an_activation, first=linear(), last=linear()) for _ in scales]
        for model, scale in zip(models, scales, strict=True):
            MixedPrecision("fp16", loss_scaler=hf_mp.StaticLossScaler(scale)).attach(model)
        models[1](models[0](X)).square().mean().backward()
        found.append([p.grad for model in models for p in model.parameters()])
    assert equal(*found, "fp16")


def test_a_backward_that_raised_scales_no_other_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    handle = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    x = torch.ones(2, 4, requires_grad=True)
    y = x * 2
    y.register_hook(hf_mp.unscaled_gradients(clamp))  # outside of a forward, and of any attached model
    (y * 100).sum().backward()
    assert torch.equal(x.grad, 2 * clamp(torch.full((2, 4), 100.0)))  # type: ignore[arg-type]
