"""Precisions of a loaded model, and presets of an estimated training."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from hf_mp.dtypes import compute_dtypes, spell
from hf_mp.environment.libraries import first_line, quiet_bitsandbytes
from hf_mp.policy import PRESETS, did_you_mean, mixed_presets


@dataclass(frozen=True)
class LoadPrecision:
    dtype: torch.dtype  # of all tensors that are not quantized
    label: str
    quantization: dict[str, Any] | None = None  # arguments of `BitsAndBytesConfig`; None for no quantization


# Dtype of other weights, and of matmuls with 4-bit weights, for which bitsandbytes' default is FP32.
_QUANTIZED = torch.float16
_FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_compute_dtype": _QUANTIZED}

PRECISIONS: dict[str, LoadPrecision] = {
    **{entry.name: LoadPrecision(entry.dtype, entry.label) for entry in compute_dtypes()},
    "int8": LoadPrecision(_QUANTIZED, "INT8", {"load_in_8bit": True}),
    "nf4": LoadPrecision(_QUANTIZED, "NF4", {**_FOUR_BIT, "bnb_4bit_quant_type": "nf4"}),
    "fp4": LoadPrecision(_QUANTIZED, "FP4", {**_FOUR_BIT, "bnb_4bit_quant_type": "fp4"}),
}


def parse_precision(precision: str | torch.dtype) -> LoadPrecision:
    if spell(precision) not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r} is not known for loading: use one of {', '.join(PRECISIONS)}"
            f"{did_you_mean(precision, PRECISIONS)}"
        )
    return PRECISIONS[spell(precision)]


def bitsandbytes_config(precision: str | torch.dtype, double_quant: bool = False) -> BitsAndBytesConfig | None:
    """Return Transformers' configuration for a quantized precision, or None."""
    quantization = parse_precision(precision).quantization
    if double_quant and (quantization is None or "load_in_4bit" not in quantization):
        raise ValueError(f"double_quant is for nf4 and fp4, it has no meaning with precision={precision!r}")
    if quantization is None:
        return None
    try:
        with quiet_bitsandbytes():  # before Transformers imports it with its output
            importlib.import_module("bitsandbytes")
    except ImportError as error:
        others = ", ".join(name for name, entry in PRECISIONS.items() if entry.quantization is None)
        raise ImportError(
            f"precision={precision!r} needs bitsandbytes, which cannot be imported ({first_line(error)}): pip install "
            f"bitsandbytes, or use one of {others}"
        ) from error
    return BitsAndBytesConfig(**quantization, bnb_4bit_use_double_quant=double_quant)


# Training


@dataclass(frozen=True)
class TrainingPreset:
    label: str
    loaded: str = "fp32"  # precision of the loaded model (PRECISIONS)
    policy: str | None = None  # PrecisionPolicy preset to attach, if any
    autocast: torch.dtype | None = None  # dtype of torch.autocast around the forward, as with fp16=True and bf16=True
    optimizer: str | None = None  # the only optimizer; None for any
    lora: bool = False  # train only LoRA adapters (PEFT) of a frozen model


TRAINING_PRESETS: dict[str, TrainingPreset] = {
    "fp32": TrainingPreset("FP32"),
    **{name: TrainingPreset(f"hf_mp {name}", policy=name) for name in mixed_presets()},
    "trainer-fp16": TrainingPreset("Trainer, fp16=True", autocast=PRESETS["fp16"].compute),
    "trainer-bf16": TrainingPreset("Trainer, bf16=True", autocast=PRESETS["bf16"].compute),
    "pure-bf16": TrainingPreset("pure BF16", loaded="bf16"),
    "fp16-adamw8bit": TrainingPreset("hf_mp fp16, 8-bit AdamW", policy="fp16", optimizer="adamw_bnb_8bit"),
    "fp16-lean-adamw8bit": TrainingPreset(
        "hf_mp fp16-lean, 8-bit AdamW", policy="fp16-lean", optimizer="adamw_bnb_8bit"
    ),
    "int8-lora": TrainingPreset("INT8 + LoRA, hf_mp fp16", loaded="int8", policy="fp16", lora=True),
    "nf4-lora": TrainingPreset("NF4 + LoRA (QLoRA), hf_mp fp16", loaded="nf4", policy="fp16", lora=True),
}
"""Presets of estimates and measurements by the value of ``precision``."""

SHOWN_PRESETS = ("fp32", "trainer-fp16", "fp16", "bf16", "fp16-lean")
"""Default presets of ``hf-mp memory --train``. All twelve do not fit in a terminal."""


def parse_preset(name: str | torch.dtype) -> TrainingPreset:
    if spell(name) not in TRAINING_PRESETS:
        raise ValueError(
            f"precision={name!r} is not known for training: use one of {', '.join(TRAINING_PRESETS)}"
            f"{did_you_mean(name, TRAINING_PRESETS)}"
        )
    return TRAINING_PRESETS[spell(name)]
