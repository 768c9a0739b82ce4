"""What code that reads values is told of fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.memory.fake_tensors import FAKE_GPU_DEVICE, FakeValueMode, kernels_of_a_gpu

FP16 = torch.float16


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode(), FakeValueMode():
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


def test_what_is_written_into_is_exact_if_what_was_written_is() -> None:
    for write in (lambda x: x.add_(x), lambda x: x[1:].mul_(3.0), lambda x: torch._foreach_mul_([x], 3.0)):
        wide = torch.empty(4, 6, dtype=FP16).float()
        write(wide)
        assert not is_exact(wide)
    wide = torch.empty(4, 6)
    assert is_exact(wide.copy_(torch.empty(4, 6, dtype=FP16))) and not is_exact(wide.copy_(torch.empty(4, 6)))


def test_zeros_and_ones_are_exact() -> None:
    x = torch.empty(4, 6)
    assert all(map(is_exact, (torch.zeros(3), torch.ones(3), torch.zeros_like(x), x.new_ones(2), x.new_zeros(2))))
    assert is_exact(x.zero_()) and not is_exact(x.add_(torch.empty(4, 6)))


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


class Called(TorchDispatchMode):
    """The names of the ops that were called, and the arguments of each."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.arguments[func.overloadpacket.__name__] = args
        return func(*args, **(kwargs or {}))


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "mask", "kernel"),
    [
        (FP16, 16, 16, None, FLASH),
        (FP16, 512, 512, None, EFFICIENT),
        (FP16, 16, 8, None, EFFICIENT),
        (FP16, 16, 16, torch.bool, EFFICIENT),
        (FP16, 16, 16, FP16, EFFICIENT),
        (torch.float32, 16, 16, None, EFFICIENT),
    ],
    ids=str,
)
def test_attention_runs_in_the_kernel_of_a_gpu(
    dtype: torch.dtype, width: int, value_width: int, mask: torch.dtype | None, kernel: str
) -> None:
    query = torch.empty(2, 4, 6, width, dtype=dtype, device=FAKE_GPU_DEVICE, requires_grad=True)
    key = torch.empty_like(query, requires_grad=True)
    value = torch.empty(2, 4, 6, value_width, dtype=dtype, device=FAKE_GPU_DEVICE)
    bias = None if mask is None else torch.empty(6, 6, dtype=mask, device=FAKE_GPU_DEVICE)
    with kernels_of_a_gpu(), Called() as called:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    assert {FLASH, EFFICIENT} & called.arguments.keys() == {kernel}
    assert (output.shape, output.dtype) == ((2, 4, 6, value_width), dtype)
    if kernel == EFFICIENT:
        _, _, _, added, keeps_sums, *_ = called.arguments[kernel]
        assert keeps_sums and (added is None) == (mask is None)
        assert added is None or (added.shape, added.dtype) == ((2, 4, 6, 6), dtype)


def test_only_the_flash_kernel_shares_heads_and_only_gradients_need_sums() -> None:
    query, key = (torch.empty(2, heads, 6, 16, device=FAKE_GPU_DEVICE) for heads in (4, 2))
    with kernels_of_a_gpu(), Called() as called:
        assert F.scaled_dot_product_attention(query, key, key, enable_gqa=True).shape == (2, 4, 6, 16)
        assert EFFICIENT not in called.arguments
        F.scaled_dot_product_attention(query, query, query, enable_gqa=True)
    assert called.arguments[EFFICIENT][4] is False


def test_dropout_saves_a_mask_of_bytes_in_training_alone() -> None:
    x = torch.empty(4, requires_grad=True, device=FAKE_GPU_DEVICE)
    with kernels_of_a_gpu():
        assert "NativeDropout" in type(F.dropout(x, 0.5).grad_fn).__name__
        assert F.dropout(x, 0.5, training=False) is x and F.dropout(x, 0.0) is x


def test_an_autocast_disabled_region_can_be_made() -> None:
    is_available = torch.amp.autocast_mode.is_autocast_available
    with kernels_of_a_gpu():
        found = [torch.amp.autocast_mode.is_autocast_available(name) for name in (FAKE_GPU_DEVICE.type, "cpu", "fpga")]
    assert found == [True, True, False] and not is_available(FAKE_GPU_DEVICE.type)


def test_int8_finds_no_outliers() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    codes, _, outliers = bitsandbytes.functional.int8_vectorwise_quant(torch.empty(3, 8, dtype=FP16), threshold=6.0)
    assert (codes.shape, codes.dtype, outliers.numel()) == ((3, 8), torch.int8, 0)
    x, weight, scales = torch.empty(3, 8, dtype=FP16), torch.empty(5, 8, dtype=torch.int8), torch.empty(5)
    mixed = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default
    product, subset = mixed(x, codes, weight, torch.empty(3), scales, torch.empty(0, dtype=torch.long))
    assert (product.shape, product.dtype, subset.numel()) == ((3, 5), FP16, 0)
