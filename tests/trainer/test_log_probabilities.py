"""The gap between the log-probabilities of training and of generation."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_mp
from hf_mp.trainer.log_probabilities import _compare

# Transformers gives names of arguments up with one.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


def tiny(kind: str = "gpt2") -> GPT2LMHeadModel | LlamaForCausalLM:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=2, n_embd=48, n_head=4, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=1
        )
        return GPT2LMHeadModel(config).train()
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **names, **sizes)).train()


def prompts() -> Tensor:
    return torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_in_fp32_both_agree(kind: str) -> None:
    model = tiny(kind)
    gap = hf_mp.log_probability_gap(model, {"input_ids": prompts()}, new_tokens=8)
    assert gap.tokens == 24
    assert gap.maximum < 1e-5 and gap.clipped_share == 0.0
    assert model.training  # as it was


def test_to_draw_leaves_the_random_state() -> None:
    model = tiny()
    before = torch.get_rng_state()
    hf_mp.log_probability_gap(model, {"input_ids": prompts()}, new_tokens=2)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="out of it"):
        model.lm_head.register_forward_hook(_fail)
        hf_mp.log_probability_gap(model, {"input_ids": prompts()}, new_tokens=2)
    assert torch.equal(torch.get_rng_state(), before)


def _fail(*_: object) -> None:
    torch.rand(1)
    raise RuntimeError("out of it")


def test_the_gap_to_an_engine_in_16_bits_is_seen() -> None:
    ids, engine = prompts(), tiny().to(torch.bfloat16).eval()
    with torch.no_grad():
        logits = engine(input_ids=ids).logits[:, :-1].float()
    generated = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).to(torch.bfloat16)
    gap = hf_mp.log_probability_gap(tiny(), {"input_ids": ids}, generated)
    assert 1e-4 < gap.mean <= gap.rms <= gap.maximum < 0.5


# How far a log-probability may be off FP64's, root mean square, in units of 2**-9, BF16's unit roundoff, times the
# standard deviation of the logits: each value is rounded some ten times on its way through two layers. Llama's large
# weights make its softmaxes steep, which multiplies each error. Measured: 2 and 14.
ROUNDOFFS = {"gpt2": 6, "llama": 40}


@pytest.mark.parametrize("kind", ROUNDOFFS)
def test_in_bf16_training_and_generation_are_each_near_fp64(kind: str) -> None:
    model = tiny(kind).eval()
    exact_model = copy.deepcopy(model).double()
    hf_mp.MixedPrecision("bf16").attach(model)
    settings = {"do_sample": False, "min_new_tokens": 24, "max_new_tokens": 24, "output_logits": True}
    drawn = model.generate(prompts(), return_dict_in_generate=True, **settings)
    ids = drawn.sequences
    with torch.no_grad():
        exact_logits = exact_model(input_ids=ids).logits[:, 6:-1]
    limit = ROUNDOFFS[kind] * 2.0**-9 * exact_logits.std().item()
    exact, generated = (
        logits.log_softmax(-1).gather(-1, ids[:, 7:, None]).squeeze(-1)
        for logits in (exact_logits, torch.stack(drawn.logits, 1).double())
    )
    assert 0.0 < (generated - exact).square().mean().sqrt() < limit
    assert 0.0 < hf_mp.log_probability_gap(model, {"input_ids": ids}, exact).rms < limit


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
    gap = _compare(0.01 + 0.002 * before, before, 0.2)
    assert (gap.alpha, gap.beta) == pytest.approx((0.01, 0.002))
    assert math.isnan(_compare(before, torch.zeros_like(before), 0.2).beta)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(3, 7), r"generated has shape \(3, 7\), and input_ids \(3, 7\): .* N from 1 to 6"),
        (torch.zeros(2, 3), r"generated has shape \(2, 3\)"),
        (torch.zeros(3), r"generated has shape \(3,\)"),
        (torch.ones(3, 2), "values above 0 or infinite"),
        (torch.full((3, 2), -math.inf), "values above 0 or infinite"),
        (torch.full((3, 2), math.nan), "all of generated is NaN"),
    ],
)
def test_what_is_no_log_probability(found: Tensor, message: str) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=message):
        hf_mp.log_probability_gap(model, {"input_ids": prompts()}, found)
    assert model.training


# A batch with labels


def labelled(ids: Tensor, first: int = 5) -> dict[str, Tensor]:
    labels = ids.clone()
    labels[:, :first] = -100
    labels[0, -2:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_tokens_of_labels_are_generated_again(kind: str) -> None:
    model = tiny(kind)
    hf_mp.MixedPrecision("fp16").attach(model)
    asked = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "output_logits": True}
    drawn = model.eval().generate(prompts()[:, :5], return_dict_in_generate=True, **asked)
    ids = drawn.sequences
    found = torch.stack(drawn.logits, 1).log_softmax(-1).gather(-1, ids[:, 5:, None]).squeeze(-1)
    found[0, -2:] = math.nan
    expected = hf_mp.log_probability_gap(model, {"input_ids": ids}, found)
    assert hf_mp.log_probability_gap(model, labelled(ids)) == expected  # bit for bit what generate() computes
    padding = {"attention_mask": torch.cat([torch.zeros(3, 2), torch.ones(3, 11)], 1).long()}
    padded = torch.cat([torch.zeros(3, 2, dtype=ids.dtype), ids], 1)
    assert hf_mp.log_probability_gap(model, {**labelled(padded, 7), **padding}).tokens == expected.tokens == 16


@pytest.mark.parametrize("pads", [(5, 0, 0), (0, 2, 4)])
def test_rows_padded_by_different_lengths(pads: tuple[int, ...]) -> None:
    ids = prompts()
    mask = torch.stack([torch.arange(7) >= pad for pad in pads]).long()
    labels = ids.masked_fill(mask == 0, -100)
    gap = hf_mp.log_probability_gap(tiny("llama"), {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert gap.maximum < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_positions_that_only_say_where_padding_ends(kind: str) -> None:
    ids, mask = prompts(), torch.ones(3, 7, dtype=torch.int64)
    mask[0, :3], mask[1, -2:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100  # the first token behind padding is predicted from padding
    positions = torch.arange(7) - torch.tensor([[3], [0], [0]])
    for of_padding in (0, 1):  # any will do there
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        batch["position_ids"] = positions.masked_fill(mask == 0, of_padding)
        assert hf_mp.log_probability_gap(tiny(kind), batch).maximum < 1e-5
    whole = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(7)[None]}
    assert hf_mp.log_probability_gap(tiny(kind), whole).maximum < 1e-5
    with pytest.raises(ValueError, match="batch has position_ids, which generation"):
        hf_mp.log_probability_gap(tiny(kind), {**batch, "position_ids": torch.arange(7)[None]})


def test_a_part_in_evaluation_mode_stays_there() -> None:
    model = tiny()
    model.transformer.h[0].eval()
    hf_mp.log_probability_gap(model, labelled(prompts()))
    assert model.training and model.transformer.h[1].attn.training
    assert not any(module.training for module in model.transformer.h[0].modules())


NOTHING_DRAWN = "new_tokens has no effect where batch has labels or generated is given"


@pytest.mark.parametrize(
    ("labels", "asked", "message"),
    [
        ([1, 1, 1], {}, r"labels have shape \(3,\), and input_ids \(3, 7\): one label for each token"),
        ([[-100] * 7] * 3, {}, "all labels are -100"),
        ([[2] * 7] * 3, {"new_tokens": 4}, NOTHING_DRAWN),
        (None, {"generated": torch.zeros(3, 2), "new_tokens": 4}, NOTHING_DRAWN),
    ],
)
def test_what_cannot_be_generated(labels: Any, asked: dict[str, Any], message: str) -> None:
    batch = {"input_ids": prompts()} | ({} if labels is None else {"labels": torch.tensor(labels)})
    with pytest.raises(ValueError, match=message):
        hf_mp.log_probability_gap(tiny(), batch, **asked)


def test_another_model_as_the_generator_is_refused() -> None:
    with pytest.raises(TypeError, match="generated is a GPT2LMHeadModel: give"):
        hf_mp.log_probability_gap(tiny(), {"input_ids": prompts()}, tiny())  # type: ignore[arg-type]


def test_what_overflows_is_not_left_out() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = math.inf
    gap = hf_mp.log_probability_gap(model, labelled(prompts()))
    assert math.isnan(gap.mean) and math.isnan(gap.clipped_share)
