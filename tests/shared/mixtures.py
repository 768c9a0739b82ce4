"""Five mixtures of experts whose weights Transformers stacks, small."""

from __future__ import annotations

from typing import Any

import torch
import transformers

import _mixtures

KINDS = _mixtures.KINDS
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
ROUTERS = {**dict.fromkeys(KINDS, "*.gate"), "GptOss": "*.router"}  # their modules


def config_of(kind: str, **settings: Any) -> Any:
    return _mixtures.config_of(kind, **{"eos_token_id": 1, "pad_token_id": 2, **settings})


def make(kind: str, implementation: str = "grouped_mm") -> Any:
    """The same weights at each call."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_of(kind))
    model.set_experts_implementation(implementation)
    return model


def token_ids(rows: int = 2) -> torch.Tensor:
    """Of shape (rows, 16)."""
    return torch.randint(3, 96, (rows, 16), generator=torch.Generator().manual_seed(2))
