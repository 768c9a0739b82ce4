"""Five mixtures of experts whose weights Transformers stacks, small."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
_FEW = dict(num_experts=4, num_experts_per_tok=2)
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": dict(_FEW, head_dim=16, moe_intermediate_size=32),
    "Olmoe": _FEW,
    "DeepseekV3": dict(
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16,
    ),
    "GptOss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
ROUTERS = {**dict.fromkeys(KINDS, "*.gate"), "GptOss": "*.router"}  # their modules


def config_of(kind: str, **settings: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **settings})


def make(kind: str, implementation: str = "grouped_mm") -> Any:
    """The same weights at each call."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_of(kind))
    model.set_experts_implementation(implementation)
    return model


def token_ids(rows: int = 2) -> torch.Tensor:
    """Of shape (rows, 16)."""
    return torch.randint(3, 96, (rows, 16), generator=torch.Generator().manual_seed(2))
