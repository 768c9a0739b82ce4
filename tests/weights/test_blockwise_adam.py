"""bitsandbytes' 8-bit Adam over split parameters, slice by slice, against its own step over whole FP32 weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_mp import MasterWeightOptimizer
from hf_mp.weights import blockwise_adam
from hf_mp.weights.lean.split_parameter import SplitParameter, raw_gradient

bnb = pytest.importorskip("bitsandbytes")

SHAPES = [(37, 41), (512,), (3, 256), (1, 1), (0, 4)]  # several slices of 512 and an end, a whole one, small, empty
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, weight_decay=0.1, min_8bit_size=64),
    "Adam8bit": lambda p: bnb.optim.Adam8bit(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, min_8bit_size=64),
    "AdamW8bit, large only": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, min_8bit_size=1024),
    "LAMB8bit": lambda p: bnb.optim.LAMB8bit(p, lr=1e-2, min_8bit_size=64),  # looks at the whole of each
}


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blockwise_adam._ELEMENTS, "cpu", 512)


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    torch.manual_seed(100 + step)
    found = [torch.randn(shape) * 10.0 ** -(step % 4) for shape in SHAPES]
    found[0][0, :3] = torch.tensor([0.0, 6e-8, math.inf if step == 3 else 1.0])
    return [gradient.bfloat16() for gradient in found]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_bits_are_those_of_its_own_step(name: str, scale: float) -> None:
    # BF16 and 16 bits more are FP32 exactly.
    split, whole = weights(torch.bfloat16), [nn.Parameter(weight.float()) for weight in weights(torch.bfloat16)]
    ours, peer = MasterWeightOptimizer(OPTIMIZERS[name](split), layout="split"), OPTIMIZERS[name](whole)
    for step in range(5):
        for parameter, reference, gradient in zip(split, whole, gradients(step), strict=True):
            assert isinstance(parameter, SplitParameter)
            assert parameter.take_scaled_gradient(gradient, torch.tensor([1 / scale]))
            reference.grad = gradient.float() * (1 / scale)
        if step == 2:  # a schedule
            ours.param_groups[0]["lr"] = peer.param_groups[0]["lr"] = 3e-3
        ours.step()
        peer.step()
        for parameter, reference in zip(split, whole, strict=True):
            torch.testing.assert_close(ours.master(parameter), reference.detach(), rtol=0, atol=0, equal_nan=True)
            assert raw_gradient(parameter) is None
            for key, value in peer.state[reference].items():
                torch.testing.assert_close(ours.state[parameter][key], value, rtol=0, atol=0, equal_nan=True)


def test_large_ones_are_taken_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    merge = blockwise_adam.merge
    monkeypatch.setattr(blockwise_adam, "merge", lambda *halves: sizes.append(halves[0].numel()) or merge(*halves))
    split = weights(torch.bfloat16)
    optimizer = MasterWeightOptimizer(OPTIMIZERS["AdamW8bit"](split), layout="split")
    for parameter in split:
        parameter.grad = torch.ones(parameter.shape)
    optimizer.step()
    assert sizes == [512, 512, 37 * 41 - 1024, 512, 512, 256]


class Stepping(bnb.optim.AdamW8bit):  # type: ignore[misc]
    """One that looks at whole gradients before it steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.5, 0.5)
        return super().step(closure)


@pytest.mark.parametrize("case", ["lamb", "own step", "channels last"])
def test_what_is_left_to_the_optimizers_own_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_adam, "merge", lambda *halves: pytest.fail("taken slice by slice"))
    kinds: dict[str, Any] = {"lamb": bnb.optim.LAMB8bit, "own step": Stepping, "channels last": bnb.optim.AdamW8bit}
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 4, 4, 4).bfloat16())
    ours = MasterWeightOptimizer(kinds[case]([parameter], lr=1e-2, min_8bit_size=64), layout="split")
    if case == "channels last":
        parameter.data = parameter.data.to(memory_format=torch.channels_last)
    before = ours.master(parameter).clone()
    parameter.grad = torch.linspace(-1, 1, 512).view(8, 4, 4, 4)
    ours.step()
    assert not torch.equal(ours.master(parameter), before)
    assert raw_gradient(parameter) is None


def test_moments_of_another_model_are_refused() -> None:
    parameter = nn.Parameter(torch.randn(8, 64).bfloat16())
    ours = MasterWeightOptimizer(OPTIMIZERS["AdamW8bit"]([parameter]), layout="split")
    parameter.grad = torch.ones(8, 64)
    ours.step()
    ours.state[parameter]["state1"] = ours.state[parameter]["state1"].view(64, 8)
    parameter.grad = torch.ones(8, 64)
    with pytest.raises(ValueError, match=r"state1 has shape \(64, 8\), but its parameter \(8, 64\): the state of"):
        ours.step()
