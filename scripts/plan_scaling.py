"""What a rank holds and sends, for models and numbers of ranks that no laptop has.

    python scripts/plan_scaling.py                               # GPT-2 774M and Llama 70B on 8, 64 and 1,024 ranks
    python scripts/plan_scaling.py --ranks 8 --layers 2          # a quick look
    python scripts/plan_scaling.py --layers 2 --only Llama       # at one model

Computed by ``hf_mp.estimate_training_memory(..., ranks=...)``: the code of one rank, on fake tensors and torch's fake
process group. Stores ``scripts/results/plan_scaling.json``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig
from transformers.utils import logging

import hf_mp
from _benchmarks import show_table
from _results import save_result
from hf_mp.memory.parallel import Bandwidth, Parallel
from memory_training import LARGE

MODELS: dict[str, PreTrainedConfig] = {
    "GPT-2 774M": GPT2Config(n_layer=36, n_embd=1280, n_head=20),
    "Llama 70B": LlamaConfig(**LARGE),
}
PRESETS: dict[Parallel, tuple[str, ...]] = {
    "fsdp2": ("trainer-bf16", "fp16", "fp16-lean"), "hsdp": ("fp16",), "ddp": ("fp16",), "tp": ("fp16",)
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
    return {
        "peak_bytes": found.peak_bytes,
        "bytes_by_category": found.bytes_by_category,
        "parameters": found.parameters,
        "communication": [asdict(one) for one in found.communication],
        "seconds_to_send": Bandwidth.parse(BANDWIDTH).seconds(found.communication),
    }


def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of ranks.")] = [8, 64, 1024],  # noqa: B006
    layers: Annotated[int | None, typer.Option(help="Of each model, for a quick look; nothing is stored.")] = None,
    only: Annotated[str, typer.Option(help="Beginning of the name of a model; nothing is stored. Default: all.")] = "",
) -> None:
    """Plan each model in each preset on each number of ranks; print and store."""
    logging.set_verbosity_error()
    results: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    for name, config in MODELS.items():
        if not name.startswith(only):
            continue
        if layers is not None:
            config.num_hidden_layers = layers
        for parallel, preset in [(parallel, preset) for parallel, presets in PRESETS.items() for preset in presets]:
            plans = results.setdefault(name, {}).setdefault(parallel, {}).setdefault(preset, {})
            for count in ranks:
                found = plans[str(count)] = plan(config, preset, count, parallel)
                sent = sum(one["sent_bytes"] for one in found.get("communication", ()))
                sizes = (f"{found['peak_bytes'] / 2**30:.2f}", f"{sent / 2**30:.2f}") if "peak_bytes" in found else ()
                rows.append((name, parallel, preset, str(count), *(sizes or ("refused", ""))))
    show_table("One rank", ("", "parallel", "preset", "ranks", "peak, GiB", "sent a step, GiB"), rows)
    if layers is None and not only:
        save_result("plan_scaling", {"seq_len": SEQ_LEN, "bandwidth": BANDWIDTH, "models": results})


if __name__ == "__main__":
    typer.run(main)
