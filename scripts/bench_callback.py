"""What the callback costs beyond the Trainer subclass: both train the same steps, in turns.

    python scripts/bench_callback.py                       # the model of `make finetune`, batch 4 x 256
    python scripts/bench_callback.py --width 768 --layers 4 --vocab 50257 --batch 2

Both contenders, and the stock Trainer in FP32, run in one process. Each is stopped after every step, so
that they take turns step by step; what is timed is a whole step of the Trainer's loop, from ``on_step_begin`` to the
next, logging included. Stores ``scripts/results/bench_callback.json``, or under another ``--name``.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from _benchmarks import number, show_table
from _results import RESULTS, alternate, median_and_spread, save_result
from _step_by_step import StepByStep
from hf_mp import MixedPrecisionCallback, MixedPrecisionTrainer

CONTENDERS = ("subclass", "callback", "stock fp32")


def make_trainer(
    contender: str, config: GPT2Config, rows: list[dict[str, Tensor]], settings: dict[str, Any]
) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(**settings)
    if contender == "subclass":
        trainer: Trainer = MixedPrecisionTrainer(model, args, precision="fp16", train_dataset=rows)
    else:
        callbacks: list[TrainerCallback] = [MixedPrecisionCallback("fp16")] if contender == "callback" else []
        trainer = Trainer(model, args, train_dataset=rows, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    return trainer


def main(
    layers: int = 3,
    width: int = 256,
    heads: int = 4,
    vocab: int = 1024,
    batch: int = 4,
    seq: int = 256,
    rounds: int = 60,
    name: str = "bench_callback",
    output_dir: Path = RESULTS,
) -> None:
    """Time one step of each contender and store medians, spreads and the ratio of callback to subclass."""
    logging.set_verbosity_error()
    warmup = 3
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocab, n_positions=max(seq, 256), resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, vocab, (64, seq))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        settings = {
            "output_dir": directory, "per_device_train_batch_size": batch, "max_steps": warmup + rounds + 1,
            "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "learning_rate": 1e-4,
        }  # fmt: skip
        trainers = {contender: make_trainer(contender, config, rows, settings) for contender in CONTENDERS}
        started = {contender: StepByStep(trainer) for contender, trainer in trainers.items()}
        seconds = alternate({c: steps.step for c, steps in started.items()}, rounds=rounds, warmup=warmup)
        for steps in started.values():
            steps.close()
    timings = {contender: median_and_spread(times) for contender, times in seconds.items()}
    subclass = timings["subclass"].median_seconds
    result = {c: {**t._asdict(), "ratio_to_subclass": t.median_seconds / subclass} for c, t in timings.items()}
    overheads = [c / s for c, s in zip(seconds["callback"], seconds["subclass"], strict=True)]
    ratio = median_and_spread(overheads)
    payload = {
        "shape": {"layers": layers, "width": width, "vocab": vocab, "batch": batch, "seq": seq, "rounds": rounds},
        "contenders": result,
        "callback_over_subclass_per_round": {"median": ratio.median_seconds, "spread": ratio.spread_seconds},
    }
    path = save_result(name, payload, directory=output_dir)
    show(result, f"One step of the Trainer: GPT-2, {layers} layers of width {width}, batch {batch} x {seq}")
    print(f"callback over subclass, median of {rounds} rounds: {ratio.median_seconds:.4f}; stored in {Path(path).name}")


def show(result: dict[str, dict[str, float]], title: str) -> None:
    """Print the timings as a table."""
    rows = [
        (
            contender,
            number(row["median_seconds"] * 1e3, 2),
            number(row["spread_seconds"] * 1e3, 2),
            number(row["ratio_to_subclass"]),
        )
        for contender, row in result.items()
    ]
    show_table(title, ("contender", "milliseconds a step", "spread", "times subclass"), rows)


if __name__ == "__main__":
    typer.run(main)
