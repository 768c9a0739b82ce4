"""A training step under ``torch.compile``: FP32, ``torch.autocast`` and ours, each compiled and not, in turns.

    python scripts/bench.py compiled
    python scripts/bench.py compiled --only BERT --rounds 20

Forward, backward, clipping and a fused AdamW update of models with random weights. The floor is the step of a model
that is BF16 (FP16) throughout, compiled: no cast, no FP32 gradient, an update of half the bytes, no loss scale. Graphs
and recompilations are counted over steps in FP16 whose loss scale changes every other time.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import torch
import typer
from torch._dynamo.utils import counters

import hf_mp
from _benchmarks import DEFAULT_DEVICE
from _contenders import COMPILED, PARTS, Parts, allow_recompilations
from _results import alternate, ratios_of, rows_of
from benches.architectures import (
    CONTENDERS,
    PEER,
    VOCABULARY,
    Architecture,
    choose,
    images,
    language,
    layers,
    made,
    make_step,
    native_dtypes,
    padded,
)

COUNTED_STEPS = 30

# Without dropout, whose attention no compiled code has a kernel for; GPT-2 names the loss that others have by default.
_GPT2 = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "loss_type": "ForCausalLM", "use_cache": False,
         "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}  # fmt: skip
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": VOCABULARY}
_LLAMA = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "num_key_value_heads": 2}
# The kind of problem is named: a forward that finds it out writes it into the configuration, and is compiled again.
_CONVNEXT = {"num_stages": 2, "hidden_sizes": [96, 192], "depths": [1, 1],
             "problem_type": "single_label_classification"}  # fmt: skip

MODELS: dict[str, Architecture] = {
    "GPT-2 2 x 768": Architecture(made("GPT2", "LMHeadModel", n_layer=2, n_embd=768, n_head=12, **_GPT2), language),
    "Llama 2 x 512, GQA": Architecture(made("Llama", "ForCausalLM", **layers(2, 512), **_LLAMA), language),
    "BERT 2 x 512": Architecture(made("Bert", "ForMaskedLM", **layers(2, 512), **_BERT), padded),
    "ConvNeXt 1+1": Architecture(made("ConvNext", "ForImageClassification", **_CONVNEXT), images),
}
RATIOS = {
    "bf16_to_torch_autocast": ("hf_mp bf16", PEER),
    "fp16_to_fp32": ("hf_mp fp16", "fp32"),
    "bf16_floor_to_torch_autocast": ("whole bf16", PEER),
    "fp16_floor_to_fp32": ("whole fp16", "fp32"),
}


def compare(architecture: Architecture, rounds: int, device: str) -> dict[str, Any]:
    """Medians, spreads and the ratios of compiled steps, and what was compiled."""
    torch._dynamo.reset()
    floors = [f"whole {dtype}" for dtype in native_dtypes(device) if dtype != "fp32"]
    names = [*CONTENDERS, *(contender + COMPILED for contender in (*CONTENDERS, *floors))]
    parts: dict[str, Parts] = {name: [] for name in names}
    steps = {name: make_step(architecture, name, device, parts=parts[name]) for name in names}
    seconds = alternate(steps, rounds=rounds, warmup=3, untimed=1)
    compiled = {name.removesuffix(COMPILED): found for name, found in seconds.items() if name.endswith(COMPILED)}
    return {
        "contenders": rows_of(seconds),
        **ratios_of(compiled, RATIOS),
        "parts": {name: _medians(parts[name + COMPILED], rounds) for name in compiled},
        "counts": count_graphs(architecture, device),
    }


def _medians(steps: Parts, rounds: int) -> dict[str, float]:
    """Of each part of the steps that were timed: every second one of the last."""
    timed = steps[-2 * rounds + 1 :: 2]
    return {part: statistics.median(found) for part, found in zip(PARTS, zip(*timed, strict=True), strict=True)}


def count_graphs(architecture: Architecture, device: str, steps: int = COUNTED_STEPS) -> dict[str, int]:
    """How many graphs an FP16 training is compiled to, how many of them later on, and how often S changed."""
    torch._dynamo.reset()
    counters.clear()
    scaler = hf_mp.DynamicLossScaler(init_scale=2.0**8, growth_interval=2)
    step = make_step(architecture, "hf_mp fp16" + COMPILED, device, backend="aot_eager", loss_scaler=scaler)
    step()
    graphs, scales = counters["stats"]["unique_graphs"], {scaler.get_scale()}
    for _ in range(steps - 1):
        step()
        scales.add(scaler.get_scale())
    return {"graphs": graphs, "recompilations": counters["stats"]["unique_graphs"] - graphs, "scales": len(scales)}


def measure(
    only: Annotated[str | None, typer.Option(help="beginnings of names, comma-separated; default: all")] = None,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender")] = 15,
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Train a compiled step of each model, in turns: medians, spreads, ratios and counts."""
    allow_recompilations()
    found = {}
    for name in choose(only, MODELS):
        print(f"{name} ...", flush=True)
        found[name] = compare(MODELS[name], rounds, device)
    return {"models": found, "counted_steps": COUNTED_STEPS}
