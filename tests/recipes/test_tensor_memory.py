"""The peak is of what is alive at once, not of what was ever made."""

from __future__ import annotations

import torch

from _tensor_memory import peak_tensor_bytes

CPU = torch.device("cpu")
MIB_OF_FP32 = 2**18
MIB = 2**20


def test_tensors_that_are_alive_at_once_add_up():
    def work() -> None:
        kept = torch.ones(3 * MIB_OF_FP32)
        another = torch.ones(5 * MIB_OF_FP32)
        del kept, another

    assert 8 * MIB <= peak_tensor_bytes(work, CPU) < 8.1 * MIB


def test_a_tensor_that_is_gone_makes_room():
    def work() -> None:
        for _ in range(4):
            torch.ones(2 * MIB_OF_FP32)

    assert 2 * MIB <= peak_tensor_bytes(work, CPU) < 2.1 * MIB


def test_fp16_takes_half():
    assert peak_tensor_bytes(lambda: torch.ones(MIB_OF_FP32, dtype=torch.float16), CPU) < 0.51 * MIB


def test_no_tensor_takes_nothing():
    assert peak_tensor_bytes(lambda: None, CPU) == 0
