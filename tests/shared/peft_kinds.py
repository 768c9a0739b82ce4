"""Adapters of PEFT on a tiny Llama: the settings of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = {"target_modules": "all-linear"}
VOCABULARY = 199

KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=8, **TARGETS),
    "rsLoRA": lambda: peft.LoraConfig(r=8, use_rslora=True, **TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=8, use_dora=True, **TARGETS),
    "PiSSA": lambda: peft.LoraConfig(r=8, init_lora_weights="pissa", **TARGETS),
    "OLoRA": lambda: peft.LoraConfig(r=8, init_lora_weights="olora", **TARGETS),
    "AdaLoRA": lambda: peft.AdaLoraConfig(total_step=60, tinit=10, tfinal=20, **TARGETS),
    "LoHa": lambda: peft.LoHaConfig(r=8, **TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=8, **TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=32, vector_length=16, topk=2, **TARGETS),
    "RandLoRA": lambda: peft.RandLoraConfig(r=8, **TARGETS),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=100, **TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, **TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=1, **TARGETS),
    "HRA": lambda: peft.HRAConfig(r=8, **TARGETS),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm", "norm"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=8),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=8),
    "P-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=8, encoder_hidden_size=16),
    "MiSS": lambda: peft.MissConfig(r=8, **TARGETS),
    "C3A": lambda: peft.C3AConfig(block_size=16, **TARGETS),
    "ROAD": lambda: peft.RoadConfig(group_size=16, **TARGETS),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=list(range(64))),
}


def adapted(kind: str) -> nn.Module:
    """A Llama 16 wide, whose gradients of weights are far below those of activations, with an adapter of this kind."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    settings = KINDS[kind]()
    settings.task_type = "CAUSAL_LM"
    return peft.get_peft_model(LlamaForCausalLM(config), settings)
