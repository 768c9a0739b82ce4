import math
from collections.abc import Callable

import pytest
import torch
from gradient_references import largest_magnitude_reference
from torch import Tensor
from torch.nn.utils import get_total_norm

from hf_mp.kernels.gradient_scan import (
    OVERFLOW_LIMIT,
    all_finite,
    largest_magnitude,
    largest_magnitude_and_norm,
    scan_reference,
    total_norm,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check(tensors: list[Tensor]) -> Tensor:
    """The fast pass over ``tensors``, which must be exactly the reference."""
    found = largest_magnitude(tensors)
    torch.testing.assert_close(found, largest_magnitude_reference(tensors), rtol=0, atol=0, equal_nan=True)
    assert found.shape == () and found.dtype is torch.float32
    assert found.isnan() or math.copysign(1.0, found.item()) == 1.0
    return found


def sparse(indices: list[int], values: list[float], dtype: torch.dtype = torch.float32, size: int = 4) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([indices]), torch.tensor(values, dtype=dtype), (size,), check_invariants=True
    )


MIXED = [torch.tensor(-3.0), torch.full((2, 2), 2.5, dtype=torch.float16), torch.ones(1, 1, 1).bfloat16()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_infinity_anywhere_is_infinity(dtype: torch.dtype, sign: float) -> None:
    for position in range(6):
        values = torch.ones(2, 3, dtype=dtype)
        values.view(-1)[position] = sign * math.inf
        assert check([torch.ones(4), values, torch.ones(4)]).item() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [0.0, -1.0, math.inf, -math.inf])
def test_nan_wins_over_everything(dtype: torch.dtype, other: float) -> None:
    for values in ([math.nan, other], [other, math.nan]):
        assert check([torch.tensor(values, dtype=dtype)]).isnan()
        assert check([torch.tensor([value], dtype=dtype) for value in values]).isnan()


LARGEST: dict[str, tuple[list[Tensor], float]] = {
    "no tensors": ([], 0.0),
    "one empty": ([torch.empty(0)], 0.0),
    "two empty": ([torch.empty(0, 3), torch.empty(2, 0, dtype=torch.float16)], 0.0),
    "sparse without values": ([sparse([], [])], 0.0),
    "empty ones around": ([torch.empty(0), torch.tensor([-2.0]), torch.empty(3, 0)], 2.0),
    "magnitudes, not values": ([torch.tensor([1.0, -7.0]), torch.tensor([5.0])], 7.0),
    "mixed shapes and dtypes": (MIXED, 3.0),
    "FP64 among others": ([*MIXED, torch.tensor([[-4.25]], dtype=torch.float64)], 4.25),
    **{f"sparse duplicates add up, {dtype}": ([sparse([1, 1, 2], [3, 4, -5], dtype)], 7.0) for dtype in DTYPES},
    **{f"sparse duplicates cancel, {dtype}": ([sparse([1, 1], [3, -3], dtype)], 0.0) for dtype in DTYPES},
    "sparse duplicates overflow": ([sparse([0, 0], [40000.0, 40000.0], torch.float16)], math.inf),
    "sparse neighbours do not": ([sparse([0, 1], [40000.0, 40000.0], torch.float16)], 40000.0),
    "sparse and dense": ([torch.tensor([6.0]), sparse([3], [-8.0])], 8.0),
    "sparse NaN and dense inf": ([sparse([3], [math.nan]), torch.tensor([math.inf])], math.nan),
    "a finite FP64 value beyond FP32": ([torch.tensor([-1e300], dtype=torch.float64)], math.inf),
}


@pytest.mark.parametrize("case", LARGEST)
def test_the_largest_magnitude(case: str) -> None:
    tensors, expected = LARGEST[case]
    torch.testing.assert_close(check(tensors).item(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, 1::2], lambda t: t[1:3], lambda t: t[:, :1].expand(6, 5), lambda t: t[3]],
    ids=["transposed", "every other column", "rows", "expanded", "row"],
)
def test_only_the_elements_of_a_view_are_read(view: Callable[[Tensor], Tensor]) -> None:
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    part = view(whole)
    assert check([part]) == max(abs(value) for value in part.flatten().tolist())


def test_any_iterable_is_read_once() -> None:
    assert largest_magnitude(tensor for tensor in [torch.tensor([1.0]), torch.tensor([-9.0])]) == 9.0


def test_gradients_that_require_grad_are_read_without_a_graph() -> None:
    found = check([torch.tensor([1.0, -2.0], requires_grad=True)])
    assert found == 2.0 and not found.requires_grad


class TestWithNorm:
    @pytest.mark.parametrize("count", [0, 1, 30])
    @pytest.mark.parametrize("place", [None, *range(0, 30, 7)])
    def test_both_are_bit_for_bit_those_of_their_own_functions(self, place: int | None, count: int) -> None:
        tensors = [torch.randn(11 * index + 1, 5) * 10.0 ** (index % 7 - 3) for index in range(count)]
        if place is not None:  # torch sums lane by lane: a norm of 0 in the list moves the others to other lanes
            tensors.insert(place, torch.zeros(0))
            tensors.insert(place // 2, torch.zeros(0, 3))
        largest, norm = largest_magnitude_and_norm(tensors)
        assert torch.equal(largest, largest_magnitude_reference(tensors))
        assert torch.equal(norm, get_total_norm(tensors))


BELOW = torch.tensor([-OVERFLOW_LIMIT]).nextafter(torch.zeros(1))
ALL_FINITE: dict[str, tuple[list[Tensor], list[float], bool]] = {
    "squares beyond FP32": ([torch.full((4,), 3e38)], [], True),
    "squares beyond FP32, and inf": ([torch.full((4,), 3e38), torch.tensor([math.inf])], [], False),
    "nothing": ([], [], True),
    "sparse duplicates add up": ([sparse([0, 0], [3e38, 3e38])], [], False),
    "at the limit": ([torch.tensor([-OVERFLOW_LIMIT])], [OVERFLOW_LIMIT], False),
    "no limit": ([torch.tensor([-OVERFLOW_LIMIT])], [], True),
    "below the limit": ([BELOW], [OVERFLOW_LIMIT], True),
    "a square below the limit": ([BELOW.square()], [], True),
    "NaN": ([torch.tensor([math.nan])], [OVERFLOW_LIMIT], False),
}


class TestAllFinite:
    @pytest.mark.parametrize("case", ALL_FINITE)
    def test_a_limit_is_for_magnitudes(self, case: str) -> None:
        tensors, limit, expected = ALL_FINITE[case]
        assert all_finite(tensors, *limit) is expected


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000])
def test_norm_in_blocks(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.kernels.gradient_scan._BLOCK_ELEMENTS_PER_THREAD", 64)
    tensor = torch.randn(count).to(dtype)
    expected = torch.linalg.vector_norm(tensor.double()).float()
    torch.testing.assert_close(total_norm([tensor]), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        total_norm([tensor[::2]]), torch.linalg.vector_norm(tensor[::2].float()), rtol=1e-6, atol=0
    )
    if count:
        tensor[-1] = math.inf
        assert total_norm([tensor]).item() == math.inf
        tensor[0] = math.nan
        assert total_norm([tensor]).isnan()


@pytest.mark.usefixtures("other_default_dtype")
def test_the_norm_is_fp32_whatever_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.kernels.gradient_scan._BLOCK_ELEMENTS_PER_THREAD", 64)
    tensor = torch.linspace(-1.0, 3.0, 1000, dtype=torch.float32).bfloat16()
    expected = torch.linalg.vector_norm(tensor.double()).float()
    torch.testing.assert_close(total_norm([tensor]), expected, rtol=1e-6, atol=0)
    assert total_norm([]).dtype is torch.float32


def test_the_norm_is_where_the_tensors_are_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.kernels.gradient_scan._BLOCK_ELEMENTS_PER_THREAD", 64)
    tensor = torch.randn(1000).half()
    expected = total_norm([tensor])
    with torch.device("meta"):
        assert total_norm([tensor]) == expected
        assert total_norm([]) == 0.0 and largest_magnitude([]) == 0.0


def test_total_norm_of_several() -> None:
    assert total_norm([torch.full((4,), 1.5, dtype=torch.float64), torch.full((4,), 2.0).half()]) == 5.0
    tensors = [torch.full((3,), 2.0).half(), torch.empty(0), torch.full((4,), -1.0)]
    assert total_norm(tensors) == 4.0
    assert total_norm([]) == 0.0
    assert scan_reference(tensors).norm == 4.0 and scan_reference(tensors).largest == 2.0
