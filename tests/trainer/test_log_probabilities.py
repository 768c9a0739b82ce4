"""The gap between the log-probabilities of training and of generation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_mp
from hf_mp.trainer.log_probabilities import _compare


def tiny(kind: str = "gpt2") -> GPT2LMHeadModel | LlamaForCausalLM:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=1
        )
        return GPT2LMHeadModel(config).train()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    names = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **names, **sizes)).train()


def prompts() -> Tensor:
    return torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_in_fp32_both_agree(kind: str) -> None:
    model = tiny(kind)
    gap = hf_mp.log_probability_gap(model, {"input_ids": prompts()}, new_tokens=8)
    assert gap.tokens == 24 and gap.dtype == "float32"
    assert gap.maximum < 1e-5 and gap.clipped_share == 0.0
    assert model.training  # as it was


def test_the_gap_to_an_engine_in_16_bits_is_seen() -> None:
    ids, engine = prompts(), tiny().to(torch.bfloat16).eval()
    with torch.no_grad():
        logits = engine(input_ids=ids).logits[:, :-1].float()
    generated = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).to(torch.bfloat16)
    gap = hf_mp.log_probability_gap(tiny(), {"input_ids": ids}, generated)
    assert 1e-4 < gap.mean <= gap.rms <= gap.maximum < 0.5
    assert gap.dtype == "bfloat16"


def test_attached_models_run_as_they_train() -> None:
    model = tiny()
    hf_mp.MixedPrecision("bf16").attach(model)
    gap = hf_mp.log_probability_gap(model, {"input_ids": prompts()}, new_tokens=8)
    assert gap.maximum < 0.1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padding_on_the_left_changes_nothing(kind: str) -> None:
    model, ids = tiny(kind), prompts()
    padded = torch.cat([torch.zeros(3, 4, dtype=ids.dtype), ids], 1)
    mask = torch.cat([torch.zeros(3, 4, dtype=ids.dtype), torch.ones_like(ids)], 1)
    gap = hf_mp.log_probability_gap(model, {"input_ids": padded, "attention_mask": mask}, new_tokens=4)
    assert gap.maximum < 1e-5


def test_of_an_engine() -> None:
    model, ids = tiny().eval(), prompts()
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -4:-1]
    exact = logits.log_softmax(-1).gather(-1, ids[:, -3:, None]).squeeze(-1)
    shifted = exact - 0.5
    shifted[0, 0] = math.nan
    gap = hf_mp.log_probability_gap(model, {"input_ids": ids}, shifted)
    assert gap.tokens == 8
    assert gap.mean == pytest.approx(0.5, abs=1e-5) and gap.rms == pytest.approx(0.5, abs=1e-5)
    assert gap.alpha == pytest.approx(0.5, abs=1e-4) and gap.beta == pytest.approx(0.0, abs=1e-4)
    assert gap.clipped_share == 1.0  # e^0.5 is above 1.2
    assert hf_mp.log_probability_gap(model, {"input_ids": ids}, shifted, clip=0.7).clipped_share == 0.0


def test_the_slope() -> None:
    before = -torch.arange(1.0, 9.0, dtype=torch.float64)
    gap = _compare(0.01 + 0.002 * before, before, 0.2, "float32")
    assert (gap.alpha, gap.beta) == pytest.approx((0.01, 0.002))
    assert math.isnan(_compare(before, torch.zeros_like(before), 0.2, "").beta)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(3, 7), r"generated has shape \(3, 7\), and input_ids \(3, 7\): .* N from 1 to 6"),
        (torch.zeros(2, 3), r"generated has shape \(2, 3\)"),
        (torch.zeros(3), r"generated has shape \(3,\)"),
        (torch.ones(3, 2), "values above 0 or infinite"),
        (torch.full((3, 2), -math.inf), "values above 0 or infinite"),
        (torch.full((3, 2), math.nan), "NaN throughout"),
    ],
)
def test_what_is_no_log_probability(found: Tensor, message: str) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=message):
        hf_mp.log_probability_gap(model, {"input_ids": prompts()}, found)
    assert model.training
