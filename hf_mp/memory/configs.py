"""Built-in model configurations, which need neither network nor cache."""

from __future__ import annotations

from typing import Any

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, and the released checkpoints.
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024}

BUILT_IN: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_embd": 1600, "n_head": 25},
}


def built_in_config(name: str) -> dict[str, Any] | None:
    """The configuration of a built-in model by its short or full Hub name; None for others."""
    found = BUILT_IN.get(name.removeprefix("openai-community/"))
    return None if found is None else dict(found)
