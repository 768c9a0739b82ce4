"""Mixtures of experts of five classes, small: what tests and a benchmark train."""

from __future__ import annotations

from typing import Any

import transformers

KINDS = ("Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss")
_SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=0,
)  # fmt: skip
_DEEPSEEK = dict(
    num_key_value_heads=4, n_group=1, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
)  # fmt: skip


def config_of(kind: str, experts: int = 4, **settings: Any) -> Any:
    """The configuration of a kind with so many experts, of which a token gets two."""
    of_kind: dict[str, dict[str, Any]] = {
        "Mixtral": dict(num_local_experts=experts),
        "Qwen3Moe": dict(num_experts=experts, head_dim=16, moe_intermediate_size=32),
        "Olmoe": dict(num_experts=experts),
        "DeepseekV3": dict(_DEEPSEEK, n_routed_experts=experts),
        "GptOss": dict(num_local_experts=experts, head_dim=16),
    }
    sizes = {**_SIZES, "num_experts_per_tok": 2, **of_kind[kind], **settings}
    return getattr(transformers, f"{kind}Config")(**sizes)
