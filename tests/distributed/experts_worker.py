"""Runs on each of two processes: mixtures of experts under FSDP2, tensor parallel, and expert parallel.

Usage: torchrun ... experts_worker.py FOLDER; writes FOLDER/rankN.pt, a dict of what each case returned.
"""

from __future__ import annotations

import fnmatch
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_worker import named, said_of, whole, write_results
from mixtures import KINDS, ROUTERS, make, token_ids
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_mp

SPREADS = {
    "tensor parallel": {"tp_size": 2},
    "expert parallel": {"tp_size": 2, "ep_size": 2},
    "expert parallel, all-reduce": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
}
WAYS = [(kind, "expert parallel") for kind in KINDS] + [(kind, "FSDP2") for kind in KINDS if kind != "Olmoe"]
WAYS += [("Mixtral", "tensor parallel"), ("GptOss", "tensor parallel"), ("Mixtral", "expert parallel, all-reduce")]


def loaded(folder: str, kind: str, **sizes: Any) -> nn.Module:
    """The weights of ``make``, spread by Transformers."""
    path = Path(folder, kind)
    if dist.get_rank() == 0 and not path.exists():
        make(kind).save_pretrained(path)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**sizes)).train()


def shard(model: Any) -> None:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def spread(folder: str, kind: str, way: str, precision: str) -> Any:
    """A model with mixed precision over both processes, and its optimizer."""
    model: Any = make(kind) if way == "FSDP2" else loaded(folder, kind, **SPREADS[way])
    runtime = hf_mp.MixedPrecision(precision)
    is_first = kind == "GptOss" and not runtime.policy.is_lean  # sharded, then attached
    if way == "FSDP2" and is_first:
        shard(model)
    runtime.attach(model)
    if way == "FSDP2" and not is_first:
        shard(model)
    return model, runtime.attach_optimizer(torch.optim.AdamW(model.parameters(), 3e-3))


def mine(ids: Tensor, way: str) -> Tensor:
    """FSDP2 gives each process its rows, the others give all to each."""
    return ids.chunk(2)[dist.get_rank()] if way == "FSDP2" else ids


def backward(model: Any, ids: Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def gradients(folder: str) -> dict[str, Any]:
    """Whole gradients of the second backward: the first forward learns what becomes of the weights."""
    found = {}
    for kind, way in WAYS:
        model, optimizer = spread(folder, kind, way, "fp16")
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, mine(token_ids(4), way))
        found[f"{kind}, {way}"] = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
    return found


def routers(folder: str) -> dict[str, list[bool]]:
    """Whether FSDP2 gathers the FP32 weights of routers, and of the projections of attention."""
    found: dict[str, list[bool]] = {}
    for kind in KINDS:
        model, _ = spread(folder, kind, "FSDP2", "bf16")
        for name, module in model.named_modules():
            for pattern in (ROUTERS[kind], "*.o_proj"):
                if fnmatch.fnmatch(name, pattern):
                    expected, seen = whole(module.weight.detach()).clone(), found.setdefault(f"{kind} {pattern}", [])

                    def look(module: Any, args: Any, expected: Tensor = expected, seen: list[bool] = seen) -> None:
                        seen.append(torch.equal(module.weight.detach(), expected))

                    module.register_forward_pre_hook(look)
        backward(model, mine(token_ids(4), "FSDP2"))
    return found


def refusals(folder: str) -> dict[str, str]:
    def attach(precision: str, **sizes: Any) -> None:
        hf_mp.MixedPrecision(precision).attach(loaded(folder, "Mixtral", **sizes))

    return said_of(
        {
            "with_fsdp": lambda: attach("fp16", fsdp_size=2, ep_size=2),
            "lean": lambda: attach("fp16-lean", **SPREADS["expert parallel"]),
        }
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    write_results(named([gradients, routers, refusals], sys.argv[1]))
