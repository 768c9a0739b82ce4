"""Runs on each of several processes: models that Transformers makes tensor parallel (``DistributedConfig``).

Usage: torchrun ... tensor_parallel_worker.py FOLDER [CASE]; writes FOLDER/rankN.pt, a dict of what each case returned:
``CASES``, or the one that is named. The test itself runs ``ONE_PROCESS``: the same models whole.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import tensor_parallel_doors
import torch
import torch.distributed as dist
from loop_worker import batches, named, said_of, weights, whole, write_results
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.distributed import DistributedConfig

import hf_mp
from hf_mp.ranks.parallelism import local_part

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 102,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),  # its norms of heads see the heads of one rank
}
STEPS = 8


def loaded(folder: str, kind: str = "llama", **settings: Any) -> nn.Module:
    """The same weights for everyone, in parts on several processes."""
    path = Path(folder, kind)
    if not path.exists() and (not dist.is_initialized() or dist.get_rank() == 0):
        torch.manual_seed(3)
        make, config = MODELS[kind]
        make(config).save_pretrained(path)
    if dist.is_initialized():
        dist.barrier()
        settings["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(path, **settings).train()


def made(folder: str, precision: str, kind: str = "llama", **settings: Any) -> Any:
    model, runtime = loaded(folder, kind, **settings), hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, runtime.attach_optimizer(optimizer), runtime


def clip(model: nn.Module, max_norm: float) -> float:
    """As ``Accelerator.clip_grad_norm_``: torch's own takes no mixture of DTensors and plain tensors."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.stack([whole(gradient.norm()) for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((max_norm / (total + 1e-6)).clamp(max=1.0).item())
    return total.item()


def backward(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


def losses(folder: str) -> dict[str, Any]:
    model, optimizer, runtime = made(folder, "fp16")
    steps, norms = [], []
    for ids in batches(STEPS):
        steps.append(backward(model, ids).item())
        norms.append(clip(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": steps, "norm": norms, "skipped": runtime.stats.skipped_steps}


def gradients(folder: str) -> dict[str, Any]:
    """Gradients in FP32, of FP32 masters of what was loaded in 16 bits too, and of a model that recomputes."""
    found = {}
    for name, kind, precision, settings in (
        ("llama", "llama", "fp16", {}),
        ("llama bf16", "llama", "bf16", {}),
        ("qwen3", "qwen3", "fp16", {}),
        ("loaded in bf16", "llama", "fp16", {"dtype": torch.bfloat16}),
        ("recomputed", "llama", "fp16", {}),
    ):
        model, optimizer, _ = made(folder, precision, kind, **settings)
        if name == "recomputed":
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        backward(model, batches(1)[0])
        tensors = [tensor for p in model.parameters() for tensor in (p, p.grad)]
        dtypes = {str(one.dtype) for one in [*tensors, *map(local_part, tensors)]}
        found[name] = {n: whole(p.grad).clone() for n, p in model.named_parameters()}, dtypes
        optimizer.step()
    return found


def overflow(folder: str) -> dict[str, Any]:
    """One element of one rank's shard is NaN: nobody else can see it."""
    model, optimizer, runtime = made(folder, "fp16")
    before = weights(model)
    backward(model, batches(1)[0])
    if dist.get_rank() == 1:
        model.model.layers[0].mlp.up_proj.weight.grad.to_local()[0, 0] = math.nan
    optimizer.step()
    optimizer.zero_grad()
    after = weights(model)
    scale, skipped = runtime.stats.loss_scale, runtime.step_was_skipped
    backward(model, batches(1)[0])
    optimizer.step()
    return {"before": before, "after": after, "scale": scale, "skipped": [skipped, runtime.step_was_skipped]}


def refusals(folder: str) -> dict[str, str]:
    ranks = dist.get_world_size()

    def with_fsdp() -> None:
        model = loaded(folder)
        fully_shard(model.model.norm)
        hf_mp.MixedPrecision("fp16").attach(model)

    def two_dimensions() -> None:
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "model"))
        layers = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["model"], {"0": ColwiseParallel()})
        hf_mp.MixedPrecision("fp16").attach(fully_shard(layers, mesh=mesh["data"]))

    def heads_that_ranks_cannot_share() -> None:
        model = loaded(folder)
        model.config.num_key_value_heads = 3
        hf_mp.MixedPrecision("fp16").attach(model)(input_ids=torch.ones(1, 2, dtype=torch.int64))

    return said_of(
        {
            "lean": lambda: hf_mp.MixedPrecision("bf16-lean").attach(loaded(folder)),
            "with_fsdp": with_fsdp,
            "two_dimensions": two_dimensions,
            "layouts_differ": lambda: hf_mp.MixedPrecision(("fp16", "bf16")[dist.get_rank()]).attach(loaded(folder)),
            "heads_that_ranks_cannot_share": heads_that_ranks_cannot_share,
        }
    )


def front_doors(folder: str) -> dict[str, Any]:
    return tensor_parallel_doors.run(folder, loaded)


def refused_doors(folder: str) -> dict[str, str]:
    return tensor_parallel_doors.refused(folder, loaded)


# The Trainer of Transformers 5.17 fails on CPUs with such a model.
HAS_DOORS = hasattr(PreTrainedModel, "is_distributed_loading_by_transformers")
ONE_PROCESS = [losses, gradients, *([front_doors] if HAS_DOORS else [])]
CASES = [losses, gradients, overflow, refusals, *([front_doors, refused_doors] if HAS_DOORS else [])]


if __name__ == "__main__":
    write_results(named([globals()[name] for name in sys.argv[2:]] or CASES, sys.argv[1]))
