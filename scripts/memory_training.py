"""Predicted and measured: the peak of a training step for four models in every way of training, on this machine.

    python scripts/memory_training.py [--quick]
    python scripts/memory_training.py --llama-7b

Also GPT-2 124M at 4 x 512 tokens next to ``torch.autocast`` in BF16, with gradients freed in the step and in
backward, and an estimate for a model of 70 billion parameters in a process of its own. Stores
``scripts/results/memory_training.json``. With ``--llama-7b``, estimates Llama 7B at one sequence of 1024 tokens in each
of our presets instead, and stores ``scripts/results/memory_llama_7b.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from typing import Any

from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig

import hf_mp
from _results import save_result
from hf_mp.memory.command import quiet_libraries
from hf_mp.memory.measuring import process_peak_bytes
from hf_mp.memory.precisions import TRAINING_PRESETS
from hf_mp.policy import PRESETS, mixed_presets

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
# GPT-2 124M, as a multiple of the peak under torch.autocast in BF16.
PEER = "trainer-bf16"
OURS = [(p, free) for p in mixed_presets() for free in ("step", "backward")]
LARGE: dict[str, Any] = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}

LLAMA_7B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def main(flags: list[str]) -> None:
    """Compare, estimate the large model, store."""
    quiet_libraries()
    warnings.simplefilter("ignore")
    if "--large" in flags:
        print(json.dumps(estimate_large()))
        return
    if "--llama-7b" in flags:
        print(f"stored in {save_result('memory_llama_7b', estimate_llama_7b()).name}")
        return
    names = list(CONFIGS)[:1] if "--quick" in flags else list(CONFIGS)
    rows = [compare(name, preset) for name in names for preset in TRAINING_PRESETS]
    worst = max(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows)
    beside = max(abs(row["measured_bytes"] / row["allocator_bytes"] - 1) for row in rows)
    print(f"largest difference: {100 * worst:.3f}% to the measured peak, {100 * beside:.3f}% of it to the allocator's")
    real = [] if "--quick" in flags else beside_autocast()
    command = [sys.executable, *sys.argv[:1], "--large"]
    large = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    print(large)
    found = {"step": STEP, "largest_difference": worst, "rows": rows, "gpt2": real, "large": large}
    path = save_result("memory_training", found)
    print(f"stored in {path.name}")


def compare(name: str, preset: str) -> dict[str, Any]:
    """One row of the comparison."""
    start = time.perf_counter()
    predicted = hf_mp.estimate_training_memory(CONFIGS[name], preset, **STEP)
    seconds = time.perf_counter() - start
    measured = hf_mp.measure_training_memory(CONFIGS[name], preset, **STEP, ask_allocator=True)
    off = 100 * (predicted.peak_bytes / measured.peak_bytes - 1)
    print(f"{name:18} {preset:20} {predicted.peak_bytes:>12,} {measured.peak_bytes:>12,} {off:+.3f}%", flush=True)
    return {
        "model": name,
        "precision": preset,
        "parameters": predicted.parameters,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured.peak_bytes,
        "allocator_bytes": measured.allocator_peak_bytes,
        "process_bytes": measured.process_peak_bytes,
        "peak_in": predicted.peak_phase.value,
        "estimate_seconds": round(seconds, 2),
    }


def beside_autocast() -> list[dict[str, Any]]:
    """GPT-2 124M, measured, at 4 x 512 tokens, and where weights dominate: 1 x 64."""
    rows = []
    shapes: list[dict[str, Any]] = [{"batch_size": 4, "seq_len": 512}, {"batch_size": 1, "seq_len": 64}]
    for shape in shapes:
        peer = hf_mp.measure_training_memory(GPT2Config(), PEER, device="cpu", **shape).peak_bytes
        for precision, free_gradients in OURS:
            if free_gradients == "backward" and not precision.endswith("-lean"):
                continue
            settings: dict[str, Any] = {**shape, "device": "cpu", "free_gradients": free_gradients}
            found = hf_mp.measure_training_memory(GPT2Config(), precision, **settings)
            predicted = hf_mp.estimate_training_memory(GPT2Config(), precision, **settings)
            row = {**shape, "precision": precision, "free_gradients": free_gradients, "peak_in": found.peak_phase.value}
            row |= {"measured_bytes": found.peak_bytes, "predicted_bytes": predicted.peak_bytes, "peer_bytes": peer}
            rows.append({**row, "ratio": round(found.peak_bytes / peer, 4)})
            print(rows[-1], flush=True)
    return rows


def estimate_large() -> dict[str, Any]:
    """A Llama of 70 billion parameters, in BF16 with FP32 masters, one sequence of 4096 tokens."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = hf_mp.estimate_training_memory(LlamaConfig(**LARGE), "bf16", batch_size=1, seq_len=4096)
    return {
        "parameters": found.parameters,
        "peak_bytes": found.peak_bytes,
        "seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "process_bytes": process_peak_bytes(),
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


if __name__ == "__main__":
    main(sys.argv[1:])
