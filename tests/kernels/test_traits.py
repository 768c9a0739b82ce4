"""What is read of tensors at each step, in Python and in C++."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from native_casts import kernels  # noqa: F401  (a fixture)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_mp.kernels.tensors import KINDS, traits_of, traits_reference


class Odd(Tensor):
    pass


class Own(nn.Parameter):
    pass


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


PLAIN: list[Any] = [
    *[torch.ones(4, 3).to(dtype) for dtype in KINDS],
    *[torch.ones(()), torch.ones(0, 5), torch.ones(9)[1:], torch.ones(4, 3)[1:3]],
    *[nn.Parameter(torch.ones(3)), Own(torch.ones(2, 2)), torch.ones(3).requires_grad_()],
]
OTHERS: list[Any] = [
    *[torch.ones(3).as_subclass(Odd), fake(), torch.ones(3, device="meta"), torch.eye(3).to_sparse()],
    *[torch.ones(4, 3).t(), torch.ones(8)[::2], nn.Parameter(torch.ones(4, 3).t())],
]


@pytest.mark.usefixtures("kernels")
def test_where_tensors_are_and_of_what_size_and_kind() -> None:
    traits = traits_of(PLAIN)
    assert list(traits.kinds) == [KINDS[one.dtype] for one in PLAIN]
    assert list(array("q", traits.addresses)) == [one.data_ptr() for one in PLAIN]
    assert list(array("q", traits.numels)) == [one.numel() for one in PLAIN]


@pytest.mark.usefixtures("kernels")
def test_what_no_kernel_reads_is_no_kind() -> None:
    wide = [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.cfloat)]
    given = [torch.ones(1), *OTHERS, *wide]
    traits = traits_of(given)
    assert traits.kinds == bytes([6, *[255] * len(OTHERS + wide)])
    assert not any(array("q", traits.addresses)[1 : 1 + len(OTHERS)]) and traits == traits_reference(given)
    assert traits_of([torch.ones(3, device="meta"), torch.ones(3)]).kinds == bytes([6, 255])  # the first one's device


@pytest.mark.usefixtures("kernels")
def test_a_tensor_that_changes_has_other_traits() -> None:
    tensor = torch.ones(4, 4)
    before, held = traits_of([tensor]), tensor.data
    assert traits_of([tensor]) == before
    for value in (held.clone(), held[:2], held.t(), held.to(torch.float16), held.view(torch.int32)):
        tensor.data = value
        assert traits_of([tensor]) != before
    tensor.data = held
    assert traits_of([tensor]) == before
