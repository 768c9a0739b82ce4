"""accelerate's ``nlp_example.py`` with hf_mp: a loop of your own, prepared by accelerate, in our mixed precision.

    python recipes/accelerate_loop.py                          # a small BERT learns to tell two kinds of text apart
    python recipes/accelerate_loop.py --precision bf16
    python recipes/accelerate_loop.py --stop_after 1           # ends after one epoch, with its state saved
    python recipes/accelerate_loop.py --resume                 # goes on from there, bit for bit
    accelerate launch --cpu --num_processes 2 recipes/accelerate_loop.py

No download: the text is Python's own documentation, and the model has to say whether a piece of it is from the language
reference or from the docstrings of the library. The lines marked ``# hf_mp`` are all that differs from a loop in FP32.
"""

from __future__ import annotations

import hf_mp.trainer  # isort: skip  before transformers: it imports bitsandbytes without a remark

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import hf_mp  # hf_mp
from _options import parse_options
from _text import python_documents, train_tokenizer


@dataclass
class Script:
    precision: str = "fp16"
    epochs: int = 2
    batch_size: int = 16
    accumulation_steps: int = 2
    learning_rate: float = 1e-3
    pieces: int = 1200  # of text
    seed: int = 42
    cpu: bool = False
    output_dir: Path = Path("outputs/accelerate_loop")
    stop_after: int = 0  # epochs; 0 for never
    resume: bool = False


def pieces_of_text() -> list[tuple[str, int]]:
    """Of 40 words, at most 50 of a document; 1 for those of the language reference, 0 for docstrings."""
    pieces = []
    for name, text in python_documents():
        words = text.split()
        cut = [" ".join(words[start : start + 40]) for start in range(0, len(words) - 40, 40)]
        pieces += [(piece, int(name.startswith("help topic"))) for piece in cut[:50]]
    return pieces


def make_data(script: Script) -> tuple[TensorDataset, TensorDataset, int]:
    """Pieces of 48 tokens with their labels, to train and to evaluate; and the size of the vocabulary."""
    draw = random.Random(script.seed)
    pieces = pieces_of_text()
    kinds = [[piece for piece in pieces if piece[1] == label] for label in (0, 1)]
    chosen = [piece for kind in kinds for piece in draw.sample(kind, min(script.pieces // 2, len(kind)))]
    draw.shuffle(chosen)
    texts, labels = zip(*chosen, strict=True)
    tokenizer = train_tokenizer(texts, vocab_size=2000)
    tokenizer.pad_token = tokenizer.eos_token
    tokens = tokenizer(list(texts), truncation=True, max_length=48, padding="max_length", return_tensors="pt")
    whole = TensorDataset(tokens.input_ids, tokens.attention_mask, torch.tensor(labels))
    held_out = len(whole) // 5
    return TensorDataset(*whole[held_out:]), TensorDataset(*whole[:held_out]), len(tokenizer)


def make_model(vocab_size: int) -> torch.nn.Module:
    config = BertConfig(
        vocab_size=vocab_size, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=64, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def train(script: Script) -> float:
    """Train, and return the accuracy on what was held out."""
    accelerator = Accelerator(cpu=script.cpu, gradient_accumulation_steps=script.accumulation_steps)
    set_seed(script.seed)
    training, held_out, vocab_size = make_data(script)
    train_loader = DataLoader(training, batch_size=script.batch_size, shuffle=True)
    eval_loader = DataLoader(held_out, batch_size=4 * script.batch_size)
    model = make_model(vocab_size)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=script.learning_rate)
    precision = hf_mp.MixedPrecision(script.precision)  # hf_mp
    model = precision.attach(model)  # hf_mp: before accelerate wraps it
    optimizer = precision.attach_optimizer(optimizer)  # hf_mp
    updates = script.epochs * len(train_loader) // script.accumulation_steps
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=updates)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    accelerator.register_for_checkpointing(precision)  # hf_mp: the loss scale is saved and loaded with the rest

    state, first = str(script.output_dir / "state"), 0
    if script.resume:
        accelerator.load_state(state)
        first = precision.stats.steps * script.accumulation_steps // len(train_loader)
    accuracy = 0.0
    for epoch in range(first, script.stop_after or script.epochs):
        model.train()
        for ids, mask, labels in train_loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # skipped, and the scheduler held back, where a gradient overflowed
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, eval_loader)
        stats = precision.stats  # hf_mp
        accelerator.print(
            f"epoch {epoch + 1}: accuracy {accuracy:.3f}, loss scale {stats.loss_scale:g}, "
            f"{stats.skipped_steps} of {stats.steps} steps skipped"
        )
        accelerator.save_state(state)
    accelerator.unwrap_model(model).save_pretrained(script.output_dir, is_main_process=accelerator.is_main_process)
    return accuracy


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = total = 0
    for ids, mask, labels in loader:
        predicted = model(input_ids=ids, attention_mask=mask).logits.argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        right, total = right + int((predicted == labels).sum()), total + labels.numel()
    return right / total


def main(arguments: Sequence[str] | None = None) -> float:
    return train(parse_options(Script, arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
