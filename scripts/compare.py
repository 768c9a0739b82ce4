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
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from rich.pretty import pprint
from transformers import PreTrainedTokenizerBase, ProgressCallback, Trainer, TrainingArguments

from _results import RESULTS, save_result

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


@functools.cache
def load_text_and_tokenizer(recipe: recipe_module.Recipe, seed: int) -> tuple[DatasetDict, PreTrainedTokenizerBase]:
    """Collected once for all runs of a script: it takes longer than a short run."""
    text = recipe_module.load_text(recipe, seed)
    return text, recipe_module.load_tokenizer(recipe, text["train"])


def train(flags: Sequence[str], is_stock_bf16: bool = False) -> tuple[Any, dict[str, Any]]:
    """A run of the recipe with its own ``flags``, without a progress bar: its trainer, and what all runs store.

    With ``is_stock_bf16`` the stock Trainer trains with ``bf16=True``, over the same model and data. ``train_seconds``
    are of this machine while it ran, and no benchmark.
    """
    with tempfile.TemporaryDirectory() as directory:
        recipe, args = recipe_module.parse_arguments(["--output_dir", str(Path(directory, "run")), *flags])
        recipe_module.quiet_libraries()
        text, tokenizer = load_text_and_tokenizer(recipe, args.seed)
        model = recipe_module.load_model(recipe, args, len(tokenizer))
        blocks = recipe_module.make_blocks(text, tokenizer, recipe_module.choose_block_size(recipe, model))
        trainer: Trainer = recipe_module.make_trainer(model, args, tokenizer, blocks)
        if is_stock_bf16:
            given = {field.name: getattr(args, field.name) for field in fields(TrainingArguments) if field.init}
            trainer = Trainer(
                model=model,
                args=TrainingArguments(**{**given, "bf16": True}),
                train_dataset=blocks.train,
                eval_dataset=blocks.validation,
                data_collator=trainer.data_collator,
            )
        trainer.remove_callback(ProgressCallback)
        print(f"training: {' '.join(flags)}", flush=True)
        seconds = trainer.train().metrics["train_runtime"]
        return trainer, {"eval_loss": trainer.evaluate()["eval_loss"], "train_seconds": seconds}


def train_precision(name: str, flags: Sequence[str]) -> dict[str, Any]:
    """One run of the recipe: its losses, and how many steps were skipped."""
    is_stock = name == STOCK_BF16
    trainer, found = train(["--precision", "fp32" if is_stock else name.removeprefix("hf_mp "), *flags], is_stock)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": [entry["step"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        **found,
        "skipped_steps": logs[-1].get("skipped_steps"),
    }


def train_scaler(flags: Sequence[str]) -> dict[str, Any]:
    """One run of the recipe in FP16, from its log of each step: the scale over the run, and the steps that it wasted.

    ``scale_changes`` are pairs of a step, counted from 1, and the scale that it and the following ones used.
    """
    trainer, found = train(["--max_steps", "1000", "--precision", "fp16", *flags, "--logging_steps", "1"])
    if trainer.mixed_precision is None:
        raise ValueError("a run in FP32 scales no loss: leave --precision away, or say fp16")
    logs = [entry for entry in trainer.state.log_history if "loss_scale" in entry]
    # A log holds what the step has left: the scale of the next one.
    used = [trainer.mixed_precision.stats.loss_scale_first, *(entry["loss_scale"] for entry in logs[:-1])]
    skipped = [0, *(int(entry["skipped_steps"]) for entry in logs)]
    changes = [(step, scale) for step, scale in enumerate(used, 1) if step == 1 or scale != used[step - 2]]
    return {
        "skipped_steps": skipped[-1],
        "first_scale": used[0],
        "last_scale": used[-1],
        "smallest_scale": min(used),
        "largest_scale": max(used),
        "steps": trainer.state.global_step,
        "skipped_at": [step for step, (a, b) in enumerate(itertools.pairwise(skipped), 1) if b > a],
        "scale_changes": changes,
        "final_eval_loss": found["eval_loss"],
        "train_seconds": found["train_seconds"],
    }


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
    pprint(payload, max_length=20)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
