"""Predicted and measured: the peak of a training step for four models in every way of training, on this machine.

    python scripts/bench.py memory [--quick]
    python scripts/bench.py memory --llama-7b --name memory_llama_7b
    python scripts/bench.py memory --when-it-does-not-fit --name memory_when_it_does_not_fit

With ``--llama-7b``, Llama 7B at one
sequence of 1024 tokens is estimated in each of our presets instead; with ``--when-it-does-not-fit``, with one way after
the other to save memory of the GPU.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig

import hf_mp
from _tensor_memory import peak_tensor_bytes
from hf_mp.memory.command import quiet_libraries
from hf_mp.memory.precisions import TRAINING_PRESETS
from hf_mp.policy import PRESETS

NAME = "memory_training"

IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "GPT-2, 4 layers": GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000, **IDS),
    "GPT-2, 12 layers": GPT2Config(n_layer=12, n_embd=128, n_head=4, vocab_size=2000, **IDS),
    "Llama, 3 layers": LlamaConfig(
        num_hidden_layers=3,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4000,
        **IDS,
    ),
    "BERT, 3 layers": BertConfig(
        num_hidden_layers=3,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=4,
        vocab_size=4000,
        pad_token_id=0,
    ),
}
STEP: dict[str, Any] = {"batch_size": 4, "seq_len": 128, "device": "cpu"}
LLAMA_7B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def measure(
    quick: Annotated[bool, typer.Option("--quick", help="the first model alone")] = False,
    llama_7b: Annotated[bool, typer.Option("--llama-7b", help="Llama 7B, estimated")] = False,
    when_it_does_not_fit: Annotated[bool, typer.Option(help="Llama 7B in less and less memory")] = False,
) -> dict[str, Any]:
    """Compare, or estimate Llama 7B."""
    quiet_libraries()
    warnings.simplefilter("ignore")
    if llama_7b:
        return estimate_llama_7b()
    if when_it_does_not_fit:
        return estimate_less_and_less()
    rows = [compare(name, preset) for name in list(CONFIGS)[: 1 if quick else None] for preset in TRAINING_PRESETS]
    worst = max(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows)
    return {"step": STEP, "largest_difference": worst, "rows": rows}


def compare(name: str, preset: str) -> dict[str, Any]:
    """One row of the comparison."""
    start = time.perf_counter()
    predicted = hf_mp.estimate_training_memory(CONFIGS[name], preset, **STEP)
    seconds = time.perf_counter() - start
    measured = hf_mp.measure_training_memory(CONFIGS[name], preset, **STEP)
    again = partial(hf_mp.measure_training_memory, CONFIGS[name], preset, **STEP)
    return {
        "model": name,
        "precision": preset,
        "parameters": predicted.parameters,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured.peak_bytes,
        "allocator_bytes": peak_tensor_bytes(again, torch.device("cpu")),
        "peak_in": predicted.peak_phase.value,
        "estimate_seconds": round(seconds, 2),
    }


def estimate_llama_7b() -> dict[str, Any]:
    """Llama 7B, whose weights outweigh its activations, in each of our presets."""
    shape: dict[str, Any] = {"batch_size": 1, "seq_len": 1024}
    found = {preset: hf_mp.estimate_training_memory(LlamaConfig(**LLAMA_7B), preset, **shape) for preset in PRESETS}
    rows = {
        preset: {
            "peak_bytes": memory.peak_bytes,
            "peak_in": memory.peak_phase.value,
            "bytes_by_category": {category.value: size for category, size in memory.bytes_by_category.items()},
        }
        for preset, memory in found.items()
    }
    return {**shape, "parameters": found["fp32"].parameters, "presets": rows}


_CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": True}
_LESS_AND_LESS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("bf16", _CHECKPOINTING),
    ("bf16-lean", _CHECKPOINTING),
    ("bf16-lean", {**_CHECKPOINTING, "offload": "optimizer"}),
    ("bf16-lean", {**_CHECKPOINTING, "offload": "all"}),
    ("bf16-lean", {**_CHECKPOINTING, "offload": "all", "optimizer": "adamw_bnb_8bit"}),
    ("nf4-lora", _CHECKPOINTING),
]


def estimate_less_and_less() -> dict[str, Any]:
    """Llama 7B in the memory of a GPU and of its host, each row with one more way to save it."""
    shape: dict[str, Any] = {"batch_size": 1, "seq_len": 1024}
    config = LlamaConfig(**LLAMA_7B, architectures=["LlamaForCausalLM"])
    rows = []
    for preset, settings in _LESS_AND_LESS:
        memory = hf_mp.estimate_training_memory(config, preset, **shape, **settings)
        figures = {
            "peak_bytes": memory.peak_bytes,
            "host_bytes": memory.host_bytes,
            "copied_bytes": memory.copied_bytes,
        }
        rows.append({"precision": preset, **settings, **figures})
    return {**shape, "rows": rows}
