"""``hf_mp.detach(model)``: for whoever has a model and not what attached mixed precision to it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

import hf_mp
from hf_mp.policy import mixed_presets
from hf_mp.step.forward import AttachedForward

# FP16 splits what is close to 0 into less than 32 bits.
CLOSE = {"atol": 1e-9, "rtol": 0.0}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def prepared(
    precision: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """The model, its optimizer, and the one to step."""
    model = make().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    return (model, optimizer, hf_mp.prepare(model, optimizer, precision)[1])


def check_ordinary(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for ours, plain in zip(model.modules(), make().modules(), strict=True):
        assert set(vars(ours)) == set(vars(plain))
        assert not any(hooks for name, hooks in vars(ours).items() if name.endswith("_hooks"))
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and parameter.dtype is torch.float32
        assert not vars(parameter) and not parameter._backward_hooks
        assert torch.allclose(parameter, expected[name], **CLOSE)
    plain = make()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 8)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", mixed_presets())
def test_of_what_prepare_attached(precision: str, dtype: torch.dtype) -> None:
    expected = make().to(dtype).float().state_dict()
    model, optimizer, _ = prepared(precision, dtype)
    with pytest.raises(ValueError, match=r"attached to a MixedPrecision already"):
        hf_mp.prepare(model, optimizer, "bf16")
    runtime = weakref.ref(model.forward.runtime)
    assert hf_mp.detach(model) is model
    check_ordinary(model, expected)
    gc.collect()
    assert runtime() is None
    assert "step" not in vars(optimizer) and not hasattr(optimizer, "step_was_skipped")
    model, stepped = hf_mp.prepare(model, optimizer, precision)
    model(torch.randn(2, 8)).sum().backward()
    stepped.step()
    assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"])


@pytest.mark.parametrize("precision", mixed_presets())
def test_the_optimizer_of_ones_own_steps_afterwards(precision: str) -> None:
    model, own, _ = prepared(precision)
    model(torch.randn(2, 8)).sum().backward()
    hf_mp.detach(model)
    before = model.state_dict()["0.weight"].clone()
    own.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    own.step()
    assert not torch.equal(model.state_dict()["0.weight"], before)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("precision", mixed_presets())
def test_of_a_deep_copy(precision: str, has_run: bool) -> None:
    expected = make().state_dict()
    model, _, optimizer = prepared(precision)
    copied = copy.deepcopy(model)
    if has_run:
        copied(torch.randn(2, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"call hf_mp\.detach\(model\) first"):
        hf_mp.MixedPrecision(precision).attach(copied)
    hf_mp.detach(copied)
    check_ordinary(copied, expected)
    gone = weakref.ref(copied)
    del copied
    gc.collect()
    assert gone() is None
    assert isinstance(model.forward, AttachedForward)  # the original trains on
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped  # type: ignore[attr-defined]


def test_of_a_part_a_whole_and_a_compiled_model() -> None:
    for attached, given in (
        (lambda whole: whole, lambda whole: whole[0]),
        (lambda whole: whole[0], lambda whole: whole),
        (lambda whole: whole, lambda whole: torch.compile(whole, backend="eager")),
    ):
        whole = nn.Sequential(GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)))
        hf_mp.MixedPrecision("fp16").attach(attached(whole))
        hf_mp.detach(given(whole))
        assert not any("forward" in vars(module) for module in whole.modules())


def test_under_a_forward_that_a_library_put_on() -> None:
    model = make()
    hf_mp.MixedPrecision("fp16").attach(model)
    attached = model.forward

    @functools.wraps(attached)
    def of_a_library(x: Tensor) -> Tensor:
        return attached(x)

    model.forward = of_a_library  # type: ignore[assignment]
    x = torch.randn(2, 8)
    rounded = model(x)
    assert hf_mp.detach(model).forward is of_a_library
    assert torch.equal(model(x), make()(x)) and not torch.equal(model(x), rounded)
    hf_mp.MixedPrecision("fp16").attach(model)
    assert torch.equal(model(x), rounded)


def test_where_nothing_is_attached() -> None:
    model = make()
    assert hf_mp.detach(model) is model
    check_ordinary(hf_mp.detach(hf_mp.MixedPrecision("fp32").attach(model)), make().state_dict())
    with pytest.raises(TypeError, match=r"detach takes a model, not AdamW: what"):
        hf_mp.detach(torch.optim.AdamW(model.parameters()))  # type: ignore[type-var]
