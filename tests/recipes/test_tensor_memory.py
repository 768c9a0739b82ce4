"""The peak is of what is alive at once, not of what was ever made."""

from __future__ import annotations

import pytest
import torch

from _tensor_memory import peak_tensor_bytes

CPU = torch.device("cpu")
MIB_OF_FP32 = 2**18
MIB = 2**20


def together() -> None:
    kept = torch.ones(3 * MIB_OF_FP32)
    another = torch.ones(5 * MIB_OF_FP32)
    del kept, another


def one_after_the_other() -> None:
    for _ in range(4):
        torch.ones(2 * MIB_OF_FP32)


@pytest.mark.parametrize(
    ("work", "mib"),
    [
        (together, 8),
        (one_after_the_other, 2),
        (lambda: torch.ones(2 * MIB_OF_FP32, dtype=torch.float16), 1),
        (lambda: None, 0),
    ],
)
def test_tensors_that_are_alive_at_once_add_up(work, mib):
    assert mib * MIB <= peak_tensor_bytes(work, CPU) <= 1.02 * mib * MIB
