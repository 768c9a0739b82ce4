"""The GPU that takes no time: what it counts, gives and refuses. `make test-gpu-shapes` runs these."""

from __future__ import annotations

import ctypes

import pytest
import torch

from _benchmarks import Workload
from benches import offload
from benches.architectures import ARCHITECTURES
from benches.host_gpu import compare, peer_of
from fake_gpu import COUNTS, fake_gpu, is_loaded

pytestmark = pytest.mark.skipif(not is_loaded(), reason="no fake GPU is loaded")
GIB = 2**30


def test_what_is_launched_is_counted() -> None:
    with fake_gpu() as counts:
        x = torch.empty(64, 64, device="cuda")
        before = list(counts)
        (x @ x).relu_()
        x.copy_(torch.ones(64, 64))
        found = {kind: now - then for kind, then, now in zip(COUNTS, before, counts, strict=True)}
    assert found == {"torch_kernels": 1, "triton_kernels": 0, "products": 1, "copies": 1}


def test_memory_ends_and_comes_back() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    large = torch.empty(70 * GIB, dtype=torch.uint8, device="cuda")
    assert total == 80 * GIB and torch.cuda.mem_get_info()[0] == free - 70 * GIB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 GiB"):
        torch.empty(20 * GIB, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_the_device_is_not_written_and_the_host_is() -> None:
    x = torch.ones(3, device="cuda")
    assert x.tolist() == [0.0, 0.0, 0.0]
    assert torch.ones(3).pin_memory().is_pinned() and not torch.ones(3).is_pinned()


def test_what_it_lacks_fails_by_name() -> None:
    runtime = ctypes.CDLL(None)
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    assert runtime.cudaGraphCreate() == runtime.cudaDeviceGetAttribute(None, 12345, 0) == 801
    assert runtime.cudaGetErrorString() == b"device attribute 12345: tests/gpu/fake_cuda.cpp lacks it"
    with pytest.raises(RuntimeError, match=r"cudaIpcGetMemHandle"):
        torch.ones(3, device="cuda").untyped_storage()._share_cuda_()


def test_a_step_of_ours_launches_less_than_torchs() -> None:
    ours = ("hf_mp fp16", "hf_mp bf16")
    with fake_gpu() as counts:
        found = compare(ARCHITECTURES["GPT-2 2 x 64"], (*map(peer_of, ours), *ours), 1, counts)
    for name in ours:
        mine, peers = (found["launches"][one] for one in (name, peer_of(name)))
        assert mine["products"] == peers["products"] > 0 and mine["triton_kernels"] > 0
        assert sum(mine.values()) < sum(peers.values())


def test_with_offload_no_step_but_the_first_asks_the_driver_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_GPT2", Workload(2, 64, 2, 512, 1, 16, device="cuda"))
    found = offload.time_steps(2)
    assert found["driver_allocations"] == {"None": 0, "optimizer": 0, "all": 0}
    none, optimizer, every = (found["launches"][name] for name in ("None", "optimizer", "all"))
    assert none["copies"] < optimizer["copies"] < every["copies"]
    assert optimizer["triton_kernels"] < every["triton_kernels"] / 2  # gradients on the device have one scan
