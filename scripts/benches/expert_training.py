"""Small mixtures of experts of five classes, trained in each preset and in FP32 on the same tokens.

    OMP_NUM_THREADS=1 python scripts/bench.py expert_training  # 16 minutes of one core
    python scripts/bench.py expert_training --steps 20 --seeds 1 --kinds Mixtral --output-dir /tmp

The tokens are walks over a random graph of four successors each, so that no loss comes below log 4. None is a padding
token: its embedding stays 0, and norms of zeros multiply gradients by 1,000 each. Compared is the mean loss of the last
fifth of the steps.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor

import hf_mp

NAME = "compare_experts"
_SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
_OF_EIGHT = dict(num_experts=8, num_experts_per_tok=2)
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen3Moe": dict(_OF_EIGHT, head_dim=16, moe_intermediate_size=32),
    "Olmoe": _OF_EIGHT,
    "DeepseekV3": dict(
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16,
    ),
    "GptOss": dict(head_dim=16, num_local_experts=8, num_experts_per_tok=2),
}  # fmt: skip
FP32, STOCK = "FP32", "torch.autocast, BF16"
WAYS = (FP32, "fp16", "bf16", "fp16-lean", "bf16-lean", STOCK)


def walks(seed: int, steps: int) -> Tensor:
    """Tokens of shape (steps, 8, 32)."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = _SIZES["vocab_size"]
    successors = torch.randint(vocabulary, (vocabulary, 4), generator=generator)
    tokens = [torch.randint(vocabulary, (steps, 8), generator=generator)]
    for _ in range(31):
        tokens.append(successors[tokens[-1], torch.randint(4, (steps, 8), generator=generator)])
    return torch.stack(tokens, -1)


def final_loss(kind: str, way: str, seed: int, steps: int) -> float:
    """The mean loss of the last fifth of a training."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **KINDS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    if way not in (FP32, STOCK):
        model, optimizer = hf_mp.prepare(model, optimizer, way)
    losses = []
    for ids in walks(seed, steps):
        with torch.autocast("cpu", torch.bfloat16) if way == STOCK else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.fmean(losses[-max(1, steps // 5) :])


def measure(
    steps: int = 200,
    seeds: Annotated[int, typer.Option(help="trainings of each kind in each way")] = 5,
    kinds: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(KINDS)}; default: all")] = None,
    workers: Annotated[int, typer.Option(help="trainings at once")] = os.cpu_count() or 1,
) -> dict[str, Any]:
    """Train each kind in each way from each seed, and compare the means over the seeds with FP32's."""
    with ProcessPoolExecutor(workers) as pool:
        running = {
            kind: {way: [pool.submit(final_loss, kind, way, seed, steps) for seed in range(seeds)] for way in WAYS}
            for kind in kinds or KINDS
        }
        losses = {
            kind: {way: [one.result() for one in of] for way, of in ways.items()} for kind, ways in running.items()
        }
    found = {}
    for kind, of_kind in losses.items():
        expected = statistics.fmean(of_kind[FP32])
        off = {way: abs(statistics.fmean(one) / expected - 1) for way, one in of_kind.items() if way != FP32}
        found[kind] = {"losses": of_kind, "fp32": expected, "off": off}
    return {"steps": steps, "seeds": seeds, "kinds": found}
