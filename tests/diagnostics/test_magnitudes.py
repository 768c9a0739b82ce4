"""Histograms by exponent and the shares that FP16 loses, against direct counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_mp.diagnostics.contract.lost_update_count import count_lost_updates
from hf_mp.diagnostics.magnitudes import Histogram, histogram, sample, sampling_stride
from hf_mp.kernels.gradient_scan import real_values

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EDGES = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 3.0, 65504.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25,
         2.0**-26, 2.0**-126, 2.0**-127, 2.0**-149, 1e-45, 3.4e38, -7e-20]  # fmt: skip


def spread(count: int = 4000, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values from 2**-40 to 2**20, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(count, generator=generator) * 60 - 40
    values = torch.exp2(exponents) * torch.randn(count, generator=generator).sign()
    values[::7] = 3 * torch.exp2(exponents[::7].round())
    values[::11] = 0.0
    return values.to(dtype)


def histogram_reference(values: Tensor) -> Histogram:
    """By numpy's exponents."""
    magnitudes = real_values(values.detach()).float().flatten().abs().double().numpy()
    places = np.frexp(magnitudes)[1] - 1 + 127
    cases = [~np.isfinite(magnitudes), magnitudes < 2.0**-126]
    return Histogram(tuple(np.bincount(np.select(cases, [255, 0], places), minlength=256).tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (4000,), (40, 100), (10, 20, 20)], ids=str)
def test_histogram_is_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = spread(math.prod(shape), dtype=dtype).reshape(shape)
    assert histogram(values) == histogram_reference(values)
    assert histogram(values).total == values.numel()
    if values.dim() > 1:
        assert histogram(values.transpose(0, 1)) == histogram(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_have_places_of_their_own(dtype: torch.dtype) -> None:
    values = torch.tensor(EDGES, dtype=torch.float64).to(dtype)
    found = histogram(values)
    assert found == histogram_reference(values)
    assert found.counts[-1] == int((~values.float().isfinite()).sum())
    assert found.counts[0] == int((values.float().abs() < 2.0**-126).sum())
    assert found.finite_nonzero == found.total - found.counts[0] - found.counts[-1]


@given(st.lists(st.floats(width=32), max_size=40))
def test_histogram_of_any_floats(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert histogram(values) == histogram_reference(values)


def test_octaves_are_floor_log2() -> None:
    values = spread()
    counts: dict[int, int] = {}
    for value in values.abs().tolist():
        if value:
            counts[math.frexp(value)[1] - 1] = counts.get(math.frexp(value)[1] - 1, 0) + 1
    assert histogram(values).by_octave() == counts
    assert histogram(torch.tensor([0.0, 2.0**-126, 2.0**-140])).by_octave() == {-126: 1}


@pytest.mark.parametrize("log2_scale", [-10, 0, 1, 12, 24])
def test_shares_are_those_of_a_direct_count(log2_scale: int) -> None:
    values = spread()
    found, scaled = histogram(values), values.double() * 2.0**log2_scale
    counted = int((values != 0).sum())
    half = scaled.float().half()
    lost = int(((half == 0) & (values != 0)).sum())
    assert lost < counted
    assert found.share_underflowed(log2_scale) == lost / counted


def test_what_rounds_to_zero_in_fp16_is_lost_and_the_next_number_is_not() -> None:
    limit = torch.tensor([2.0**-25])
    below, above = torch.nextafter(limit, torch.tensor(0.0)), torch.nextafter(limit, torch.tensor(INF))
    assert below.half() == 0 and above.half() != 0
    assert histogram(below).share_underflowed() == 1.0
    assert histogram(above).share_underflowed() == 0.0


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [NAN, INF]], ids=["empty", "zeros", "not-finite"])
def test_shares_of_nothing_are_zero(values: list[float]) -> None:
    found = histogram(torch.tensor(values))
    assert found.share_underflowed() == 0.0
    assert count_lost_updates(torch.tensor(values), torch.tensor(values), torch.float16).share == 0.0


# Lost updates


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 10), (torch.bfloat16, 7)], ids=str)
def test_updates_up_to_half_a_unit_in_the_last_place_are_lost(dtype: torch.dtype, bits: int) -> None:
    half = 2.0 ** -(bits + 1)  # ties go to even, which 1 is; below it, numbers lie half as far apart
    updates = torch.tensor([half, 1.01 * half, -half / 2, -1.01 * half / 2], dtype=torch.float64)
    assert count_lost_updates(torch.ones(4), updates, dtype) == (2, 4)


def test_updates_that_are_zero_or_not_finite_do_not_count() -> None:
    assert count_lost_updates(torch.ones(5), torch.tensor([0.0, NAN, INF, 1e-9, 1.0]), torch.float16) == (1, 2)
    assert count_lost_updates(torch.tensor([NAN, 1e9, 1.0]), torch.full((3,), 1e-9), torch.float16) == (1, 1)


# Samples


@pytest.mark.parametrize("shape", [(50257, 64), (768, 3072), (2**22,), (997, 1009), (3, 5, 7, 11, 2**10)], ids=str)
def test_a_sample_leaves_no_column_out(shape: tuple[int, ...]) -> None:
    stride = sampling_stride(shape, 2**14)
    elements = math.prod(shape)
    assert all(math.gcd(stride, size) == 1 for size in shape)
    assert 2**13 <= elements // stride <= 2**14
    columns = torch.arange(elements)[::stride] % shape[-1]
    assert len(columns.unique()) == min(shape[-1], len(columns))


def test_a_stride_is_a_prime_that_divides_nothing() -> None:
    assert sampling_stride((397,), 100) == 5  # 4 divides none, and is no prime
    assert sampling_stride((400,), 80) == 7  # 5 divides, and 6 is no prime


def test_a_small_tensor_is_sampled_whole_and_copied() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    taken = sample(tensor.t())
    tensor.zero_()
    assert taken.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert sample(torch.zeros(0)).shape == (0,)


def test_samples_of_one_shape_are_of_the_same_places() -> None:
    tensor = torch.arange(300.0 * 40).reshape(300, 40)
    other = tensor.t().contiguous().t() * 2
    assert torch.equal(sample(tensor, 1000) * 2, sample(other, 1000))
