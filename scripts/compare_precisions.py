"""The recipe trained in every precision, same seed and data order: FP32, ours, torch.autocast in bfloat16.

    python scripts/compare_precisions.py [--runs hf_mp-fp16 hf_mp-bf16] [any flag of the recipe]
    python scripts/compare_precisions.py --store-as compare_precisions_768 --width 768 --layers 4 --heads 12 \\
        --max_steps 300 --learning_rate 6e-4 --per_device_train_batch_size 2

Stores ``scripts/results/compare_precisions.json`` and draws the loss curves into ``compare_precisions.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import ProgressCallback, Trainer, TrainingArguments

from _plots import draw_losses
from _recipe import recipe_trainer
from _results import RESULTS, save_result

STOCK_BF16 = "torch.autocast bf16"
CONTENDERS = ("fp32", "hf_mp fp16", "hf_mp fp16-lean", "hf_mp bf16", "hf_mp bf16-lean", STOCK_BF16)


@dataclass(frozen=True)
class Curve:
    """One run of the recipe."""

    steps: list[float]
    losses: list[float]
    eval_loss: float
    train_seconds: float
    skipped_steps: float | None


def main(argv: Sequence[str]) -> None:
    """Train the runs, store the numbers, draw the curves."""
    arguments, flags = parse_arguments(argv)
    curves = {name: run(name, flags) for name in arguments.runs}
    reference = curves["fp32"].eval_loss
    for name, curve in curves.items():
        off = 100 * (curve.eval_loss / reference - 1)
        print(f"{name:20} evaluation loss {curve.eval_loss:.4f} ({off:+.3f}%), training {curve.train_seconds:.1f} s")
    payload = {name: asdict(curve) for name, curve in curves.items()}
    path = save_result(arguments.store_as, payload)
    draw_losses(payload, path.with_suffix(".png"))
    print(f"stored in {path.relative_to(RESULTS.parent.parent)} and {path.with_suffix('.png').name}")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of the recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    choices = {name.replace(" ", "-"): name for name in CONTENDERS}
    parser.add_argument("--runs", nargs="+", choices=choices, default=list(choices), help="besides fp32; default: all")
    parser.add_argument("--store-as", default="compare_precisions", help="name of the result; default: %(default)s")
    arguments, flags = parser.parse_known_args(argv)
    arguments.runs = list(dict.fromkeys(["fp32", *(choices[name] for name in arguments.runs)]))
    return arguments, flags


def run(name: str, flags: list[str]) -> Curve:
    """One run; the seed of the recipe gives all of them the same weights and the same order of the data."""
    precision = "fp32" if name == STOCK_BF16 else name.removeprefix("hf_mp ")
    with recipe_trainer(["--precision", precision, *flags]) as ours:
        trainer = stock_trainer(ours) if name == STOCK_BF16 else ours
        print(f"training: {name}", flush=True)
        seconds = trainer.train().metrics["train_runtime"]
        eval_loss = trainer.evaluate()["eval_loss"]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    skipped = logs[-1].get("skipped_steps")
    return Curve([e["step"] for e in logs], [e["loss"] for e in logs], eval_loss, seconds, skipped)


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


if __name__ == "__main__":
    main(sys.argv[1:])
