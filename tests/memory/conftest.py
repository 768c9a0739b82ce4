import gc
import logging
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

# Dropout stays on: it is part of what training takes. Token ids of the end are those of the small vocabulary.
SMALL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS = {
    "gpt2-4": lambda: GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=600, n_positions=64, **SMALL),
    "gpt2-12": lambda: GPT2Config(n_layer=12, n_embd=32, n_head=2, vocab_size=300, n_positions=64, **SMALL),
    "llama": lambda: LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=500, max_position_embeddings=64, **SMALL,
    ),
    "bert": lambda: BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=256, num_attention_heads=4, vocab_size=500,
        max_position_embeddings=64, pad_token_id=0,
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def gpt2_124m(tmp_path_factory) -> Path:
    """GPT-2 124M with random weights, saved."""
    directory = tmp_path_factory.mktemp("gpt2")
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.tie_weights()
    model.save_pretrained(directory)
    del model
    gc.collect()
    return directory
