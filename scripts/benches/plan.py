"""What a rank holds and sends, for models and numbers of ranks that no laptop has.

    python scripts/bench.py plan                               # GPT-2 774M and Llama 70B on 8, 64 and 1,024 ranks
    python scripts/bench.py plan --ranks 8 --layers 2 --only Llama --output-dir /tmp           # a quick look

Computed by ``hf_mp.estimate_training_memory(..., ranks=...)``: the code of one rank, on fake tensors and torch's fake
process group.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

import hf_mp
from benches.memory import LARGE
from hf_mp.memory.parallel import Parallel

NAME = "plan_scaling"
MODELS: dict[str, PreTrainedConfig] = {
    "GPT-2 774M": GPT2Config(n_layer=36, n_embd=1280, n_head=20),
    "Llama 70B": LlamaConfig(**LARGE),
}
PRESETS: dict[Parallel, tuple[str, ...]] = {
    "fsdp2": ("trainer-bf16", "fp16"), "hsdp": ("fp16",), "ddp": ("fp16",), "tp": ("fp16",)
}  # fmt: skip
SEQ_LEN = 1024
BANDWIDTH = "450,50"  # GB/s of an H100 in one direction: NVLink 4, and InfiniBand of 400 Gb/s


def plan(config: PreTrainedConfig, preset: str, ranks: int, parallel: Parallel) -> dict[str, Any]:
    """The plan of one rank, or the reason why there is none."""
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
    layers: Annotated[int | None, typer.Option(help="Of each model, for a quick look.")] = None,
    only: Annotated[str, typer.Option(help="Beginning of the name of a model. Default: all.")] = "",
) -> dict[str, Any]:
    """Plan each model in each preset on each number of ranks."""
    results: dict[str, Any] = {}
    for name, config in MODELS.items():
        if not name.startswith(only):
            continue
        if layers is not None:
            config.num_hidden_layers = layers
        results[name] = {
            parallel: {
                preset: {str(count): plan(config, preset, count, parallel) for count in ranks} for preset in presets
            }
            for parallel, presets in PRESETS.items()
        }
    return {"seq_len": SEQ_LEN, "bandwidth": BANDWIDTH, "models": results}
