"""``fp32_head=True``: the output embedding in FP32, in training and in generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM

import hf_mp

GPT2 = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1)
LLAMA = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def dtypes_of_products(model: Any, head: nn.Module, other: nn.Module) -> dict[str, set[torch.dtype]]:
    found: dict[str, set[torch.dtype]] = {"head": set(), "other": set()}
    head.register_forward_hook(lambda *call: found["head"].add(call[-1].dtype))
    other.register_forward_hook(lambda *call: found["other"].add(call[-1].dtype))
    ids = torch.randint(2, 64, (2, 6))
    model(input_ids=ids, labels=ids).loss.backward()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    return found


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("fp16", {"fp32_head": True}),
        ("bf16-lean", {"fp32_head": True}),
        ("fp16,fp32_head=true", {}),
        ("params=fp32,compute=bf16,fp32_head=True", {}),
        ("fp16", {"fp32_head": True, "rules": {"lm_head": "fp32", "*": "bf16"}}),  # no contradiction
    ],
)
def test_the_head_alone_is_in_fp32(precision: str, settings: dict[str, Any]) -> None:
    tied, plain = GPT2LMHeadModel(GPT2), LlamaForCausalLM(LLAMA)
    for model, other in ((tied, "transformer.h.0.mlp.c_fc"), (plain, "model.layers.0.mlp.up_proj")):
        hf_mp.MixedPrecision(precision, **settings).attach(model)
        for each in (model, copy.deepcopy(model)):
            found = dtypes_of_products(each, each.get_output_embeddings(), each.get_submodule(other))
            assert found["head"] == {torch.float32} and torch.float32 not in found["other"]
    assert tied.lm_head.weight is tied.transformer.wte.weight


@pytest.mark.parametrize(
    ("make", "rules", "message"),
    [
        (lambda: GPT2Model(GPT2), None, "and GPT2Model has none: name the modules"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), None, "and Sequential has none: name the modules"),
        (
            lambda: LlamaForCausalLM(LLAMA),
            {"lm_head": "bf16"},
            r"fp32_head=True contradicts rules=\{'lm_head': 'bf16'\}: leave out one",
        ),
    ],
)
def test_a_model_without_a_head_and_a_rule_that_contradicts_are_refused(make: Any, rules: Any, message: str) -> None:
    model, runtime = make(), hf_mp.MixedPrecision("fp16", rules=rules, fp32_head=True)
    with pytest.raises(ValueError, match=message):
        runtime.attach(model)
    assert "forward" not in vars(model)
