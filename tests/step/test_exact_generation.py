"""``exact_generation=True``: a token's log-probability has the same bits in generation as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from mixtures import KINDS, make
from tiny import Using
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_mp

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.15,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=48,
            n_head=4,
            vocab_size=96,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.15,
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=12, **SIZES)),
}


def attached(kind: str, precision: str, **settings: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[kind]()
    hf_mp.MixedPrecision(precision, **settings).attach(model)
    return model


def prompts() -> Tensor:
    return torch.randint(2, 96, (3, 9), generator=torch.Generator().manual_seed(1))


def padded_on_the_left() -> Tensor:
    return torch.arange(9).ge(torch.tensor([[4], [0], [0]])).long()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_gap_is_zero(kind: str, precision: str) -> None:
    model, batch = attached(kind, precision, exact_generation=True), {"input_ids": prompts()}
    assert hf_mp.log_probability_gap(model, batch, new_tokens=12).maximum == 0.0
    model = attached(kind, precision, exact_generation=True, fp32_head=True)
    gap = hf_mp.log_probability_gap(model, {**batch, "attention_mask": padded_on_the_left()}, new_tokens=12)
    assert gap.maximum == 0.0 and gap.tokens == 36


# Attention of GptOss is refused.
@pytest.mark.parametrize(
    ("kind", "implementation", "precision"),
    covering([kind for kind in KINDS if kind != "GptOss"], ["eager", "batched_mm"], ["fp16", "bf16"], together=1),
)
def test_mixtures_of_experts_have_no_gap(kind: str, implementation: str, precision: str) -> None:
    """Rows are grouped by expert, differently for each number of tokens: FP64's sums do not show it."""
    model = make(kind, implementation)
    for weight in (parameter for parameter in model.parameters() if parameter.dim() > 1):
        weight.data *= 6  # what the default initialization hides
    hf_mp.MixedPrecision(precision, exact_generation=True).attach(model)
    batch = {"input_ids": prompts(), "attention_mask": padded_on_the_left()}
    assert hf_mp.log_probability_gap(model, batch, new_tokens=4).maximum == 0.0
    model.eval()
    with torch.no_grad():
        alone = model(input_ids=prompts()[:1, :5]).logits
        assert torch.equal(alone, model(input_ids=prompts()).logits[:1, :5])


def test_grouped_products_of_experts_are_refused() -> None:
    model = make("Mixtral", "grouped_mm")
    hf_mp.MixedPrecision("fp16", exact_generation=True).attach(model)
    with pytest.raises(ValueError, match=r"grouped matmuls of experts have no FP64 kernel: load .*'eager'"):
        model(input_ids=prompts())


def padded() -> dict[str, Tensor]:
    """As TRL gives them: prompts padded on the left, completions on the right, and a mask alone."""
    ids = torch.randint(2, 96, (3, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :2], mask[2, -3:] = 0, 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", MODELS)
def test_the_gap_is_zero_behind_padding(kind: str) -> None:
    model, batch = attached(kind, "fp16", exact_generation=True), padded()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :9] = -100
    gap = hf_mp.log_probability_gap(model, {**batch, "labels": labels})
    assert gap.maximum == 0.0 and gap.tokens == 33
    model.eval()
    behind = batch["input_ids"][:1, 4:]  # nor do bits depend on padding itself
    assert torch.equal(model(**batch).logits[:1, 4:], model(input_ids=behind).logits)


def test_positions_are_counted_where_none_are_given() -> None:
    batch = padded()
    model = attached("gpt2", "fp16", exact_generation=True)
    seen: list[Tensor] = []
    model.transformer.wpe.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    columns = torch.arange(21).expand(3, 21)
    counted = (columns - torch.tensor([[4], [2], [0]])).clamp(min=0)
    ids, mask = batch.values()
    for args, kwargs, expected in (
        ((), batch, counted),
        ((), {"inputs_embeds": model.transformer.wte.weight[ids], "attention_mask": mask}, counted),
        ((ids, None, mask), {}, counted),
        ((), {**batch, "position_ids": columns}, columns),
    ):
        model(*args, **kwargs)
        assert torch.equal(seen[-1][mask != 0], expected[mask != 0])
    with torch.no_grad():
        cache = model(**{name: one[:, :20] for name, one in batch.items()}).past_key_values
        model(ids[:, 20:], past_key_values=cache, attention_mask=mask)
    assert torch.equal(seen[-1][:2], counted[:2, 20:])
    model.transformer(**batch)  # generates nothing
    assert torch.equal(seen[-1].expand(3, 21), columns)
    plain = attached("gpt2", "fp16")
    plain.transformer.wpe.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    plain(**batch)
    assert torch.equal(seen[-1].expand(3, 21), columns)


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16-lean"])
def test_the_forward_that_trains_has_these_bits_too(precision: str) -> None:
    model, ids = attached("llama", precision, exact_generation=True), prompts()
    trained = model(input_ids=ids).logits
    assert trained.requires_grad
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trained)
        alone = model(input_ids=ids[:1, :5]).logits  # nor do they depend on the batch around a token
    assert torch.equal(alone, trained[:1, :5])


def test_it_trains_as_without_it() -> None:
    gradients = []
    for exact in (False, True):
        model = attached("qwen", "fp16", exact_generation=exact, fp32_head=exact)
        model(input_ids=prompts(), labels=prompts()).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 2e-3 * gradients[0].norm()
    assert not torch.equal(*gradients)


def test_a_rule_by_op_and_a_nested_autocast_are_summed_exactly_too() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(600, 40)
    x = torch.randn(64, 600)
    for rules in ({nn.functional.linear: "fp32"}, {"0:linear": "fp32"}, {"0": "fp32"}, {"0": "bf16"}):
        model = nn.Sequential(layer, nn.Identity())
        runtime = hf_mp.MixedPrecision("fp16", rules=rules, exact_generation=True)
        runtime.attach(model)
        with torch.no_grad():
            assert all(torch.equal(model(x)[row : row + 1], model(x[row : row + 1])) for row in range(0, 64, 8)), rules
        runtime.detach()


@pytest.mark.parametrize("rules", [None, {nn.functional.linear: "fp32"}, {torch.einsum: "lower_precision"}])
@pytest.mark.parametrize("product", [nn.functional.linear, lambda x, w: torch.einsum("ij,kj->ik", x, w)])
def test_what_the_model_multiplies_in_fp64_stays_in_fp64(product: Callable[..., Tensor], rules: hf_mp.Rules) -> None:
    weight, x = nn.Parameter(torch.randn(4, 16)), torch.randn(3, 16)
    model = Using(lambda m, x: product(x.double(), m.weight.double()), weight=weight)
    hf_mp.MixedPrecision("fp16", rules=rules, exact_generation=True).attach(model)
    assert torch.equal(model(x), product(x.double(), weight.double()))


def test_what_cannot_be_exact_is_named() -> None:
    eager = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="eager")
    experts = LlamaForCausalLM(LlamaConfig(**SIZES))
    experts.model.layers[0].mlp.experts = nn.Module()  # of another library, which may sum in any way
    experts.model.layers[0].mlp.experts.weight = nn.Parameter(torch.randn(2, 4, 4))
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4))
    capped = Gemma2ForCausalLM(Gemma2Config(head_dim=12, **SIZES))

    class WithImages(LlamaForCausalLM):
        def _prepare_position_ids_for_generation(self, *args: Any) -> None:
            raise NotImplementedError

    no_sdpa = r"its attention is 'eager'.* Transformers has no 'sdpa' for it, so leave exact_generation out"
    for model, message in (
        (eager, r"not be exact for LlamaForCausalLM: its attention is 'eager'.*attn_implementation='sdpa'"),
        *([] if capped._supports_sdpa else [(capped, no_sdpa)]),  # Transformers 5.17 has one
        (WithImages(LlamaConfig(**SIZES)), r"generate\(\) counts its positions in a way of its own"),
        (experts, r"model\.layers\.0\..*experts.* has the weights of several experts in one"),
        (recurrent, "a recurrent state"),
    ):
        before = [parameter.dtype for parameter in model.parameters()]
        with pytest.raises(ValueError, match=message):
            hf_mp.MixedPrecision("fp16", exact_generation=True).attach(model)
        assert [parameter.dtype for parameter in model.parameters()] == before
    with pytest.raises(ValueError, match="sums matmul in FP64, and a rule keeps"):
        hf_mp.MixedPrecision("fp16", exact_generation=True, rules={torch.matmul: "unlisted"})
    with pytest.raises(ValueError, match="exact_generation=True with compute=fp32"):
        hf_mp.MixedPrecision("fp32", exact_generation=True)


@pytest.mark.exhaustive
def test_a_compiled_model_is_refused() -> None:
    model = torch.compile(attached("gpt2", "fp16", exact_generation=True), backend="eager")
    with pytest.raises(Exception, match="for models that are not compiled"):
        model(input_ids=prompts())
