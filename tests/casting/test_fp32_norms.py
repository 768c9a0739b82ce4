"""Norms of Transformers that run past the mode: the same bits, and only where nobody would see or change a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Using, linear
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

import hf_mp
from hf_mp.casting.replacements.fp32_norms import FP32_NORMS, FP32Norm, computes_in_fp32
from hf_mp.weights.region import Region

KINDS: list[Callable[[int], nn.Module]] = [LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, Llama4TextRMSNorm, CohereLayerNorm]
WIDTH = 16


def made(kind: Callable[[int], nn.Module]) -> Any:
    def use(m: Any, x: Tensor) -> Tensor:
        hidden = m.linear(x)
        return m.norm(hidden if m.offset is None else m.offset)

    return Using(use, linear=linear(WIDTH, WIDTH), norm=kind(WIDTH), offset=None)  # which comes from outside


class Local(LlamaRMSNorm):
    """Of nobody's library: its code may be anything."""


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each question whether a norm may run past the mode, the answer."""
    answers: list[bool] = []
    original = Region.may_bypass

    def may_bypass(self: Region, *tensors: Any) -> bool:
        answers.append(original(self, *tensors))
        return answers[-1]

    monkeypatch.setattr(Region, "may_bypass", may_bypass)
    return answers


def attached(kind: Callable[[int], nn.Module], precision: str = "bf16", **settings: Any) -> Any:
    return hf_mp.MixedPrecision(precision, **settings).attach(made(kind))


def run(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The output, without and with grad, and the gradients."""
    with torch.no_grad():
        model(x)  # the first forward shows what is done with the weights
        read = model(x)
    output = model(x)
    output.square().sum().backward()
    return read, output.detach(), *(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_norm_that_asks(kind: Any, precision: str, past: list[bool]) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1] = 2.0**-140, 0.0
    model, asking = attached(kind, precision), attached(kind, precision)
    FP32_NORMS.remove(asking)
    assert isinstance(model.norm.forward, FP32Norm) and "forward" not in vars(asking.norm)
    for left, right in zip(run(model, x), run(asking, x), strict=True):
        assert left.dtype is right.dtype and torch.equal(left, right)
    assert past == [False, True, False]  # the first forward of each kind is looked at


@pytest.mark.parametrize("kind", [nn.LayerNorm, ChameleonLayerNorm, MambaRMSNormGated, Local])
def test_other_norms_are_left_alone(kind: Any) -> None:
    assert not computes_in_fp32(kind)


def test_detaching_gives_the_norm_its_own_forward() -> None:
    precision = hf_mp.MixedPrecision("bf16")
    model = precision.attach(made(LlamaRMSNorm))
    precision.detach()
    assert "forward" not in vars(model.norm)


def test_a_user_who_looks_sees_every_call(past: list[bool]) -> None:
    explained = hf_mp.autocast.explain(attached(LlamaRMSNorm), torch.randn(2, WIDTH))
    assert "pow" in str(explained) and past == [False]


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.rsqrt
        return func(*args, **(kwargs or {}))


def test_another_mode_sees_every_call(past: list[bool]) -> None:
    with Counting() as mode:
        attached(LlamaRMSNorm)(torch.randn(2, WIDTH))
    assert mode.calls == 1 and past == [False]


def test_rules_hold(past: list[bool]) -> None:
    model = attached(LlamaRMSNorm, rules={torch.rsqrt: "lower_precision"})
    assert not torch.equal(model(x := torch.randn(2, WIDTH)), attached(LlamaRMSNorm)(x))
    model = attached(LlamaRMSNorm, rules={"norm": "fp32"})
    past.clear()
    model(torch.randn(2, WIDTH))
    assert past == []  # none in the island of a module


def test_what_comes_from_outside_has_its_border(past: list[bool]) -> None:
    model = attached(LlamaRMSNorm, "params=fp32,compute=bf16,loss_scale=1024")
    model.offset = leaf = torch.randn(2, WIDTH, requires_grad=True)
    model(torch.randn(2, WIDTH)).square().sum().backward()
    plain = made(LlamaRMSNorm)
    plain.offset = expected = leaf.detach().clone().requires_grad_()
    plain(torch.randn(2, WIDTH)).square().sum().backward()
    assert past == [False]
    torch.testing.assert_close(leaf.grad, expected.grad)


def test_it_compiles_as_the_norm_itself(past: list[bool]) -> None:
    torch._dynamo.reset()
    model = attached(LlamaRMSNorm)
    x = torch.randn(2, WIDTH)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), expected)
    assert past == [False]  # of the first forward, which is looked at
