"""The split representation: its exactness over all working copies, by blocks and in any shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_mp.kernels.split import (
    FP16_LARGEST_MASTER,
    merge,
    split,
    split_into,
)

FP16_EXACT_FROM = 2.0**-16
FP16_LARGEST_ERROR = 2.0**-39  # below FP16_EXACT_FROM
DTYPES = [torch.float16, torch.bfloat16]
EVERY_WORKING = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
SPECIAL = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 - 2**-12),
    *(2.0**-14, 2.0**-15, 2.0**-16, 2.0**-24, 2.0**-25, 2.0**-26, 2.0**-39, 2.0**-40, 2.0**-126, 2.0**-149),
    *(65504.0, 65519.0, FP16_LARGEST_MASTER, 65520.0, 70000.0, 3.4028234e38, -65520.0, -3.4028234e38),
]


def bits(value: Tensor) -> Tensor:
    return value.view({2: torch.int16, 4: torch.int32}[value.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype is right.dtype and torch.equal(bits(left), bits(right))


def every_working(dtype: torch.dtype) -> Tensor:
    return EVERY_WORKING.view(dtype)


def fp32_of_bits(pattern: Tensor) -> Tensor:
    """FP32 from integers of 32 bits, given as int64."""
    return ((pattern + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


def check(value: Tensor, dtype: torch.dtype) -> None:
    """All that the docstring of the module says, for every element of ``value``."""
    halves = split(value, dtype)
    merged = merge(*halves)
    finite, nan = value.isfinite(), value.isnan()
    assert torch.equal(merged.isnan(), nan)
    assert same_bits(merged[value.isinf()], value[value.isinf()])
    assert not halves.remainder[~finite].any()
    value, merged, working = value[finite], merged[finite], halves.working[finite]
    if dtype is torch.bfloat16:
        assert same_bits(merged, value)
        away = (bits(value).to(torch.int64) + 0x8000) >> 16  # ties away from zero
        assert torch.equal(bits(working).to(torch.int64) & 0xFFFF, away & 0xFFFF)
        return
    held = value.clamp(-FP16_LARGEST_MASTER, FP16_LARGEST_MASTER)
    assert same_bits(working, held.to(torch.float16))
    exact = held.abs() >= FP16_EXACT_FROM
    assert same_bits(merged[exact], held[exact])
    assert ((merged - held).abs().double()[~exact] < FP16_LARGEST_ERROR).all()
    # A master must round to its working copy, or the next reader would take it for one written from outside.
    assert torch.equal(merged.to(torch.float16), working)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(lower=st.integers(0, 2**16 - 1))
def test_values_with_every_upper_half_and_any_lower_half(dtype: torch.dtype, lower: int) -> None:
    upper = torch.arange(2**16, dtype=torch.int64)
    check(fp32_of_bits((upper << 16) | lower), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(offset=st.integers(-(2**15), 2**15))
def test_values_around_every_working_copy(dtype: torch.dtype, offset: int) -> None:
    working = every_working(dtype).float()
    # With an offset in units of FP32's last place: half way to the neighbours and beyond, in both formats.
    check(fp32_of_bits(bits(working).to(torch.int64) + offset), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(remainder=st.integers(-(2**15), 2**15 - 1))
def test_every_working_copy_with_any_remainder(dtype: torch.dtype, remainder: int) -> None:
    working = every_working(dtype)
    check(merge(working, torch.full_like(working, remainder, dtype=torch.int16)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype) -> None:
    check(torch.tensor(SPECIAL), dtype)
    assert merge(*split(torch.tensor([-0.0, 0.0]), dtype)).signbit().tolist() == [True, False]
    payloads = fp32_of_bits(torch.tensor([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000]))
    assert merge(*split(payloads, dtype)).isnan().all()


def test_fp16_keeps_values_beyond_its_range_at_its_largest_master() -> None:
    merged = merge(*split(torch.tensor([65519.99, 65520.0, 1e30, -1e30]), torch.float16))
    assert merged.abs().tolist() == [65519.98828125, *[FP16_LARGEST_MASTER] * 3]
    assert torch.nextafter(torch.tensor(65520.0), torch.tensor(0.0)).item() == FP16_LARGEST_MASTER


def test_the_stated_bound_of_fp16_is_tight() -> None:
    below = torch.full((), FP16_EXACT_FROM).nextafter(torch.zeros(()))
    assert merge(*split(below, torch.float16)) != below
    values = torch.rand(10**5) * FP16_EXACT_FROM
    error = (merge(*split(values, torch.float16)) - values).abs().max()
    assert FP16_LARGEST_ERROR / 4 < error.item() < FP16_LARGEST_ERROR


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_fp32_values(dtype: torch.dtype) -> None:
    for start in range(0, 2**32, 2**24):
        check(fp32_of_bits(torch.arange(start, start + 2**24, dtype=torch.int64)), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", [1.0, math.nan, math.inf, 1e5, -0.0], ids=str)
def test_several_blocks_of_which_one_goes_the_slow_way(dtype: torch.dtype, extra: float) -> None:
    scales = torch.pow(2.0, torch.arange(-45, 16).float())
    values = (torch.randn(9001, 61) * scales).clamp(-65519, 65519).flatten()  # the last block is short
    values[100_000] = extra
    check(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (2, 3, 4)], ids=str)
def test_any_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    halves = split(value, dtype)
    assert halves.working.shape == halves.remainder.shape == merge(*halves).shape == shape
    check(value.flatten(), dtype)
    assert torch.equal(merge(*halves), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    value = torch.randn(6, 8)
    for view in (value.t(), value[:, ::2], value[0].expand(3, 8)):
        halves = split(view, dtype)
        assert torch.equal(merge(*halves), view)
        assert halves.working.is_contiguous() and halves.remainder.is_contiguous()
        strided = torch.empty(view.t().shape, dtype=dtype).t(), torch.empty(view.t().shape, dtype=torch.int16).t()
        split_into(view, *strided)
        assert torch.equal(strided[0], halves.working) and torch.equal(strided[1], halves.remainder)
        assert torch.equal(merge(*strided), view)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_into_writes_where_it_is_told(dtype: torch.dtype) -> None:
    working, remainder = torch.zeros(9, dtype=dtype), torch.zeros(9, dtype=torch.int16)
    value = torch.randn(3)
    split_into(value, working[3:6], remainder[3:6])
    assert torch.equal(merge(working, remainder), torch.cat([torch.zeros(3), value, torch.zeros(3)]))


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"only FP32 values are split"):
        split(torch.ones(2, dtype=torch.float64), torch.float16)
    with pytest.raises(TypeError, match=r"a working copy is torch.bfloat16"):
        split(torch.ones(2), torch.float32)
    halves = split(torch.ones(2), torch.float16)
    with pytest.raises(TypeError, match=r"a working copy is .*, not torch.int16"):
        merge(halves.remainder, halves.remainder)
