"""Products of stacked experts under autocast alone, in the spelling of torch and in that of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # registers its product, which the compiler is given
from tiny import saved_tensors
from torch import Tensor
from torch.nn import functional as F

import hf_mp

pytestmark = pytest.mark.usefixtures("nothing_is_small")

SPELLINGS = {
    "torch": F.grouped_mm,
    "private": torch._grouped_mm,
    "transformers": torch.ops.transformers.grouped_mm_fallback,
}
CASES = [(name, False) for name in SPELLINGS] + [("transformers", True)]


def reference(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends]
    return torch.cat([x[start:end] @ one for start, end, one in zip(starts, ends, weight, strict=False)])


@pytest.mark.parametrize("ends", [[3, 7, 12], [5, 5, 12], [0, 12, 12]])
@pytest.mark.parametrize(("spelling", "is_compiled"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_lowered_and_saves_16_bits(dtype: torch.dtype, spelling: str, is_compiled: bool, ends: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(12, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    offsets = torch.tensor(ends, dtype=torch.int32)

    def multiply(x: Tensor, weight: Tensor) -> Any:
        with hf_mp.autocast(dtype):
            return SPELLINGS[spelling](x, weight, offs=offsets)

    with saved_tensors() as saved:
        found = (torch.compile(multiply, backend="aot_eager") if is_compiled else multiply)(x, weight)
    assert found.dtype is dtype
    wide = [tensor.detach().to(dtype).float().requires_grad_() for tensor in (x, weight)]
    expected = reference(*wide, ends)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=unit, atol=unit)
    gradient = torch.randn_like(expected).to(dtype)
    ours = torch.autograd.grad(found, [x, weight], gradient)
    theirs = torch.autograd.grad(expected, wide, gradient.float())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=unit, atol=8 * unit)  # sums of up to 16 products
    if not is_compiled:  # the compiler decides by itself what it keeps
        assert {tensor.dtype for tensor in saved if tensor.is_floating_point()} == {dtype}
