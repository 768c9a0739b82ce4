"""What steps on fake tensors of a GPU launch: dtypes of products, norms and losses, casts and copies, by phase.

    python scripts/fake_gpu.py tests/shared/gpu_shapes.py   # stores gpu_shapes.json

That Python is the one of `make test-gpu-shapes`, with torch for CUDA.

Fake tensors of the meta device stand for CUDA's where no GPU is; the peer needs CUDA's.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from op_samples import torchs_cuda_autocast
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import hf_mp
from hf_mp.kernels.nested import tensors_in
from hf_mp.memory.training import fake_tensors

STORED = Path(__file__).with_suffix(".json")
PRESETS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
PEERS = {"torch.autocast fp16": torch.float16, "torch.autocast bf16": torch.bfloat16}
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 97,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 16}
MODELS: dict[str, Any] = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**_LLAMA)),
    "BERT": lambda: BertForSequenceClassification(BertConfig(**_SIZES, vocab_size=96, max_position_embeddings=16)),
    "ResNet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2)
    ),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2)),
}

# What stands for a kernel of each kind; a loss of ours and an RMSNorm are made of smaller ops.
KINDS = {
    "products": "mm addmm bmm baddbmm convolution _grouped_mm _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    "norms": "native_layer_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit rsqrt _fused_rms_norm",
    "softmaxes": "_softmax",
    "losses": "_log_softmax logsumexp nll_loss_forward",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
COSTS = ("casts", "copies", "kernels")
NO_KERNELS = ("device", "detach", "empty", "_local_scalar", "lift", "alias", "_unsafe_view", "_record_function")
COPIES = ("clone", "copy_", "_foreach_copy_")
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


class Recorder(TorchDispatchMode):
    """Counts by phase: dtypes of each kind, casts, copies and all kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.counts: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, count = func.overloadpacket.__name__, self.counts.setdefault(self.phase, Counter())
        floats = [one for one in tensors_in((args, kwargs or {})) if one.dtype in NAMES]
        if func.is_view or not floats or name.startswith(NO_KERNELS):
            return result
        count["kernels"] += 1
        if (kind := KIND_OF.get(name)) is not None:
            count[f"{kind} in {NAMES[floats[0].dtype]}"] += 1
        if name == "_to_copy" and isinstance(result, Tensor) and result.dtype != floats[0].dtype:
            count["casts"] += 1
        elif name in COPIES:
            count["copies"] += len(args[0]) if isinstance(args[0], (list, tuple)) else 1
        return result


def batch_of(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    labels = torch.zeros(2, dtype=torch.long, device=device)
    if isinstance(model, ResNetForImageClassification):
        return {"pixel_values": torch.zeros(2, 3, 32, 32, device=device), "labels": labels}
    ids = torch.zeros(2, 16, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": labels if isinstance(model, BertForSequenceClassification) else ids}


def counts_of(name: str, precision: str, device: torch.device) -> dict[str, dict[str, int]]:
    """Of the third step of a loop with clipping, by phase."""
    with fake_tensors(device), ExitStack() as stack:
        stack.enter_context(torch.device(device))
        model = MODELS[name]().train()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        is_scaled, factor = precision == "torch.autocast fp16", torch.ones(())
        if precision not in PEERS:
            model, optimizer = hf_mp.prepare(model, optimizer, precision)
            ours = model.forward.runtime.scaler
            ours.scale_and_inverse = functools.cache(ours.scale_and_inverse)  # which keeps no fake tensors
        batch = batch_of(model, device)
        for _ in range(3):
            recorder = Recorder()
            inside = torchs_cuda_autocast(PEERS[precision]) if precision in PEERS else nullcontext()
            with recorder:
                with inside:
                    loss = model(**batch).loss
                recorder.phase = "backward"
                (loss * factor if is_scaled else loss).backward()
                recorder.phase = "step"
                if is_scaled:  # by the kernel of GradScaler, which makes its own tensors on a real device
                    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), factor)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
            del loss
    return {phase: dict(sorted(count.items())) for phase, count in recorder.counts.items()}


def measure(device: torch.device) -> dict[str, Any]:
    return {name: {one: counts_of(name, one, device) for one in (*PRESETS, *PEERS)} for name in MODELS}


if __name__ == "__main__":
    STORED.write_text(json.dumps(measure(torch.device("cuda")), indent=1) + "\n", encoding="utf-8")
