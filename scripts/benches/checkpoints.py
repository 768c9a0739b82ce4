"""What a whole checkpoint costs: saved with sync, checksums and a manifest, and read back before it is resumed.

    python scripts/bench.py checkpoints               # GPT-2 124M with AdamW, 1.5 GB a checkpoint; under a minute
    python scripts/bench.py checkpoints --layers 2 --rounds 1 --output-dir /tmp

The stock Trainer and ours save the same model and optimizer in FP32, in turns, each into a directory of its own that
keeps one checkpoint. Ours at a save: the same files, then all of them synced to disk and read for their SHA-256. Ours
at a resume: all files read and compared before the same loading.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from _results import alternate, median_and_spread
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


def loader(trainer: Any, *, looks: bool) -> Callable[[], None]:
    """Loads weights, optimizer and scheduler of the newest checkpoint; ``looks`` at its files first."""

    def load() -> None:
        (checkpoint,) = list_checkpoints(Path(trainer.args.output_dir))
        if looks and (problems := find_problems(checkpoint)):
            raise RuntimeError(f"{checkpoint} is damaged: {problems}")
        trainer._load_from_checkpoint(str(checkpoint))
        trainer._load_optimizer_and_scheduler(str(checkpoint))

    return load


def measure(layers: int = 12, rounds: int = 3) -> dict[str, Any]:
    """Time saves and loads in turns, as ratios to the stock Trainer's."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
    with tempfile.TemporaryDirectory(dir=".") as folder:  # not where a file system lives in memory
        stock = make_trainer(Trainer, TrainingArguments, Path(folder, "stock"), model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-4)
        stock.optimizer.step()
        model.zero_grad()
        ours = make_trainer(
            MixedPrecisionTrainer, MixedPrecisionArguments, Path(folder, "ours"), model, precision="fp32"
        )  # fmt: skip
        ours.optimizer = stock.optimizer  # the same state
        times = {"save": alternate({"stock": saver(stock), "ours": saver(ours)}, rounds=rounds)}
        loads = {"stock": loader(stock, looks=False), "ours": loader(ours, looks=True)}
        times["load"] = alternate(loads, rounds=rounds, warmup=0)
        (checkpoint,) = list_checkpoints(Path(ours.args.output_dir))
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
    result: dict[str, Any] = {"layers": layers, "rounds": rounds, "checkpoint_bytes": size}
    for what, seconds in times.items():
        medians = {contender: median_and_spread(found) for contender, found in seconds.items()}
        result[what] = {contender: timing._asdict() for contender, timing in medians.items()}
        result[what]["ratio"] = round(medians["ours"].median_seconds / medians["stock"].median_seconds, 2)
    return result
