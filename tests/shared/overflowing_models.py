"""Twelve architectures, small, each made to leave FP16's range in one of three places.

A weight is multiplied by a power of two, and its learning rate goes along, as Adam's steps do not grow with gradients.
Scores are left as they come from their product for longer: the softmax is that of the model.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hf_mp

WIDTH, LAYERS, VOCABULARY = 64, 2, 64
PLACES = ("attention scores", "inside the MLP", "residual stream")
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "use_cache": False,
    "attention_dropout": 0.0, **_SPECIAL,
}  # fmt: skip
_BERT = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_BART = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH,
    "vocab_size": VOCABULARY, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "use_cache": False,
    "decoder_start_token_id": 0, **_SPECIAL,
}  # fmt: skip
_QK = ("self_attn.q_proj", "self_attn.k_proj")


@dataclass(frozen=True)
class Architecture:
    """A model class, its configuration, and the names of what is planted, in its second block."""

    model: str
    config: str
    settings: dict[str, Any]
    block: str
    query_key: tuple[str, ...]
    up: str
    down: str
    batch: str = "causal"


def _llama_like(name: str, **more: Any) -> Architecture:
    settings = {**_LLAMA, **more}
    return Architecture(
        f"{name}ForCausalLM", f"{name}Config", settings, "model.layers.1", _QK, "mlp.up_proj", "mlp.down_proj"
    )


ARCHITECTURES: dict[str, Architecture] = {
    "Gemma 3": Architecture(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16},
        "model.layers.1", ("self_attn.q_norm", "self_attn.k_norm"), "mlp.up_proj", "mlp.down_proj",
    ),
    "T5": Architecture(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_layers": LAYERS, "num_heads": 4, "dropout_rate": 0.0,
         "vocab_size": VOCABULARY, "use_cache": False, "decoder_start_token_id": 0, **_SPECIAL},
        "encoder.block.1", ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k"), "layer.1.DenseReluDense.wi",
        "layer.1.DenseReluDense.wo",
    ),
    "Llama": _llama_like("Llama"),
    "Mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 2,
         "experts_implementation": "eager"},
        "model.layers.1", _QK, "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    ),
    "BERT": Architecture(
        "BertForMaskedLM", "BertConfig", {**_BERT, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
        "bert.encoder.layer.1", ("attention.self.query", "attention.self.key"), "intermediate.dense", "output.dense",
    ),
    "ViT": Architecture(
        "ViTForImageClassification", "ViTConfig", {**_BERT, "image_size": 16, "patch_size": 4, "num_labels": 10},
        "vit.layers.1", ("attention.q_proj", "attention.k_proj"), "mlp.fc1", "mlp.fc2", "image",
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": None,
         "begin_suppress_tokens": None},
        "model.decoder.layers.1", _QK, "fc1", "fc2", "speech",
    ),
    "GPT-2": Architecture(
        "GPT2LMHeadModel", "GPT2Config",
        {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "n_inner": 2 * WIDTH, "vocab_size": VOCABULARY,
         "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, **_SPECIAL},
        "transformer.h.1", ("attn.c_attn",), "mlp.c_fc", "mlp.c_proj",
    ),
    "Qwen2": _llama_like("Qwen2"),
    "OPT": Architecture(
        "OPTForCausalLM", "OPTConfig",
        {**_LLAMA, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
        "model.decoder.layers.1", _QK, "fc1", "fc2",
    ),
    "GPT-NeoX": Architecture(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_LLAMA, "hidden_dropout": 0.0}, "gpt_neox.layers.1",
        ("attention.query_key_value",), "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    ),
    "BART": Architecture(
        "BartForConditionalGeneration", "BartConfig", _BART, "model.encoder.layers.1", _QK, "fc1", "fc2"
    ),
}  # fmt: skip


def make(name: str) -> nn.Module:
    """The architecture with its own random weights, in training mode; attention is computed op by op."""
    found = ARCHITECTURES[name]
    config = getattr(transformers, found.config)(**found.settings, attn_implementation="eager")
    config.initializer_range = config.init_std = 0.1
    torch.manual_seed(0)
    return getattr(transformers, found.model)(config).train()


def batches(name: str, count: int) -> list[dict[str, Tensor]]:
    """A few sentences that come again and again, to be learnt by heart."""
    generator = torch.Generator().manual_seed(1)
    kind, made = ARCHITECTURES[name].batch, []
    for _ in range(4):
        ids = torch.randint(1, VOCABULARY, (4, 12), generator=generator)
        batch = {"input_ids": ids, "labels": ids}
        if kind == "image":
            labels = torch.randint(0, 10, (4,), generator=generator)
            batch = {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator), "labels": labels}
        elif kind == "speech":
            batch = {"input_features": torch.randn(4, 8, 32, generator=generator), "labels": ids}
        made.append(batch)
    return [made[step % len(made)] for step in range(count)]


def plant(name: str, place: str, model: nn.Module) -> dict[str, float]:
    """Have ``model`` leave FP16's range in ``place``, by a factor of 3; returns by what parameters were multiplied."""
    found = ARCHITECTURES[name]
    inside = f"{found.block}."
    if place == PLACES[0]:
        attention = model.get_submodule(inside + found.query_key[0].rpartition(".")[0])
        return _in_scores(name, model, attention, inside, found.query_key)
    if place == PLACES[1]:
        factor = _power_to(_largest_output(name, model, inside + found.up))
        if found.up.endswith("gate_up_proj"):  # the second half of a weight, and so of its own learning rate no more
            weight = model.get_parameter(inside + found.up).data
            weight[:, weight.shape[1] // 2 :].mul_(factor)
            return {}
        factors = {found.up: factor}
    else:
        factors = {found.down: _power_to(_largest_output(name, model, inside + found.down))}
    planted = {}
    for key, factor in factors.items():
        for full, parameter in model.named_parameters():
            if full == inside + key or full.startswith(f"{inside}{key}."):
                parameter.data.mul_(factor)
                planted[full] = factor
    return planted


def _in_scores(
    name: str, model: nn.Module, attention: nn.Module, inside: str, query_key: tuple[str, ...]
) -> dict[str, float]:
    """Have the scores of one attention multiplied late by what they were divided by: as they come from the product."""
    module, path = sys.modules[type(model).__module__], next(n for n, m in model.named_modules() if m is attention)
    if (before := getattr(module, "eager_attention_forward", None)) is None:  # T5: larger scores themselves
        factor = math.sqrt(_power_to(_largest_of_op(name, model, path, "matmul")))
        planted = {f"{inside}{key}.weight": factor for key in query_key}
        for key in planted:
            model.get_parameter(key).data.mul_(factor)
        return planted
    before = getattr(before, "before", before)
    attention.late_factor = _power_to(_largest_of_op(name, model, path, "matmul"))

    def late(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
        factor = getattr(module, "late_factor", 1.0)
        if factor != 1.0:
            scaling = args[0] if args else kwargs.pop("scaling", None)
            args, kwargs = args[1:], {**kwargs, "scaling": (scaling or query.shape[-1] ** -0.5) / factor}
        return before(module, query * factor, key, value, mask, *args, **kwargs)

    late.before = before  # type: ignore[attr-defined]
    module.eager_attention_forward = late
    return {}


def _power_to(largest: float) -> float:
    return 2.0 ** math.ceil(math.log2(3 * 65504 / largest))


def _largest_of_op(name: str, model: nn.Module, module: str, op: str) -> float:
    report = hf_mp.calibrate(model, batches(name, 1))
    return max(found.largest for found in report.ops if found.module == module and op in found.op)


def _largest_output(name: str, model: nn.Module, module: str) -> float:
    if module.endswith(".gate_up_proj"):  # of the experts: weights and no modules
        return _largest_of_op(name, model, module.removesuffix(".gate_up_proj"), "")
    seen: list[float] = []
    watched = model.get_submodule(module.removesuffix(".down_proj") if "experts" in module else module)
    handle = watched.register_forward_hook(lambda m, args, output: seen.append(output.abs().max().item()))
    model(**batches(name, 1)[0])
    handle.remove()
    return max(seen)


def parameter_groups(model: nn.Module, factors: dict[str, float], lr: float) -> list[dict[str, Any]]:
    """Groups for Adam, whose learning rates go with the factors."""
    groups: dict[float, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(factors.get(name, 1.0), []).append(parameter)
    return [{"params": parameters, "lr": lr * factor} for factor, parameters in groups.items()]
