"""What TRL's Trainers are tried on here: a tiny Qwen as a Hub repository has it, and rows for each kind of training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

WORDS = [f"w{number}" for number in range(60)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_tiny_qwen(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model of 2 layers in ``dtype`` and its tokenizer, as a Hub repository has them; all norm weights are 1."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(WORDS) + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    nn.Module.to(model, dtype)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def share_of_even(completions: list[str], **columns: Any) -> list[float]:
    """The reward: how many of the words have an even number."""
    found = [[int(word[1:]) for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1) for numbers in found]


class Kind(NamedTuple):
    trainer: str
    columns: tuple[tuple[str, int], ...]  # of the data set, with the words in each
    settings: dict[str, Any]
    task: str = "CAUSAL_LM"  # for peft


_GENERATING = {"max_completion_length": 6, "num_generations": 4}
_PREFERENCES = (("prompt", 6), ("chosen", 6), ("rejected", 6))
KINDS = {
    "sft": Kind("SFT", (("text", 16),), {}),
    "dpo": Kind("DPO", _PREFERENCES, {}),
    "kto": Kind("KTO", (("prompt", 6), ("completion", 6)), {}),
    "reward": Kind("Reward", _PREFERENCES[1:], {}, "SEQ_CLS"),
    "grpo": Kind("GRPO", (("prompt", 6),), {**_GENERATING, "beta": 0.1}),
    "rloo": Kind("RLOO", (("prompt", 6),), {**_GENERATING, "beta": 0.1}),
}


def rows_of(kind: str) -> Dataset:
    numbers = random.Random(0)
    columns = KINDS[kind].columns
    rows = [{name: " ".join(numbers.choices(WORDS, k=count)) for name, count in columns} for _ in range(16)]
    labels = [{"label": index % 2 == 0} for index in range(16)] if kind == "kto" else [{}] * 16
    return Dataset.from_list([{**row, **label} for row, label in zip(rows, labels, strict=True)])


def load_default(kind: str, path: Path, **settings: Any) -> PreTrainedModel:
    """The model as ``from_pretrained`` loads it; its classification head is drawn from the same seed."""
    torch.manual_seed(5)
    if kind == "reward":
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **settings)
    return AutoModelForCausalLM.from_pretrained(path, **settings)


def named_for(kind: str) -> dict[str, Any]:
    """What the Trainer of ``kind`` takes besides model and arguments."""
    named = {"train_dataset": rows_of(kind), "processing_class": tokenizer()}
    return {**named, "reward_funcs": share_of_even} if kind in ("grpo", "rloo") else named


class Moved(NamedTuple):
    """Shares of the trained elements that are not what they were."""

    matrices: float
    norms: float


def shares_moved(model: nn.Module, start: dict[str, Tensor]) -> Moved:
    """What has moved of ``model`` since it had the values ``start``, by name."""
    moved: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            moved["norm" in name].append((parameter.detach().float() != start[name].float()).flatten())
    return Moved(*(float(torch.cat(moved[is_norm]).float().mean()) for is_norm in (False, True)))
