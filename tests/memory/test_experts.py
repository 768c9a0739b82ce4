"""Predictions for mixtures of experts: five classes, small next to measurements, and in their published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from covering import covering
from mixtures import KINDS, config_of
from torch import nn

import hf_mp
from hf_mp.casting.experts import has_stacked_experts
from hf_mp.memory import measuring, training
from hf_mp.memory.footprint import memory_footprint
from hf_mp.memory.ledger import Category
from hf_mp.memory.models import meta_model
from hf_mp.memory.precisions import TRAINING_PRESETS
from hf_mp.memory.settings import make_settings

STEP: dict[str, Any] = {"batch_size": 2, "seq_len": 32}
USUAL = ("fp16", "bf16-lean", "nf4-lora")
OTHERS = [precision for precision in TRAINING_PRESETS if precision not in USUAL]
CASES = [
    *covering(KINDS, USUAL, together=1),
    *(pytest.param(kind, precision, marks=pytest.mark.exhaustive) for kind in KINDS for precision in OTHERS),
]


def small(kind: str) -> Any:
    return config_of(kind, architectures=[f"{kind}ForCausalLM"])


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_experts_are_predicted_as_they_are_measured(kind: str, precision: str) -> None:
    predicted = hf_mp.estimate_training_memory(small(kind), precision, **STEP, device="cpu")
    measured = hf_mp.measure_training_memory(small(kind), precision, **STEP, device="cpu")
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=5e-3)
    assert predicted.peak_phase == measured.peak_phase


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_experts_are_predicted_for_a_gpu(kind: str) -> None:
    found = hf_mp.estimate_training_memory(small(kind), "fp16", **STEP)
    assert found.peak_bytes > 16 * found.parameters


@pytest.mark.parametrize(("kind", "implementation"), [("Mixtral", "grouped_mm"), ("GptOss", "batched_mm")])
def test_every_routing_takes_the_memory_that_is_predicted(
    kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tokens that are measured, all alike, each goes to the same experts: here also one to each in turn."""
    config, make = small(kind), measuring._real_model
    config._experts_implementation = implementation

    def in_turn(module: Any, args: tuple[torch.Tensor, ...]) -> Any:
        hidden, chosen, weights = args
        return hidden, (torch.arange(chosen.numel()) % 4).view_as(chosen), weights

    def balanced(*args: Any) -> nn.Module:
        model = make(*args)
        for module in filter(has_stacked_experts, model.modules()):
            module.register_forward_pre_hook(in_turn)
        return model

    worst = hf_mp.measure_training_memory(config, "fp16", **STEP, device="cpu")
    monkeypatch.setattr(measuring, "_real_model", balanced)
    even = hf_mp.measure_training_memory(config, "fp16", **STEP, device="cpu")
    assert even.peak_bytes == pytest.approx(worst.peak_bytes, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_leave_experts_in_16_bits(kind: str) -> None:
    settings = make_settings(small(kind), "nf4-lora", **STEP)
    prepared = training.prepare_model(meta_model(small(kind), "nf4"), settings)
    experts = [p for module in prepared.modules() if has_stacked_experts(module) for p in module.parameters()]
    assert experts and {weight.dtype for weight in experts} == {torch.float16}
    assert not any(weight.requires_grad for weight in experts)
    embedding = next(p for name, p in prepared.named_parameters() if name.endswith("embed_tokens.weight"))
    assert embedding.dtype is torch.float32  # as peft's guide has it


# As published, where the defaults of Transformers are other models; parameters as on the cards, of DeepSeek-V3 without
# the biases of its routers, which are buffers here.
PUBLISHED: dict[str, tuple[dict[str, int], int]] = {
    "Mixtral": ({}, 46_702_792_704),
    "Qwen3Moe": (
        dict(
            num_hidden_layers=48, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, head_dim=128,
            max_position_embeddings=40960,
        ),
        30_532_122_624,
    ),
    "Olmoe": (dict(intermediate_size=1024), 6_919_161_856),
    "DeepseekV3": ({}, 671_026_404_352),
    "GptOss": (dict(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
}  # fmt: skip


def published(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")
    return config(**PUBLISHED[kind][0], architectures=[f"{kind}ForCausalLM"])


LONG = [pytest.mark.exhaustive, pytest.mark.timeout(900)]  # adapters of 61 layers with 671 billion parameters


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LONG if kind == "DeepseekV3" else []) for kind in PUBLISHED])
def test_published_sizes_are_predicted(kind: str) -> None:
    assert meta_model(published(kind), "fp32").num_parameters() == PUBLISHED[kind][1]
    full = hf_mp.estimate_training_memory(published(kind), "bf16", batch_size=1, seq_len=512)
    assert full.peak_bytes > 16 * PUBLISHED[kind][1]
    adapters = hf_mp.estimate_training_memory(published(kind), "nf4-lora", batch_size=1, seq_len=512)
    loaded = memory_footprint(meta_model(published(kind), "nf4"), as_if_loaded=True).total_bytes
    frozen = adapters.bytes_by_category[Category.FROZEN_WEIGHTS]
    assert frozen < 1.1 * loaded  # embeddings are cast to FP32; experts in FP32 would nearly double it
