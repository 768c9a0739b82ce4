"""GPT-2 124M loaded in FP32, FP16 and INT8: the figures of today's Transformers, and those of older ones.

    python scripts/bench.py footprints

Older versions of Transformers stored a causal mask in each layer: 12 buffers of 1024 x 1024 bytes. With such masks in
the live model, both ``get_memory_footprint()`` and our count give the figures that are still quoted (486.70, 249.35 and
168.35 MiB).
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import hf_mp
from hf_mp.memory.precisions import PRECISIONS
from hf_mp.memory.sizes import MIB

NAME = "memory_footprints"


def measure() -> dict[str, Any]:
    """Load and count."""
    with tempfile.TemporaryDirectory() as directory:
        return {"model": "gpt2 (124M, random weights)", "rows": footprints(Path(directory), GPT2Config())}


def footprints(directory: Path, config: GPT2Config) -> list[dict[str, Any]]:
    """One row a precision, from real loads of a model that is saved in ``directory``."""
    GPT2LMHeadModel(config).save_pretrained(directory)
    rows = []
    for precision in PRECISIONS:
        model = hf_mp.load(directory, precision)
        footprint = hf_mp.memory_footprint(model)
        rows.append(
            {
                "precision": precision,
                "mib": round(model.get_memory_footprint() / MIB, 2),
                "with_masks_mib": round(with_causal_masks(model).get_memory_footprint() / MIB, 2),
                "quantization_state_bytes": footprint.by_kind.get("quantization state", 0),
            }
        )
        del model
        gc.collect()
    return rows


def with_causal_masks(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with the mask that each attention layer of GPT-2 held as a buffer: positions x positions booleans."""
    positions = model.config.max_position_embeddings
    for module in model.modules():
        if type(module).__name__ == "GPT2Attention":
            mask = torch.ones(positions, positions, dtype=torch.bool).tril().view(1, 1, positions, positions)
            module.register_buffer("bias", mask, persistent=False)
    return model
