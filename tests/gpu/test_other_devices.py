"""Devices that are neither a CPU nor CUDA: steps on fake tensors of a device without FP64, as MPS and many XPUs are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from covering import covering
from torch import Tensor
from transformers import GPT2Config

import hf_mp
from hf_mp.kernels.nested import tensors_in
from hf_mp.memory import training
from hf_mp.memory.fake_tensors import FAKE_GPU_DEVICE, FakeValueMode

CONFIG = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=16, bos_token_id=0, eos_token_id=0)
SEEN: Counter[torch.dtype] = Counter()


class RefusesFP64(FakeValueMode):
    """What MPS says of an FP64 tensor, whoever makes one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in((args, kwargs, result)):
            if tensor.device.type == FAKE_GPU_DEVICE.type:
                SEEN[tensor.dtype] += 1
                if tensor.dtype is torch.float64:
                    raise TypeError(f"{func} on a device that has no FP64")
        return result


@pytest.fixture(autouse=True)
def without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setattr(training, "FakeValueMode", RefusesFP64)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    covering(["fp16", "bf16", "fp16-lean", "bf16-lean"], ["adamw_torch_fused", "adamw_torch"], together=1),
)
def test_a_step_needs_no_fp64(precision: str, optimizer: str) -> None:
    hf_mp.estimate_training_memory(CONFIG, precision=precision, batch_size=2, seq_len=8, optimizer=optimizer)
    lower = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    assert SEEN[lower] > 100 and SEEN[torch.float32] > 100 and not SEEN[torch.float64]


def test_fp64_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: in_fp64(forward(self, ids)))
    with pytest.raises(ValueError, match="on a device that has no FP64"):
        hf_mp.estimate_training_memory(CONFIG, precision="bf16", batch_size=2, seq_len=8)


def in_fp64(tensor: Tensor) -> Tensor:
    return tensor.double().to(tensor.dtype)
