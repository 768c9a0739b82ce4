"""``recipes/finetune_gpt2.py`` trained several ways, with the same seed and order of the data.

    python scripts/compare.py precisions [any flag of the recipe]    # FP32, ours, torch.autocast in bfloat16
    python scripts/compare.py precisions --name compare_precisions_768 --width 768 --layers 4 --heads 12 \\
        --max_steps 300 --learning_rate 6e-4 --per_device_train_batch_size 2
    python scripts/compare.py scalers [any flag of the recipe]       # which steps are wasted, where the scale goes

torch's defaults try a larger scale every 2000 steps only, so a run of 1000 does not show them probing. The last scaler
probes every 100 steps instead, and shows in 1000 steps what they do in 20,000.

Stores ``compare_precisions.json`` and ``compare_scalers.json`` in scripts/results/; ``make tables`` draws their curves.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from transformers import (
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from _results import RESULTS, save_result
from bench import show
from hf_mp import MixedPrecisionTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import finetune_gpt2 as recipe_module

STOCK_BF16 = "torch.autocast bf16"
PRECISIONS = ("fp32", "hf_mp fp16", "hf_mp fp16-lean", "hf_mp bf16", "hf_mp bf16-lean", STOCK_BF16)
SCALERS = {
    "headroom": ["--loss_scale", "headroom"],
    "dynamic": ["--loss_scale", "dynamic"],
    "static": ["--loss_scale", "128"],
    "dynamic, growth_interval=100": ["--loss_scale", "dynamic", "--loss_scaler_settings", '{"growth_interval": 100}'],
}


@contextmanager
def recipe_trainer(flags: Sequence[str]) -> Iterator[MixedPrecisionTrainer]:
    """The trainer of the recipe for its own ``flags``, without a progress bar; what it writes is deleted at the end."""
    with tempfile.TemporaryDirectory() as directory:
        recipe, args = recipe_module.parse_arguments(["--output_dir", str(Path(directory, "run")), *flags])
        recipe_module.quiet_libraries()
        text, tokenizer = load_text_and_tokenizer(recipe, args.seed)
        model = recipe_module.load_model(recipe, args, len(tokenizer))
        blocks = recipe_module.make_blocks(text, tokenizer, recipe_module.choose_block_size(recipe, model))
        trainer = recipe_module.make_trainer(model, args, tokenizer, blocks)
        trainer.remove_callback(ProgressCallback)
        print(f"training: {' '.join(flags)}", flush=True)
        yield trainer


@functools.cache
def load_text_and_tokenizer(recipe: recipe_module.Recipe, seed: int) -> tuple[DatasetDict, PreTrainedTokenizerBase]:
    """Collected once for all runs of a script: it takes longer than a short run."""
    text = recipe_module.load_text(recipe, seed)
    return text, recipe_module.load_tokenizer(recipe, text["train"])


# Precisions


def train_precision(name: str, flags: Sequence[str]) -> dict[str, Any]:
    """One run of the recipe: its losses, and how many steps were skipped."""
    precision = "fp32" if name == STOCK_BF16 else name.removeprefix("hf_mp ")
    with recipe_trainer(["--precision", precision, *flags]) as ours:
        trainer = stock_trainer(ours) if name == STOCK_BF16 else ours
        seconds = trainer.train().metrics["train_runtime"]
        eval_loss = trainer.evaluate()["eval_loss"]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": [entry["step"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        "eval_loss": eval_loss,
        "train_seconds": seconds,
        "skipped_steps": logs[-1].get("skipped_steps"),
    }


def stock_trainer(ours: Trainer) -> Trainer:
    """The stock Trainer with ``bf16=True``, over the model and data of ``ours``."""
    settings = {
        key: getattr(ours.args, key)
        for key in (
            *("output_dir", "max_steps", "per_device_train_batch_size", "per_device_eval_batch_size"),
            *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta2", "seed"),
            *("logging_steps", "disable_tqdm", "save_strategy", "optim", "report_to"),
        )
    }
    trainer = Trainer(
        model=ours.model,
        args=TrainingArguments(**settings, bf16=True, use_cpu=not torch.cuda.is_available()),
        train_dataset=ours.train_dataset,
        eval_dataset=ours.eval_dataset,
        data_collator=ours.data_collator,
    )
    trainer.remove_callback(ProgressCallback)
    return trainer


# Loss scalers


@dataclass
class ScaleWatch(TrainerCallback):
    """Notes which scale each optimizer step used, and whether it was skipped."""

    trainer: MixedPrecisionTrainer
    skipped_at: list[int] = field(default_factory=list)
    scale_changes: list[tuple[int, float]] = field(default_factory=list)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        scale = self._runtime().scaler.get_scale()
        if not self.scale_changes or self.scale_changes[-1][1] != scale:
            self.scale_changes.append((state.global_step + 1, scale))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._runtime().step_was_skipped:
            self.skipped_at.append(state.global_step + 1)

    def _runtime(self) -> Any:
        if self.trainer.mixed_precision is None:
            raise ValueError("a run in FP32 scales no loss: leave --precision away, or say fp16")
        return self.trainer.mixed_precision


def train_scaler(flags: Sequence[str]) -> dict[str, Any]:
    """One run of the recipe in FP16: the scale over the run, and the steps that it wasted.

    ``scale_changes`` are pairs of a step, counted from 1, and the scale that it and the following ones used;
    ``train_seconds`` are of this machine while it ran, and no benchmark.
    """
    with recipe_trainer(["--max_steps", "1000", "--precision", "fp16", *flags]) as trainer:
        watch = ScaleWatch(trainer)
        trainer.add_callback(watch)
        seconds = trainer.train().metrics["train_runtime"]
        scales = [scale for _, scale in watch.scale_changes]
        return {
            "skipped_steps": len(watch.skipped_at),
            "first_scale": scales[0],
            "last_scale": scales[-1],
            "smallest_scale": min(scales),
            "largest_scale": max(scales),
            "steps": trainer.state.global_step,
            "skipped_at": watch.skipped_at,
            "scale_changes": watch.scale_changes,
            "final_eval_loss": trainer.evaluate()["eval_loss"],
            "train_seconds": seconds,
        }


# The program


def main(argv: Sequence[str], directory: Path = RESULTS) -> None:
    """Train the runs, store and show the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", choices=("precisions", "scalers"))
    parser.add_argument("--name", help="of the result; default: compare_precisions or compare_scalers")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.what == "precisions":
        payload = {name: train_precision(name, flags) for name in PRECISIONS}
    else:
        payload = {name: train_scaler([*flags, *choice]) for name, choice in SCALERS.items()}
    path = save_result(arguments.name or f"compare_{arguments.what}", payload, directory=directory)
    show(payload)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
