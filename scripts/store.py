"""What recipes come to, stored: figures of the README and of docs/.

    python scripts/store.py ablate_precision --scale medium    # what each technique of mixed precision is worth
    python scripts/store.py grpo_fp16 --seeds=5                # gap, clipped tokens and rewards of GRPO by precision
    python scripts/store.py plain_loops                        # how far hf_mp is from torch.amp, and FP16 from FP32
    python scripts/store.py precisions                         # finetune_gpt2.py in FP32, ours, and torch.autocast
    python scripts/store.py precisions --name compare_precisions_768 --width 768 --layers 4 --heads 12 \\
        --max_steps 300 --learning_rate 6e-4 --per_device_train_batch_size 2

All flags but ``--name`` are those of the recipe. Runs of finetune_gpt2.py have the same seed and order of the data.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from rich.console import Console
from rich.pretty import pprint
from transformers import PreTrainedTokenizerBase, ProgressCallback, Trainer, TrainingArguments

from _results import RESULTS, save_result

# Recipes are found once _results has said where they are.
# isort: split
import finetune_gpt2
from _options import parse_options
from hf_mp.policy import mixed_presets

NAMES = {
    "ablate_precision": "ablate_precision",
    "grpo_fp16": "grpo_fp16",
    "plain_loops": "compare_loops",
    "precisions": "compare_precisions",
}
STOCK_BF16 = "torch.autocast bf16"
PRECISIONS = ("fp32", *(f"hf_mp {preset}" for preset in mixed_presets()), STOCK_BF16)


@functools.cache
def load_text_and_tokenizer(recipe: finetune_gpt2.Recipe, seed: int) -> tuple[DatasetDict, PreTrainedTokenizerBase]:
    """Collected once for all runs of a script: it takes longer than a short run."""
    text = finetune_gpt2.load_text(recipe, seed)
    return text, finetune_gpt2.load_tokenizer(recipe, text["train"])


def train(flags: Sequence[str], is_stock_bf16: bool = False) -> tuple[Any, dict[str, Any]]:
    """A run of finetune_gpt2.py, without a progress bar: its trainer, and what all runs store.

    With ``is_stock_bf16`` the stock Trainer trains with ``bf16=True``, over the same model and data. ``train_seconds``
    are of this machine while it ran, and no benchmark.
    """
    with tempfile.TemporaryDirectory() as directory:
        recipe, args = finetune_gpt2.parse_arguments(["--output_dir", str(Path(directory, "run")), *flags])
        finetune_gpt2.quiet_libraries()
        text, tokenizer = load_text_and_tokenizer(recipe, args.seed)
        model = finetune_gpt2.load_model(recipe, args, len(tokenizer))
        blocks = finetune_gpt2.make_blocks(text, tokenizer, finetune_gpt2.choose_block_size(recipe, model))
        trainer: Trainer = finetune_gpt2.make_trainer(model, args, tokenizer, blocks)
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
    """One run: its losses, and how many steps were skipped."""
    is_stock = name == STOCK_BF16
    trainer, found = train(["--precision", "fp32" if is_stock else name.removeprefix("hf_mp "), *flags], is_stock)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": [entry["step"] for entry in logs],
        "losses": [entry["loss"] for entry in logs],
        **found,
        "skipped_steps": logs[-1].get("skipped_steps"),
    }


def run(what: str, flags: list[str]) -> dict[str, Any]:
    """What a recipe comes to."""
    if what == "precisions":
        return {name: train_precision(name, flags) for name in PRECISIONS}
    recipe = import_module(what)
    found = recipe.run(parse_options(recipe.Options, flags), Console(highlight=False))
    found["options"].pop("output_dir", None)  # where it lies means nothing on another machine
    return {"threads": torch.get_num_threads(), **found}


def main(argv: Sequence[str], directory: Path = RESULTS) -> None:
    """Run, store and show the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", choices=NAMES)
    parser.add_argument("--name", help="of the result; default: one for each")
    arguments, flags = parser.parse_known_args(argv)
    payload = run(arguments.what, flags)
    path = save_result(arguments.name or NAMES[arguments.what], payload, directory=directory)
    pprint(payload, max_length=20)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
