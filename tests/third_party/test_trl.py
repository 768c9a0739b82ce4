"""TRL's SFTTrainer and DPOTrainer, as they are, with our callback added."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import arguments, logged, make_trainer, poisoned, tiny_gpt2
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_mp.step.forward import AttachedForward

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

DTYPES = (torch.float32, torch.float16)
WORDS = [f"w{number}" for number in range(150)]


def text(numbers: random.Random, length: int) -> str:
    return " ".join(numbers.choices(WORDS, k=length))


def conversations(kind: str) -> Dataset:
    numbers = random.Random(0)
    if kind == "sft":
        return Dataset.from_list([{"text": text(numbers, 16)} for _ in range(16)])
    rows = [{name: text(numbers, 6) for name in ("prompt", "chosen", "rejected")} for _ in range(16)]
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_gpt2(torch.float16).float().save_pretrained(path)  # FP16 holds these weights exactly
    tokenizer().save_pretrained(path)
    return path


def trl_trainer(
    kind: str, contender: str, precision: str, saved: Path, path: Path, *, lora: bool = False, **settings: Any
) -> Any:
    trainer, config = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[kind]
    base = poisoned(trainer, settings.pop("poisoned")) if "poisoned" in settings else trainer
    dtype = settings.pop("dtype", torch.float32)
    learning_rate = {"sft": 0.5, "dpo": 0.05}[kind]
    reference = {"ref_model": settings.pop("ref_model")} if "ref_model" in settings else {}
    args = arguments(path / contender, config, **{"bf16": False, "learning_rate": learning_rate, **settings})
    named: dict[str, Any] = {"train_dataset": conversations(kind), "processing_class": tokenizer(), **reference}
    if lora:
        named["peft_config"] = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    torch.manual_seed(7)
    return make_trainer(contender, precision, model, args, base, **named)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_evaluation_and_a_plain_model_in_the_end(tmp_path: Path, saved: Path, kind: str) -> None:
    trainer = trl_trainer(kind, "callback", "fp16", saved, tmp_path)
    trainer.train()
    (before,) = logged(trainer, "loss")[-1:]
    metrics = trainer.evaluate(trainer.train_dataset)
    assert metrics["eval_loss"] == pytest.approx(before, rel=0.2)
    lm_head = trainer.model.get_output_embeddings()
    dtypes = set()
    lm_head.register_forward_hook(lambda *arguments: dtypes.add(arguments[-1].dtype))
    trainer.model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    assert dtypes == {torch.float32}


def test_the_bf16_that_trl_sets_unasked_is_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"bf16=True switches.*TRL sets bf16 unasked: there, say bf16=False"):
        trl_trainer("sft", "callback", "fp16", saved, tmp_path, bf16=None)


OURS = ("callback fp16", "subclass fp16", "subclass fp16-lean", "callback bf16", "subclass bf16")


@pytest.mark.parametrize(("ours", "dtype", "lora"), covering(OURS, DTYPES, [False, True]), ids=str)
def test_policy_and_reference_agree_bit_for_bit(
    tmp_path: Path, saved: Path, ours: str, dtype: torch.dtype, lora: bool
) -> None:
    """At learning rate 0, as with the stock Trainer: a reference in another precision is 1e-2 nats away."""
    contender, precision = ours.split()
    settings = {"learning_rate": 0.0, "max_steps": 2, "dtype": dtype}
    trainer = trl_trainer("dpo", contender, precision, saved, tmp_path, lora=lora, **settings)
    products: list[torch.dtype] = []
    if not lora:
        reference = trainer.ref_model
        own_bytes, own_dtypes = memory_of(reference), [parameter.dtype for parameter in reference.parameters()]
        reference.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *call: products.append(call[-1].dtype))
    trainer.train()
    for key in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert logged(trainer, key) == [0.0, 0.0]
    if not lora:
        assert set(products) == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert not any(isinstance(vars(module).get("forward"), AttachedForward) for module in reference.modules())
        assert memory_of(reference) == own_bytes
        assert [parameter.dtype for parameter in reference.parameters()] == own_dtypes


@pytest.mark.parametrize("contender", ["callback", "subclass"])
def test_a_reference_that_is_given_agrees(tmp_path: Path, saved: Path, contender: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    rounded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "rounded")
    tokenizer().save_pretrained(tmp_path / "rounded")
    settings = {"learning_rate": 0.0, "max_steps": 1, "ref_model": reference}
    trainer = trl_trainer("dpo", contender, "bf16", tmp_path / "rounded", tmp_path, **settings)
    assert trainer.ref_model is reference
    trainer.train()
    assert logged(trainer, "rewards/margins") == [0.0]
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}


def memory_of(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
