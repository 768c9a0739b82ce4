"""Nine architectures of Transformers: bit for bit as under torch's CPU autocast, and trained in FP16."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import hf_mp
from hf_mp.scaling.scalers import StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
WHISPER_SIZES = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8},
    **{"max_source_positions": 10, "max_target_positions": 20},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"begin_suppress_tokens": None, "suppress_tokens": None},
}
VOCABULARY = {"vocab_size": 99}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, 12), generator=_generator())
    return {"input_ids": ids, "labels": ids}


def _picture() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=_generator()), "labels": torch.tensor([0, 2])}


def _sound() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 20, generator=_generator()), "labels": _tokens()["labels"]}


@dataclass(frozen=True)
class Case:
    """A tiny model.

    Attributes:
        config: makes its config.
        of: the Auto class that makes the model.
        inputs: makes a batch.
        fp16_tolerance: of each gradient in FP16 against FP32, as a relative error in norm.
    """

    config: Callable[[], Any]
    of: Any = hf.AutoModelForCausalLM
    inputs: Callable[[], dict[str, Tensor]] = field(default=_tokens)
    fp16_tolerance: float = 0.004

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.of.from_config(self.config()).eval()


# 0.004: eight roundings of 2**-11 one after another; measured, a quarter of that.
CASES = {
    "gpt2": Case(lambda: hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **VOCABULARY)),
    "llama": Case(lambda: hf.LlamaConfig(**SIZES, **VOCABULARY, num_key_value_heads=4)),
    "mistral": Case(lambda: hf.MistralConfig(**SIZES, **VOCABULARY, num_key_value_heads=2)),
    "bert": Case(lambda: hf.BertConfig(**SIZES, **VOCABULARY), hf.AutoModelForMaskedLM),
    "t5": Case(
        lambda: hf.T5Config(**T5_SIZES, **VOCABULARY, decoder_start_token_id=0),
        hf.AutoModelForSeq2SeqLM,
        fp16_tolerance=0.08,  # embeddings of norm 1 and attention that does not divide its scores: steep softmaxes
    ),
    "vit": Case(
        lambda: hf.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=3),
        hf.AutoModelForImageClassification,
        _picture,
    ),
    "whisper": Case(lambda: hf.WhisperConfig(**WHISPER_SIZES, **VOCABULARY), hf.AutoModelForSpeechSeq2Seq, _sound),
    "mamba": Case(lambda: hf.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **VOCABULARY)),
    "mixtral": Case(
        lambda: hf.MixtralConfig(
            **SIZES,
            **VOCABULARY,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",  # grouped_mm is in no table of torch
        )
    ),
}
every_model = pytest.mark.parametrize("name", CASES)


@dataclass(frozen=True)
class Result:
    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]


def run(model: nn.Module, inputs: dict[str, Tensor], context: AbstractContextManager[Any] | None = None) -> Result:
    """Forward and backward; the gradients are taken off the model."""
    if context is None:
        output = model(**inputs)
    else:
        with context:
            output = model(**inputs)
    output.loss.float().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Result(output.loss.detach(), output.logits.detach(), gradients)


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The error of each gradient relative to its norm, but at least to a thousandth of the largest one's.

    The gradient of a bias of attention's keys is zero but for rounding: softmax does not see what shifts all scores.
    """
    floor = max(gradient.norm() for gradient in expected.values()) / 1000
    return {n: float((found[n] - g).norm() / g.norm().clamp(min=floor)) for n, g in expected.items()}


@every_model
def test_bit_equal_to_torchs_cpu_autocast(name: str) -> None:
    model, inputs = CASES[name].model(), CASES[name].inputs()
    expected = run(copy.deepcopy(model), inputs, torch.autocast("cpu", torch.bfloat16))
    found = run(model, inputs, hf_mp.autocast(torch.bfloat16, tables="cpu"))
    assert found.logits.dtype is expected.logits.dtype and torch.equal(found.logits, expected.logits)
    assert found.loss.dtype is expected.loss.dtype and torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys() and len(found.gradients) > 10
    assert [n for n, g in found.gradients.items() if not torch.equal(g, expected.gradients[n])] == []


@every_model
def test_in_fp16_loss_and_gradients_are_those_of_fp32(name: str) -> None:
    model, inputs = CASES[name].model(), CASES[name].inputs()
    expected = run(model, inputs)
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    found = run(model, inputs)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3)
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(g.dtype is torch.float32 and g.isfinite().all() for g in found.gradients.values())
    far = distances(found.gradients, expected.gradients)
    assert {n: d for n, d in far.items() if d > CASES[name].fp16_tolerance} == {}


def gradients(name: str, scale: float) -> dict[str, Tensor]:
    model = CASES[name].model()
    MixedPrecision("fp16", loss_scaler=StaticLossScaler(scale)).attach(model)
    return run(model, CASES[name].inputs()).gradients


@every_model
def test_no_gradient_keeps_a_loss_scale(name: str) -> None:
    unscaled, scaled = gradients(name, 1.0), gradients(name, 2.0**12)
    # Without a scale gradients lose bits to underflow: half of them at worst, never a factor.
    ratios = {n: float(scaled[n].norm() / unscaled[n].norm()) for n in scaled if unscaled[n].norm() > 1e-6}
    assert len(ratios) > 10
    assert {n: ratio for n, ratio in ratios.items() if not 0.5 < ratio < 2.0} == {}


@every_model
def test_every_gradient_is_unscaled_by_its_own_scale(name: str) -> None:
    # Away from underflow and overflow a power of two changes no bit of an FP16 number, and of an FP32 one never.
    at_10, at_12 = gradients(name, 2.0**10), gradients(name, 2.0**12)
    assert {n: d for n, d in distances(at_10, at_12).items() if d > 2.0**-8} == {}
