"""``hf-mp calibrate``: a model and a text, from names to the table and ``precision_rules.json``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_mp.diagnostics.calibration import calibrate
from hf_mp.diagnostics.range_report import RULES_NAME
from hf_mp.memory.command import quiet_libraries
from hf_mp.memory.models import load


def run(
    model: str, *, train_file: Path, batches: int, batch_size: int, seq_len: int, precision: str, output: Path | None,
    every_op: bool,
) -> str:  # fmt: skip
    """Calibrate, write the rules, and return the text to print."""
    for name, number in (("batches", batches), ("batch-size", batch_size), ("seq-len", seq_len)):
        if number < 1:
            raise ValueError(f"--{name} {number}: must be at least 1")
    text = train_file.read_text(encoding="utf-8")
    quiet_libraries()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer for {model!r}: give a directory that holds one ({error})") from error
    loaded = load(model, "fp32").train()
    seq_len = min(seq_len, getattr(loaded.config, "max_position_embeddings", None) or seq_len)
    blocks = list(_blocks(tokenizer(text)["input_ids"], seq_len, batches * batch_size))
    if len(blocks) < batches * batch_size:
        raise ValueError(
            f"{train_file} has {len(blocks)} whole blocks of {seq_len} tokens, and {batches} batches of {batch_size} "
            f"need {batches * batch_size}: give a longer text, or smaller --batches, --batch-size or --seq-len"
        )
    rows = torch.tensor(blocks).split(batch_size)
    report = calibrate(loaded, [_batch(ids) for ids in rows], precision)
    folder = Path(model) if Path(model).is_dir() else Path()
    return f"{report.to_text(every_op=every_op)}{report.save(output or folder / RULES_NAME)} is written\n"


def _batch(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids}


def _blocks(tokens: list[int], length: int, most: int) -> Iterator[list[int]]:
    for start in range(0, min(len(tokens) - length + 1, most * length), length):
        yield tokens[start : start + length]
