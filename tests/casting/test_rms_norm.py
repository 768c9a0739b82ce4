"""RMSNorm, which torch's CUDA autocast runs in FP32 since 2.12: in 16 bits where input and weight have them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_mp
from hf_mp.casting.tables import CUDA_TABLES

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("input", "weight", "expected"),
    [(FP16, FP16, FP16), (FP16, None, FP16), (FP16, FP32, FP32), (FP32, FP16, FP32), (FP32, None, FP32)],
)
def test_the_dtype_is_the_one_that_input_and_weight_agree_on(
    input: torch.dtype, weight: torch.dtype | None, expected: torch.dtype
) -> None:
    x, scale = torch.randn(4, 8, dtype=input), None if weight is None else torch.ones(8, dtype=weight)
    norm = nn.RMSNorm(8, elementwise_affine=weight is not None, dtype=weight)
    for tables, result in (("compact", expected), ("cuda", FP32)):
        if tables == "cuda" and "rms_norm" not in CUDA_TABLES.fp32:
            continue  # torch 2.11: in no list
        with hf_mp.autocast(FP16, tables=tables):  # type: ignore[arg-type]
            found = norm(x), F.rms_norm(x, (8,), scale), torch.rms_norm(x, [8], scale)
        assert {one.dtype for one in found} == {result}


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_16_bits_give_what_fp32_gives_after_rounding(dtype: torch.dtype) -> None:
    results = []
    for wide in (False, True):
        torch.manual_seed(0)
        x, weight = torch.randn(64, 96).to(dtype).requires_grad_(), torch.rand(96).to(dtype).requires_grad_()
        with hf_mp.autocast(dtype, tables="compact"):
            out = F.rms_norm(x.float(), (96,), weight.float()).to(dtype) if wide else F.rms_norm(x, (96,), weight)
        results.append([out, *torch.autograd.grad(out, [x, weight], torch.randn(64, 96).to(dtype))])
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


class _Kernel(torch.autograd.Function):
    """An attention of another library: it takes one dtype, of 16 bits, as FlashAttention does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not query.dtype == key.dtype == value.dtype != FP32:
            raise TypeError(f"{query.dtype}, {key.dtype}, {value.dtype}: FlashAttention only supports fp16 and bf16")
        ctx.save_for_backward(query, key, value)
        return F.scaled_dot_product_attention(query, key, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            return torch.autograd.grad(F.scaled_dot_product_attention(*inputs), inputs, grad)


class Attention(nn.Module):
    """As diffusers' Flux has it: queries and keys are normed, values are not."""

    def __init__(self, attend: Any, affine: bool = True) -> None:
        super().__init__()
        self.attend = attend
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(32, 32) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(8, eps=1e-6, elementwise_affine=affine) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (made(x).unflatten(-1, (4, 8)) for made in (self.to_q, self.to_k, self.to_v))
        query, key = self.norm_q(query), self.norm_k(key)
        return self.to_out(
            self.attend(*(one.transpose(1, 2) for one in (query, key, value))).transpose(1, 2).flatten(2)
        )


def losses_and_gradients(model: nn.Module, precision: str) -> tuple[list[float], list[Tensor]]:
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    found = []
    for step in range(3):  # the first forward has the mode, the next ones the dispatcher's kernels
        loss = model(torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad.float() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, gradients


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, _Kernel.apply], ids=["torchs", "another's"])
@pytest.mark.parametrize(
    ("precision", "affine"), [("fp16-lean", True), ("bf16-lean", True), ("fp16", False), ("bf16", False)]
)
def test_normed_queries_and_keys_meet_values_that_are_not(attend: Any, precision: str, affine: bool) -> None:
    torch.manual_seed(0)
    model = Attention(attend, affine)
    exact = copy.deepcopy(model)
    exact.attend = F.scaled_dot_product_attention
    (found, gradients), (expected, true) = losses_and_gradients(model, precision), losses_and_gradients(exact, "fp32")
    rtol = 3e-3 if "fp16" in precision else 3e-2
    assert found == pytest.approx(expected, rel=rtol)
    for one, other in zip(gradients, true, strict=True):
        assert (one - other).norm() <= 10 * rtol * max(other.norm(), 1e-3)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fp32_weights_are_rounded_by_a_rule(precision: str) -> None:
    model = Attention(_Kernel.apply)
    with pytest.raises(TypeError, match=r"float32, torch\.float32, torch\.\w*16: Flash"):
        losses_and_gradients(copy.deepcopy(model), precision)
    runtime = hf_mp.MixedPrecision(precision, rules={torch.rms_norm: "lower_precision"})
    runtime.attach(model)
    model(torch.randn(2, 16, 32)).sum().backward()
    assert model.norm_q.weight.grad is not None and model.norm_q.weight.grad.dtype is FP32
