"""What a rank holds and sends, for models and numbers of ranks that no laptop has.

    python scripts/bench.py plan                               # GPT-2 774M and Llama 70B on 8, 64 and 1,024 ranks

Computed by ``hf_mp.estimate_training_memory(..., ranks=...)``: the code of one rank, on fake tensors and torch's fake
process group.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

import hf_mp
from hf_mp.memory.settings import Parallel

NAME = "plan_scaling"
LLAMA_70B: dict[str, Any] = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
MODELS: dict[str, PreTrainedConfig] = {
    "GPT-2 774M": GPT2Config(n_layer=36, n_embd=1280, n_head=20),
    "Llama 70B": LlamaConfig(**LLAMA_70B),
}
PRESETS: dict[Parallel, tuple[str, ...]] = {
    "fsdp2": ("trainer-bf16", "fp16"), "hsdp": ("fp16",), "ddp": ("fp16",), "tp": ("fp16",)
}  # fmt: skip
SEQ_LEN = 1024
BANDWIDTH = "450,50"  # GB/s of an H100 in one direction: NVLink 4, and InfiniBand of 400 Gb/s


def plan(config: PreTrainedConfig, preset: str, ranks: int, parallel: Parallel) -> dict[str, Any]:
    """The plan of one rank, or the reason why it cannot be made."""
    try:
        found = hf_mp.estimate_training_memory(
            config, preset, ranks=ranks, parallel=parallel, seq_len=SEQ_LEN, gradient_checkpointing=True
        )
    except ValueError as error:
        return {"refused": str(error)}
    rates = [float(rate) for rate in BANDWIDTH.split(",")]
    return {
        "peak_bytes": found.peak_bytes,
        "bytes_by_category": found.bytes_by_category,
        "parameters": found.parameters,
        "communication": [asdict(one) for one in found.communication],
        # One after the other and without latency; a ring runs at its slowest link.
        "seconds_to_send": sum(one.sent_bytes / (rates[not one.within_node] * 1e9) for one in found.communication),
    }


def measure(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [8, 64, 1024],  # noqa: B006
) -> dict[str, Any]:
    """Plan each model in each preset on each number of ranks."""
    results: dict[str, Any] = {
        name: {
            parallel: {
                preset: {str(count): plan(config, preset, count, parallel) for count in ranks} for preset in presets
            }
            for parallel, presets in PRESETS.items()
        }
        for name, config in MODELS.items()
    }
    return {"seq_len": SEQ_LEN, "bandwidth": BANDWIDTH, "models": results}
