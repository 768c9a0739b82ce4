"""Predicted peaks of ``hf-mp memory --train`` beside those that CUDA's caching allocator counts.

    python scripts/bench.py memory_gpu
    python scripts/bench.py memory_gpu --models gpt2,mixtral
    FAKE_GPU_GIB=192 python scripts/fake_gpu.py scripts/bench.py memory_gpu      # no GPU

Takes a GPU with room for the models (Llama 7B: 114 GiB), or a CUDA driver whose kernels compute nothing, on which
torch's allocator is the same; the result says which.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

import hf_mp
from benches.memory import LLAMA_7B
from hf_mp.memory.command import quiet_libraries

_LLAMA_7B = LlamaConfig(**LLAMA_7B, architectures=["LlamaForCausalLM"])
_SMALL_EXPERTS = MixtralConfig(
    num_local_experts=8, num_hidden_layers=8, hidden_size=1024, intermediate_size=1792, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=4096,
)  # fmt: skip
MODELS: dict[str, tuple[str, PreTrainedConfig | str, int]] = {  # its name, and the sequences of 1,024 tokens
    "gpt2": ("GPT-2 124M", "gpt2", 8),
    "gpt2-large": ("GPT-2 774M", "gpt2-large", 4),
    "llama": ("Llama 7B", _LLAMA_7B, 1),
    "mixtral": ("Mixtral of 8 small experts", _SMALL_EXPERTS, 4),
}
PRESETS = ("fp32", "trainer-fp16", "fp16", "fp16-lean")


def measure(
    models: Annotated[str, typer.Option(help="Of them, by commas.")] = ",".join(MODELS),
) -> dict[str, Any]:
    """Train the models in four presets."""
    quiet_libraries()
    if not torch.cuda.is_available():
        sys.exit("what an allocator counts needs a GPU, or a driver for one: python scripts/fake_gpu.py")
    computes = torch.ones((), device="cuda").item() == 1
    asked = [(*MODELS[name], preset, computes) for name in models.split(",") for preset in PRESETS]
    # A process for each: what a model leaves behind would be in the next one's peak.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        rows = list(processes.map(compare, *zip(*asked, strict=True)))
    driver = f"{torch.cuda.get_device_name()}{'' if computes else ', whose kernels compute nothing'}"
    return {"driver": driver, "rows": rows}


def compare(
    name: str, config: PreTrainedConfig | str, batch_size: int, preset: str, computes: bool = True, **settings: Any
) -> dict[str, Any]:
    """A peak as predicted, as counted on real tensors, and as the allocator counts it, in a process that has no other.

    ``difference`` is that of the prediction from what the allocator counts without cuBLAS' workspace. ``settings``: of
    the step, beside batch and sequence.
    """
    quiet_libraries()
    step: dict[str, Any] = {"batch_size": batch_size, "seq_len": 1024, **settings}
    predicted = hf_mp.estimate_training_memory(config, preset, **step)
    for dtype in (torch.float32, torch.float16):  # cuBLAS takes its workspace at the first product
        torch.ones(8, 8, dtype=dtype, device="cuda") @ torch.ones(8, 8, dtype=dtype, device="cuda")
    workspace_bytes = torch.cuda.memory_allocated()
    with contextlib.nullcontext() if computes else kernels_that_compute_nothing():
        measured = hf_mp.measure_training_memory(config, preset, **step, device="cuda")
    peaks = torch.cuda.memory_stats()
    allocated_bytes = torch.cuda.max_memory_allocated()
    return {
        "model": name,
        "precision": preset,
        **step,
        "predicted_bytes": predicted.peak_bytes,
        "counted_bytes": measured.peak_bytes,
        **({"host_bytes": measured.host_bytes, "copied_bytes": predicted.copied_bytes} if settings else {}),
        "allocated_bytes": allocated_bytes,
        "workspace_bytes": workspace_bytes,
        "rounding_bytes": allocated_bytes - peaks["requested_bytes.all.peak"],
        "difference": predicted.peak_bytes / (allocated_bytes - workspace_bytes) - 1,
    }


class FakeValueMode(TorchDispatchMode):
    """Gradients are finite and a norm is 1, where all memory reads 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            return args[0].dtype is torch.bool or (1.0 if args[0].is_floating_point() else 0)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def kernels_that_compute_nothing() -> Iterator[None]:
    """Train on a driver that has no kernels."""
    had_sdp = torch.backends.cuda.cudnn_sdp_enabled()
    # cuDNN wants a real driver, and kernels that compute nothing would fail the comparison with their reference.
    with (
        torch.backends.cudnn.flags(enabled=False),
        mock.patch.dict(os.environ, HF_MP_KERNELS="triton"),
        FakeValueMode(),
    ):
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(had_sdp)
