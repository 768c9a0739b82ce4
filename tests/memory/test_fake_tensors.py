"""What code that reads values is told of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mp.memory.fake_tensors import AnswerAsIfAllWentWell

FP16 = torch.float16


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode(), AnswerAsIfAllWentWell():
        yield


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether 16 bits are said to hold all of it."""
    return torch.equal(tensor.half().float(), tensor)


def test_what_was_cast_from_16_bits_is_exact_in_them_and_so_are_its_copies() -> None:
    wide = torch.empty(4, 6, dtype=FP16).float()
    assert is_exact(wide) and is_exact(wide.t()) and is_exact(wide.clone()) and is_exact(wide.t().contiguous())


def test_what_was_computed_is_not() -> None:
    wide = torch.empty(4, 6, dtype=FP16).float()
    assert not is_exact(torch.empty(4, 6))
    assert not is_exact(wide + wide)
    assert not is_exact(torch.empty(4, 6).clone())
    assert not is_exact(torch.empty(4, 6, dtype=torch.float64).float())


def test_memory_that_comes_after_it_is_not_taken_for_it() -> None:
    for made in (
        lambda: torch.empty(4, 6),
        lambda: torch.native_layer_norm(torch.empty(4, 6), [6], None, None, 1e-5)[0],
    ):
        for _ in range(20):  # a storage's place is taken again at once
            assert is_exact(torch.empty(4, 6, dtype=FP16).float())
            assert not is_exact(made())


def test_whole_numbers_are_equal() -> None:
    assert torch.equal(torch.empty(3, dtype=torch.long), torch.empty(3, dtype=torch.long))


def test_a_condition_holds_and_a_number_is_one() -> None:
    assert torch.empty((), dtype=torch.bool).item() is True
    assert torch.empty(()).item() == 1.0
    with pytest.raises(ValueError, match=r"reads a value of a torch.int64 tensor and decides by it.*measure it"):
        torch.empty((), dtype=torch.long).item()


@pytest.mark.parametrize("dtype", [torch.float32, FP16, torch.bfloat16], ids=str)
def test_grouped_products_have_the_shapes_of_their_kernels(dtype: torch.dtype) -> None:
    def shape(left: tuple[int, ...], right: tuple[int, ...], offsets: bool = True) -> list[int]:
        ends = torch.empty(4, dtype=torch.int32) if offsets else None
        right_by_columns = torch.empty(*right[:-2], right[-1], right[-2], dtype=dtype).transpose(-2, -1)
        found = torch._grouped_mm(torch.empty(left, dtype=dtype), right_by_columns, offs=ends)
        assert found.dtype is dtype
        return list(found.shape)

    assert shape((32, 16), (4, 16, 24)) == [32, 24]  # forward: rows of each expert
    assert shape((16, 32), (32, 24)) == [4, 16, 24]  # the gradient of the experts
    assert shape((4, 32, 16), (16, 32)) == [32, 32]
    assert shape((4, 32, 16), (4, 16, 24), offsets=False) == [4, 32, 24]
