"""The model that was given is the one that is estimated: its head, its adapters, its frozen weights, its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    BertConfig,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hf_mp
from hf_mp.memory.footprint import memory_footprint, tensors_of
from hf_mp.memory.ledger import Category
from hf_mp.memory.models import meta_model

SIZES: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
IMAGES: dict[str, Any] = dict(**SIZES, image_size=32, patch_size=8)
TEXT: dict[str, Any] = dict(**SIZES, vocab_size=100, max_position_embeddings=32)
BRANCHES: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64,
)  # fmt: skip
IDS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def bert(kind: Any, **settings: Any) -> nn.Module:
    return kind(BertConfig(**TEXT, **settings))


def whisper() -> nn.Module:
    sound: dict[str, Any] = dict(vocab_size=100, max_source_positions=50, max_target_positions=32)
    return WhisperForConditionalGeneration(WhisperConfig(**BRANCHES, **sound, **IDS, decoder_start_token_id=3))


def clip() -> nn.Module:
    return CLIPModel(CLIPConfig(text_config={**TEXT, **IDS}, vision_config=IMAGES, projection_dim=16))


def small_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=100, n_positions=32, **IDS))


def with_lora(dtype: torch.dtype = torch.float32) -> nn.Module:
    return get_peft_model(small_gpt2().to(dtype), LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))


def frozen_but_for_the_head() -> nn.Module:
    model: Any = bert(BertForSequenceClassification, num_labels=3)
    model.bert.requires_grad_(False)
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "encoder-decoder": lambda: T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=100)
    ),
    "speech": whisper,
    "classifier": lambda: bert(BertForSequenceClassification, num_labels=3),
    "regression": lambda: bert(BertForSequenceClassification, num_labels=1),
    "several labels": lambda: bert(
        BertForSequenceClassification, num_labels=4, problem_type="multi_label_classification"
    ),
    "tokens": lambda: bert(BertForTokenClassification),
    "answers": lambda: bert(BertForQuestionAnswering),
    "choices": lambda: bert(BertForMultipleChoice),
    "two losses": lambda: bert(BertForPreTraining),
    "images": lambda: ViTForImageClassification(ViTConfig(**IMAGES, num_labels=5)),
    "masked images": lambda: ViTForMaskedImageModeling(ViTConfig(**IMAGES, encoder_stride=8)),
    "segments": lambda: SegformerForSemanticSegmentation(
        SegformerConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, image_size=64)
    ),
    "videos": lambda: VideoMAEForVideoClassification(VideoMAEConfig(**IMAGES, num_frames=4)),
    "images and text": clip,
    "sound": lambda: ASTForAudioClassification(ASTConfig(**SIZES, max_length=64, num_mel_bins=32)),
    "adapters": with_lora,
    "adapters of a model in BF16": lambda: with_lora(torch.bfloat16),
    "frozen but for the head": frozen_but_for_the_head,
}


def estimate(model: Any, precision: str = "fp32", **settings: Any) -> hf_mp.TrainingMemory:
    return hf_mp.estimate_training_memory(model, precision, device="cpu", **{"batch_size": 2, **settings})


CASES = [
    *((kind, "bf16") for kind in KINDS),
    *((kind, "fp32") for kind in ("encoder-decoder", "regression", "adapters of a model in BF16")),
    *((kind, "pure-bf16") for kind in ("speech", "images", "adapters")),  # images and sound in BF16
    ("speech", "fp16-lean"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_the_peak_of_every_kind_is_the_measured_one(kind: str, precision: str) -> None:
    torch.manual_seed(0)
    model: Any = KINDS[kind]()
    settings = {"seq_len": 16} if kind in ("encoder-decoder", "classifier", "speech", "adapters") else {}
    found = estimate(model, precision, **settings)
    measured = hf_mp.measure_training_memory(model, precision, device="cpu", batch_size=2, **settings)
    assert found.model == measured.model == type(model).__name__
    assert found.parameters == measured.parameters == model.num_parameters()
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


def test_nothing_of_a_given_model_changes() -> None:
    model: Any = with_lora()
    before, settings = copy.deepcopy(model.state_dict()), model.config.to_dict()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.eval()
    for precision in ("fp16", "bf16-lean", "pure-bf16"):
        estimate(model, precision, gradient_checkpointing=True)
    hf_mp.measure_training_memory(model, "bf16", device="cpu", batch_size=1)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules()) and model.config.to_dict() == settings
    assert not any(parameter.is_meta or parameter.grad is not None for parameter in model.parameters())


def test_frozen_weights_and_adapters_are_counted_as_they_are() -> None:
    model: Any = with_lora(torch.bfloat16)
    trained, every = model.get_nb_trainable_parameters()
    found = estimate(model, "bf16").bytes_by_category
    assert found[Category.FROZEN_WEIGHTS] == 2 * (every - trained)
    assert found[Category.MASTER_WEIGHTS] == 4 * trained


def test_gradient_checkpointing_of_a_given_model_is_on() -> None:
    model = small_gpt2()
    model.gradient_checkpointing_enable()
    assert estimate(model) == estimate(small_gpt2(), gradient_checkpointing=True)
    assert estimate(model).settings.gradient_checkpointing


def test_a_quantized_model_with_adapters(tmp_path: Any) -> None:
    small_gpt2().save_pretrained(tmp_path)
    loaded = hf_mp.load(tmp_path, "nf4")
    model: Any = get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))
    trained, _ = model.get_nb_trainable_parameters()
    for device in ("cpu", "cuda"):
        found = hf_mp.estimate_training_memory(model, "fp16", batch_size=2, device=device).bytes_by_category
        frozen = memory_footprint(model).total_bytes - 4 * trained
        # A GPU allocates in blocks of 512 bytes. Weight and module have one quantization state.
        padding = 0 if device == "cpu" else 512 * len(list(tensors_of(model)))
        assert frozen <= found[Category.FROZEN_WEIGHTS] <= frozen + padding
    measured = hf_mp.measure_training_memory(model, "fp16", device="cpu", batch_size=2)
    assert estimate(model, "fp16").peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    with pytest.raises(ValueError, match="quantizes a model without adapters"):
        estimate(model, "nf4-lora")
    with pytest.raises(ValueError, match="this GPT2LMHeadModel is quantized"):
        estimate(hf_mp.load(tmp_path, "int8"), "int8-lora")


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_given_model_is_quantized_as_its_configuration_is(precision: str, tmp_path: Any) -> None:
    model = small_gpt2()
    planned = memory_footprint(meta_model(model, precision), as_if_loaded=True)
    model.save_pretrained(tmp_path)
    assert planned.by_kind == memory_footprint(hf_mp.load(tmp_path, precision)).by_kind
    assert estimate(model, f"{precision}-lora").peak_bytes == estimate(model.config, f"{precision}-lora").peak_bytes


@pytest.mark.slow
def test_a_configuration_without_a_start_token_is_trained() -> None:
    config = T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=100)
    config.decoder_start_token_id = None
    assert estimate(config, seq_len=16).peak_bytes == estimate(KINDS["encoder-decoder"](), seq_len=16).peak_bytes
    assert config.decoder_start_token_id is None


def test_the_batch_is_named_by_its_size_where_there_are_no_tokens() -> None:
    found = estimate(KINDS["images"](), gradient_checkpointing=True)
    assert found.settings.seq_len is None and str(found.settings) == "batch of 2, gradient checkpointing"


# What cannot be estimated


def attached() -> nn.Module:
    model = small_gpt2()
    hf_mp.MixedPrecision("fp16").attach(model)
    return model


def holding_a_lock() -> nn.Module:
    import threading

    model = small_gpt2()
    model.lock = threading.Lock()
    return model


@pytest.mark.parametrize(
    ("make", "settings", "error", "message"),
    [
        (
            lambda: nn.Linear(2, 2),
            {},
            TypeError,
            "of a Linear can be taken here: give a model of Transformers, or PEFT's",
        ),
        (lambda: 3, {}, TypeError, "a model is given by its name, path or configuration, or as it is, not as int"),
        (attached, {}, ValueError, r"its forward is replaced\): estimate before MixedPrecision.attach"),
        (
            holding_a_lock,
            {},
            ValueError,
            r"GPT2LMHeadModel cannot be copied \(cannot pickle '_thread.lock'.*model.config",
        ),
        (lambda: bert(BertModel), {}, ValueError, "BertModel returns no loss for input_ids, .*a head that has one"),
        (KINDS["images"], {"seq_len": 8}, ValueError, "seq_len=8 is for token ids, and ViTForIm.* reads pixel_values"),
        (
            lambda: Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, vocab_size=30, conv_dim=[8] * 7, num_feat_extract_layers=7)),
            {},
            ValueError,
            r"takes no step on input_values \(2, 160000\), labels \(2,\), the inputs that its class and conf",
        ),
    ],
)
def test_others_are_refused_in_a_sentence(make: Any, settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        estimate(make(), **settings)


def test_weights_on_meta_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = small_gpt2()
    assert estimate(model) == estimate(small_gpt2())
    with pytest.raises(ValueError, match=r"has weights on the meta device.*give its configuration \(model.config\)"):
        hf_mp.measure_training_memory(model, "fp32", device="cpu")


def test_a_name_on_the_command_line_is_of_any_kind(tmp_path: Any) -> None:
    from hf_mp.memory.report import gather_report

    KINDS["images"]().save_pretrained(tmp_path)  # type: ignore[operator]
    report = gather_report(str(tmp_path), presets=("fp32", "bf16"), batch_size=2)
    assert report.architecture == "ViTForImageClassification" and set(report.training) == {"fp32", "bf16"}
