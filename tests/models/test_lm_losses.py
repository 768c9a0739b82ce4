import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from hf_mp.models import lm_losses
from hf_mp.models.lm_losses import LMLoss
from hf_mp.scaling.scalers import StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision


@pytest.fixture(autouse=True)
def few_logits_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_losses, "FEW_ELEMENTS", 0)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64
    )
    return LlamaForCausalLM(config).eval()


def modern_bert() -> ModernBertForMaskedLM:
    torch.manual_seed(0)
    config = ModernBertConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return ModernBertForMaskedLM(config).eval()


IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [gpt2, llama, modern_bert])
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_items_in_batch": 11}, {"num_items_in_batch": torch.tensor(11)}, {"ignore_index": 3}],
    ids=["mean", "int", "tensor", "ignore_index"],
)
def test_value_and_gradients_are_those_of_the_original(make: Any, settings: dict[str, Any]) -> None:
    # in BF16 without scaling: the original's gradients are what they are with any other loss
    def loss_and_gradients(original: bool) -> tuple[Tensor, list[Tensor | None]]:
        model = make()
        if original:
            model.loss_function = ForMaskedLMLoss if make is modern_bert else ForCausalLMLoss
        MixedPrecision("bf16", loss_scaler=StaticLossScaler(1.0)).attach(model)
        assert isinstance(model.loss_function, LMLoss) is not original
        labels = IDS.masked_fill(IDS % 7 == 0, -100)
        if "ignore_index" in settings:
            labels = IDS
        loss = model(input_ids=IDS, labels=labels, **settings).loss
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    loss, gradients = loss_and_gradients(original=False)
    expected_loss, expected = loss_and_gradients(original=True)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    # FP64 goes to the original, with every argument.
    logits = torch.randn(2, 16, 64, dtype=torch.float64)
    assert torch.equal(LMLoss("ForCausalLM")(logits, IDS, 64, **settings), ForCausalLMLoss(logits, IDS, 64, **settings))
    for left, right in zip(gradients, expected, strict=True):
        assert left is not None and right is not None
        assert (left - right).norm() <= 2.0**-8 * right.norm()  # half a unit of BF16


@pytest.mark.parametrize("make", [gpt2, llama, modern_bert])
def test_few_logits_are_left_to_torch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_and_norm() -> tuple[Tensor, Tensor]:
        model = make()
        MixedPrecision("params=fp32,compute=bf16,loss_scale=1024").attach(model)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return loss.detach(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    ours = loss_and_norm()
    monkeypatch.setattr(lm_losses, "FEW_ELEMENTS", IDS.numel() * 64 + 1)
    monkeypatch.setattr(lm_losses, "cross_entropy", None)  # not to be called
    for left, right, rtol in zip(loss_and_norm(), ours, (1e-6, 2.0**-8), strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=0)


def test_logits_of_the_outputs_are_fp32_and_unchanged_by_backward() -> None:
    model = gpt2()
    MixedPrecision("fp16").attach(model)
    outputs = model(input_ids=IDS, labels=IDS)
    before = outputs.logits.clone()
    outputs.loss.backward()
    assert outputs.logits.dtype is torch.float32
    assert torch.equal(outputs.logits, before)


def test_a_loss_of_ones_own_and_other_kinds_of_loss_stay() -> None:
    model = gpt2()

    def own(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return logits.float().square().mean()

    model.loss_function = own
    runtime = MixedPrecision("fp16")
    runtime.attach(model)
    assert model.loss_function is own
    runtime.detach()
    assert model.loss_function is own
    bert = BertForSequenceClassification(
        BertConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64)
    )
    MixedPrecision("fp16").attach(bert)
    assert "_loss_function" not in bert.__dict__


def test_copies_have_it_and_neither_pickles_nor_a_detached_model() -> None:
    model = gpt2()
    runtime = MixedPrecision("fp16")
    runtime.attach(model)
    assert isinstance(copy.deepcopy(model).loss_function, LMLoss)
    assert pickle.loads(pickle.dumps(model)).loss_function is ForCausalLMLoss
    runtime.detach()
    assert "_loss_function" not in model.__dict__ and model.loss_function is ForCausalLMLoss


def test_compiled_models_and_transforms_use_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    MixedPrecision("bf16").attach(model)
    plain = model(input_ids=IDS, labels=IDS).loss
    monkeypatch.setattr("hf_mp.models.lm_losses.cross_entropy", None)  # not to be called
    compiled = torch.compile(model, backend="eager")
    # Attention is torch's own there, in BF16.
    torch.testing.assert_close(compiled(input_ids=IDS, labels=IDS).loss, plain, rtol=1e-4, atol=0)

    def loss(scale: Tensor) -> Tensor:
        logits = torch.linspace(-1, 1, 64).view(1, 2, 32) * scale
        return LMLoss("ForCausalLM")(logits, torch.tensor([[1, 2]]), 32)

    assert torch.func.grad(loss)(torch.tensor(2.0)).isfinite()
