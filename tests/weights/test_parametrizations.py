"""torch's parametrizations of a weight, and other ops of 16-bit weights that torch cannot compute in 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import hf_mp

SIZE = 24
PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    **{
        f"{name}{'' if has_base else ' without a base'}": lambda layer, name=name, has_base=has_base: orthogonal(
            layer, "weight", name, use_trivialization=has_base
        )
        for name in ("matrix_exp", "cayley", "householder")
        for has_base in (True, False)
    },
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
}


class QR(nn.Module):
    """A parametrization of a user, by another op of linear algebra."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.linalg.qr(weight.mT).Q.mT


PARAMETRIZATIONS["qr"] = lambda layer: parametrize.register_parametrization(layer, "weight", QR())


def parametrized(kind: str, rows: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, SIZE), nn.Tanh(), nn.Linear(SIZE, rows), nn.Tanh(), nn.Linear(rows, 4))
    PARAMETRIZATIONS[kind](model[2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()  # spectral_norm estimates anew in each training forward


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("rows", [SIZE, SIZE // 2])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_gradients_are_those_of_fp32(kind: str, rows: int, precision: str) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    reference = parametrized(kind, rows)
    model = copy.deepcopy(reference)
    reference(x).square().mean().backward()
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), precision)
    # A few roundings of values and gradients; in the 16 bits of the weight the gradients were off by 20% and more.
    tolerance = 8 * torch.finfo(torch.float16 if precision.startswith("fp16") else torch.bfloat16).eps
    for _ in range(2):  # kernels make the calls of the second forward
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            error = (parameter.grad - expected.grad).norm() / expected.grad.norm()
            assert error < tolerance, name
        optimizer.step()
    assert not optimizer.step_was_skipped


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix_exp": torch.matrix_exp,
    "solve": lambda w: torch.linalg.solve(w, w.detach().mT),
    "inv": torch.linalg.inv,
    "complex": lambda w: torch.complex(w, w.detach()).abs(),
    "polar": lambda w: torch.polar(w, w.detach()).real,
    "view_as_complex": lambda w: torch.view_as_complex(w.unflatten(-1, (-1, 2))).abs(),
    "fake quantization": lambda w: torch.fake_quantize_per_channel_affine(
        w, torch.full((4,), 0.25), torch.zeros(4, dtype=torch.int), 0, -128, 127
    ),
    "learned fake quantization": lambda w: torch._fake_quantize_learnable_per_tensor_affine(
        w, w.detach()[0, :1], torch.zeros(1), -128, 127, 1.0
    ),
    "learned fake quantization of channels": lambda w: torch._fake_quantize_learnable_per_channel_affine(
        w, w.detach()[0], torch.zeros(4), 0, -128, 127, 1.0
    ),
}


@pytest.mark.parametrize("tables", ["cuda", "cpu", "compact"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_what_16_bits_spoil_is_computed_in_fp32(name: str, dtype: torch.dtype, tables: str) -> None:
    rounded = (torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) + torch.eye(4)).to(dtype)
    weight, reference = rounded.clone().requires_grad_(), rounded.float().requires_grad_()
    with hf_mp.autocast(dtype, tables=tables):
        found = OPS[name](weight)
    expected = OPS[name](reference)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, reference.grad.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
