"""The update on a CPU against its reference, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from adamw_references import adamw_by_torch
from torch import Tensor

from hf_mp.kernels import adamw as module
from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_
from hf_mp.kernels.split import FP16_LARGEST_MASTER, merge, split

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.1)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS_PER_THREAD", 64)
    monkeypatch.setattr(module, "_SMALL_ELEMENTS", 16)
    yield


def weights(count: int) -> Tensor:
    """FP32 of every size that FP16 has: large, ordinary, subnormal, zeros of both signs."""
    values = torch.randn(count) * 10.0 ** torch.randint(-9, 5, (count,))
    values[::7], values[3::7] = 0.0, -0.0
    return values


def split_tensors(values: Tensor, gradient: Tensor, dtype: torch.dtype) -> AdamWTensors:
    halves = split(values, dtype)
    moments = (torch.zeros(values.shape), torch.zeros(values.shape))
    return AdamWTensors(gradient, *moments, torch.zeros(()), None, *halves)


def clone(tensors: AdamWTensors) -> AdamWTensors:
    return AdamWTensors(*(None if tensor is None else tensor.clone() for tensor in tensors))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def check(tensors: AdamWTensors, settings: AdamWSettings = SETTINGS, steps: int = 3, **kwargs: Any) -> AdamWTensors:
    """Steps of both forms, which must leave the same bits; returns what the fast one left."""
    return check_together([tensors], settings, steps, **kwargs)[0]


def check_together(
    given: list[AdamWTensors], settings: AdamWSettings = SETTINGS, steps: int = 3, **kwargs: Any
) -> list[AdamWTensors]:
    """:func:`check` of parameters that are updated in one call."""
    fast, plain = [clone(tensors) for tensors in given], [clone(tensors) for tensors in given]
    for _ in range(steps):
        adamw_(fast, settings, **kwargs)
        for tensors in plain:
            adamw_by_torch(tensors, settings, **kwargs)
    for found, expected in zip(fast, plain, strict=True):
        assert_same_bits(found, expected)
    return fast


def assert_same_bits(fast: AdamWTensors, plain: AdamWTensors) -> None:
    for name, found, expected in zip(fast._fields, fast, plain, strict=True):
        if found is not None and expected is not None:
            same = bits(found) == bits(expected)
            if found.is_floating_point():  # which NaN it is, nobody says
                same |= found.isnan() & expected.isnan()
            assert same.all(), name


@every_dtype
@pytest.mark.parametrize("gradient_dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("count", [1, 15, 64, 65, 1000])
def test_every_size_and_gradient(count: int, gradient_dtype: torch.dtype, dtype: torch.dtype) -> None:
    tensors = split_tensors(weights(count), torch.randn(count).to(gradient_dtype), dtype)
    after = check(tensors, factor=torch.tensor([0.37 / 1024]))
    assert not torch.equal(after.exp_avg, tensors.exp_avg) and after.step == 3
    assert count < 64 or not torch.equal(bits(after.remainder), bits(tensors.remainder))  # type: ignore[arg-type]


@every_dtype
@pytest.mark.usefixtures("other_default_dtype")
def test_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    values = torch.linspace(-3.0, 3.0, 300, dtype=FP32)
    moments = (torch.zeros_like(values), torch.zeros_like(values), torch.zeros((), dtype=FP32))
    tensors = AdamWTensors(values.to(dtype), *moments, None, *split(values, dtype))
    after = check(tensors, factor=torch.full((1,), 0.37, dtype=FP32))
    assert not torch.equal(after.exp_avg, tensors.exp_avg)


@every_dtype
def test_whatever_the_default_device(dtype: torch.dtype) -> None:
    tensors, factor = split_tensors(weights(300), torch.randn(300).to(dtype), dtype), torch.tensor([0.37])
    with torch.device("meta"):
        after = check(tensors, factor=factor)
    assert not torch.equal(after.exp_avg, tensors.exp_avg)


@every_dtype
@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, weight_decay=0.0),
        replace(SETTINGS, lr=0.0),
        replace(SETTINGS, beta1=0.0, beta2=0.5, eps=1e-3),
    ],
    ids=["no decay", "no lr", "betas"],
)
def test_settings(settings: AdamWSettings, dtype: torch.dtype) -> None:
    check(split_tensors(weights(200), torch.randn(200).to(dtype), dtype), settings)


@every_dtype
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 2.0**-24, 0.0, -0.0])
@pytest.mark.parametrize("where", ["gradient", "weight"])
def test_special_values(where: str, poison: float, dtype: torch.dtype) -> None:
    values, gradient = weights(200), torch.randn(200).to(dtype)
    (gradient if where == "gradient" else values)[70] = poison
    check(split_tensors(values, gradient, dtype))


@every_dtype
@pytest.mark.parametrize("poison", [None, math.nan, math.inf, 2.0**-24])
def test_small_parameters_are_updated_together(poison: float | None, dtype: torch.dtype) -> None:
    shapes = [(1,), (15,), (3, 5), (), (0,), (7, 9), (65,), (2, 31), (64,), (5,)]
    given = [split_tensors(weights(math.prod(s)).view(s), torch.randn(s).to(dtype), dtype) for s in shapes]
    given[1] = given[1]._replace(gradient=given[1].gradient.float())  # settled by a reader
    given[5] = given[5]._replace(gradient=torch.randn(9, 7).to(dtype).t())
    other = torch.float16 if dtype is BF16 else BF16
    given.append(split_tensors(weights(9), torch.randn(9).to(other), other))
    if poison is not None:
        given[3].gradient.fill_(poison)
        given[7].gradient[1, 2] = poison
    assert max(len(batch) for batch in module._batches(given)) > 2
    after = check_together(given, factor=torch.tensor([0.37 / 1024]))
    assert [tensors.step.item() for tensors in after] == [3.0] * len(given)


@every_dtype
def test_other_parameters_at_each_step_are_joined_in_the_same_memory(dtype: torch.dtype) -> None:
    shapes, room, generator = [(2, 4), (3,), (8,), (1, 5), ()], module.JoinBuffer(), random.Random(0)
    fast = [split_tensors(weights(math.prod(s)).view(s), torch.randn(s).to(dtype), dtype) for s in shapes]
    plain = [clone(tensors) for tensors in fast]
    for _ in range(60):
        chosen = generator.sample(range(len(shapes)), generator.randint(2, len(shapes)))
        adamw_([fast[place] for place in chosen], SETTINGS, room=room)
        for place in chosen:
            adamw_by_torch(plain[place], SETTINGS)
        for found, expected in zip(fast, plain, strict=True):
            assert_same_bits(found, expected)
        assert sum(memory.nbytes for memory in room._memory[dtype]) <= 12 * sum(map(math.prod, shapes))
        assert 0 < len(room._views) <= module._MOST_BATCHES


@every_dtype
def test_a_room_is_used_again_also_after_a_step_in_inference_mode(dtype: torch.dtype) -> None:
    room = module.JoinBuffer()
    fast = [split_tensors(weights(8), torch.randn(8).to(dtype), dtype) for _ in range(2)]
    plain = [clone(tensors) for tensors in fast]
    with torch.inference_mode():
        adamw_(fast, SETTINGS, room=room)
    (views,) = room._views.values()
    adamw_(fast, SETTINGS, room=room)
    assert list(room._views.values()) == [views]
    for found, expected in zip(fast, plain, strict=True):
        for _ in range(2):
            adamw_by_torch(expected, SETTINGS)
        assert_same_bits(found, expected)


@every_dtype
def test_masters_that_grow_out_of_fp16(dtype: torch.dtype) -> None:
    values = torch.full((200,), 65500.0)
    after = check(split_tensors(values, -torch.ones(200).to(dtype), dtype), AdamWSettings(lr=10.0, weight_decay=0.0))
    assert dtype is BF16 or (merge(*after[-2:]) == FP16_LARGEST_MASTER).all()  # type: ignore[arg-type]


@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5, 40)], ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert check(split_tensors(torch.randn(shape), torch.randn(shape).to(dtype), dtype)).step == 3


@every_dtype
def test_not_contiguous(dtype: torch.dtype) -> None:
    tensors = split_tensors(torch.randn(40, 50), torch.randn(50, 40).to(dtype).t(), dtype)
    check(tensors)
    assert tensors.working is not None and tensors.remainder is not None
    halves = {"working": tensors.working.t().contiguous().t(), "remainder": tensors.remainder.t().contiguous().t()}
    check(tensors._replace(**halves))


@pytest.mark.parametrize("working", [None, FP16, BF16], ids=["alone", "fp16", "bf16"])
def test_the_reference_is_torchs_step(working: torch.dtype | None) -> None:
    master = weights(200)
    copy = None if working is None else master.to(working)
    tensors = AdamWTensors(torch.randn(200), torch.zeros(200), torch.zeros(200), torch.zeros(()), master.clone(), copy)
    after = clone(tensors)
    for _ in range(3):
        adamw_by_torch(after, SETTINGS)
    ours = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([ours], lr=1e-2, weight_decay=0.1, fused=True)
    ours.grad = tensors.gradient
    for _ in range(3):
        optimizer.step()
    assert torch.equal(ours.detach(), after.master)  # type: ignore[arg-type]
    assert working is None or torch.equal(after.working, ours.detach().to(working))  # type: ignore[arg-type]
