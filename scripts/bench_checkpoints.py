"""What a whole checkpoint costs: saved with sync, checksums and a manifest, and read back before it is resumed.

    python scripts/bench_checkpoints.py               # GPT-2 124M with AdamW, 1.5 GB a checkpoint; under a minute
    python scripts/bench_checkpoints.py --layers 2 --rounds 1 --not-stored

The stock Trainer and ours save the same model and optimizer in FP32, in turns, each into a directory of its own that
keeps one checkpoint. Ours at a save: the same files, then all of them synced to disk and read for their SHA-256. Ours
at a resume: all files read and compared before the same loading. Stores ``scripts/results/bench_checkpoints.json``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

from _results import alternate, median_and_spread, save_result
from hf_mp import MixedPrecisionArguments, MixedPrecisionTrainer
from hf_mp.trainer.checkpoints.inspection import find_problems, list_checkpoints


def make_trainer(cls: type[Trainer], arguments: type[TrainingArguments], folder: Path, model: Any, **named: Any) -> Any:
    args = arguments(output_dir=str(folder), save_total_limit=1, report_to=[], use_cpu=True, **named)
    trainer = cls(model=model, args=args)
    trainer.create_optimizer_and_scheduler(10)
    return trainer


def saver(trainer: Any) -> Callable[[], None]:
    """Saves the next checkpoint at each call."""

    def save() -> None:
        trainer.state.global_step += 1
        trainer._save_checkpoint(trainer.model, None)

    return save


def loader(trainer: Any, folder: Path, *, looks: bool) -> Callable[[], None]:
    """Loads weights, optimizer and scheduler of the checkpoint in ``folder``; ``looks`` at its files first."""

    def load() -> None:
        (checkpoint,) = list_checkpoints(folder)
        if looks and (problems := find_problems(checkpoint)):
            raise RuntimeError(f"{checkpoint} is damaged: {problems}")
        trainer._load_from_checkpoint(str(checkpoint))
        trainer._load_optimizer_and_scheduler(str(checkpoint))

    return load


def main(layers: int = 12, rounds: int = 3, stored: bool = typer.Option(True, " /--not-stored")) -> None:
    """Time saves and loads in turns, and store them as ratios to the stock Trainer's."""
    logging.set_verbosity_error()
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
    with tempfile.TemporaryDirectory(dir=".") as temporary:  # not where a file system lives in memory
        stock_folder, our_folder = Path(temporary, "stock"), Path(temporary, "ours")
        stock = make_trainer(Trainer, TrainingArguments, stock_folder, model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-4)
        stock.optimizer.step()
        model.zero_grad()
        ours = make_trainer(MixedPrecisionTrainer, MixedPrecisionArguments, our_folder, model, precision="fp32")
        ours.optimizer = stock.optimizer  # the same state
        saves = alternate({"stock": saver(stock), "ours": saver(ours)}, rounds=rounds)
        stock_loads = loader(stock, stock_folder, looks=False)
        loads = alternate({"stock": stock_loads, "ours": loader(ours, our_folder, looks=True)}, rounds=rounds, warmup=0)
        (checkpoint,) = list_checkpoints(our_folder)
        size_bytes = sum(path.stat().st_size for path in checkpoint.iterdir())
    result: dict[str, Any] = {"layers": layers, "rounds": rounds, "checkpoint_bytes": size_bytes}
    for name, timings in (("save", saves), ("load", loads)):
        medians = {contender: median_and_spread(seconds) for contender, seconds in timings.items()}
        result[name] = {contender: timing._asdict() for contender, timing in medians.items()}
        result[name]["ratio"] = round(medians["ours"].median_seconds / medians["stock"].median_seconds, 2)
    Console().print(show(result))
    if stored:
        save_result("bench_checkpoints", result)


def show(result: dict[str, Any]) -> Table:
    size_gb = result["checkpoint_bytes"] / 1e9
    table = Table("", "stock Trainer, s", "ours, s", "ratio", title=f"A checkpoint of {size_gb:.2f} GB")
    for name in ("save", "load"):
        medians = [f"{result[name][contender]['median_seconds']:.2f}" for contender in ("stock", "ours")]
        table.add_row(name, *medians, f"{result[name]['ratio']:.2f}")
    return table


if __name__ == "__main__":
    typer.run(main)
