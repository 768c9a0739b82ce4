"""Small models that Transformers saves under other names than their own, and rows to train them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainerCallback

Rows = list[dict[str, Any]]
State = dict[str, Tensor]

VOCABULARY = 64
IMAGE = 5  # the token that stands for a part of an image
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
)
_DEEPSEEK = dict(
    n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
)  # fmt: skip
_GLM = dict(n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1, head_dim=16)
_JAMBA = dict(
    num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
    mamba_d_state=4, mamba_d_conv=2, mamba_dt_rank=4, use_mamba_kernels=False,
)  # fmt: skip


def _causal(kind: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{kind}Config")(**{**_SIZES, "num_experts_per_tok": 2, **settings})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def _llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_SIZES),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = dict(
        depth=2, embed_dim=32, hidden_size=32, mlp_ratio=1, num_heads=2, patch_size=4, spatial_merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config={**_SIZES, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _gemma3() -> Any:
    layers = ["full_attention", "sliding_attention"]
    text = {**_SIZES, "head_dim": 16, "sliding_window": 16, "layer_types": layers, "query_pre_attn_scalar": 16}
    tokens = dict(mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=6, eoi_token_index=7)
    config = transformers.Gemma3Config(text_config=text, vision_config=dict(_VISION), **tokens)
    return transformers.Gemma3ForConditionalGeneration(config)


def _detr() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_attention_heads=2, num_queries=4, num_labels=3,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


MODELS: dict[str, Callable[[], Any]] = {
    "Mixtral": _causal("Mixtral", num_local_experts=4),
    "Qwen2-VL": _qwen2_vl,
    "DeepSeek-V3": _causal("DeepseekV3", **_DEEPSEEK),
    "LLaVA": _llava,
    "Qwen2-MoE": _causal("Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "Qwen3-MoE": _causal("Qwen3Moe", num_experts=4, moe_intermediate_size=16, head_dim=16),
    "OLMoE": _causal("Olmoe", num_experts=4),
    "GLM4-MoE": _causal("Glm4Moe", **_GLM),
    "PhiMoE": _causal("Phimoe", num_local_experts=4),
    "Jamba": _causal("Jamba", **_JAMBA),
    "Gemma3": _gemma3,
    "DETR": _detr,
}
EXPERTS = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "DeepSeek-V3", "GLM4-MoE", "PhiMoE")


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[kind]()


def adapted(kind: str, seed: int = 0) -> Any:
    """LoRA on the attention, on stacked experts and, as it is, on the head; the base has the same weights each time."""
    from peft import LoraConfig, get_peft_model

    model = make(kind)
    settings: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    if kind == "DeepSeek-V3":
        settings["target_modules"] = ["q_a_proj", "o_proj"]
    elif kind == "DETR":
        settings["modules_to_save"] = ["class_labels_classifier"]
    elif kind == "Gemma3":  # which ties its head; FSDP2 refuses PEFT's copy of a tied one
        settings["modules_to_save"] = ["multi_modal_projector"]
    if kind in EXPERTS:
        settings["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, **settings))


def rows(kind: str, count: int = 24) -> Rows:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def row() -> dict[str, Any]:
        ids = torch.randint(9, VOCABULARY, (12,), generator=generator)
        if kind == "DETR":
            boxes = {"class_labels": ids[:1] % 3, "boxes": 0.2 + 0.4 * random(1, 4)}
            return {"pixel_values": random(3, 32, 32), "labels": boxes}
        if kind == "Qwen2-VL":
            ids[1:4] = torch.tensor([7, IMAGE, 8])
            image = {"pixel_values": random(4, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([1, 2, 2])}
            return {"input_ids": ids, "labels": ids, **image, "mm_token_type_ids": (ids == IMAGE).int()}
        if kind in ("LLaVA", "Gemma3"):
            ids[1:5] = IMAGE
            types = {"token_type_ids": (ids == IMAGE).long()} if kind == "Gemma3" else {}
            return {"input_ids": ids, "labels": ids, "pixel_values": random(3, 8, 8), **types}
        return {"input_ids": ids, "labels": ids}

    return [row() for _ in range(count)]


def collate(items: Rows) -> dict[str, Any]:
    """A batch: boxes as a list, patches one after the other, all else stacked."""
    batch: dict[str, Any] = {}
    for name, first in items[0].items():
        values = [item[name] for item in items]
        if isinstance(first, dict):
            batch[name] = values
        elif name == "pixel_values" and first.dim() == 2:
            batch[name] = torch.cat(values)
        else:
            batch[name] = torch.stack(values)
    return batch


def state_of(model: Any) -> State:
    """A copy of the state of a model, of whole tensors where it is sharded: then a collective call."""
    values = {name: value.detach() for name, value in model.state_dict().items()}
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in values.items()}


class Snapshots(TrainerCallback):
    """The state of the model after each step."""

    def __init__(self) -> None:
        self.after: dict[int, State] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after[state.global_step] = state_of(model)


class FirstIsBest(Trainer):
    """The earliest checkpoint is the best."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {**super().evaluate(*args, **kwargs), "eval_quality": -float(self.state.global_step)}
