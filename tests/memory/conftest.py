import logging

import torch
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig

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


def storages_of(model):
    """Every storage that can be reached from ``model``, by walking all its objects: an independent count."""
    seen, found, waiting = set(), {}, [model]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (type, str, bytes)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if not thing.is_meta:
                found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
            waiting.append(vars(thing))
            waiting.append(thing.grad)
        elif isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, (list, tuple, set)):
            waiting.extend(thing)
        elif (hasattr(thing, "__dict__") and not callable(thing)) or isinstance(thing, nn.Module):
            waiting.append(vars(thing))
    return sum(found.values())
