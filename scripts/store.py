"""What recipes come to, stored: figures of the README and of docs/.

    python scripts/store.py ablate_precision --scale medium    # what each technique of mixed precision is worth
    python scripts/store.py grpo_fp16 --seeds=5                # gap, clipped tokens and rewards of GRPO by precision
    python scripts/store.py plain_loops                        # how far hf_mp is from torch.amp, and FP16 from FP32
    python scripts/store.py precisions                         # finetune_gpt2.py in FP32, ours, and torch.autocast
    python scripts/store.py precisions --name compare_precisions_768 --width 768 --layers 4 --heads 12 \\
        --max_steps 300 --learning_rate 6e-4 --per_device_train_batch_size 2
    python scripts/store.py scalers                            # which steps are wasted, where the scale goes

All flags but ``--name`` are those of the recipe. Runs of finetune_gpt2.py have the same seed and order of the data.
torch's defaults try a larger scale every 2000 steps only, so a run of 1000 does not show them probing. The last scaler
probes every 100 steps instead, and shows in 1000 steps what they do in 20,000.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from _pictures import new_picture, save_picture

NAMES = {
    "ablate_precision": "ablate_precision",
    "grpo_fp16": "grpo_fp16",
    "plain_loops": "compare_loops",
    "precisions": "compare_precisions",
    "scalers": "compare_scalers",
}
STOCK_BF16 = "torch.autocast bf16"
PRECISIONS = {  # with the colours of their curves
    "fp32": "#4c566a",
    "hf_mp fp16": "#d08770",
    "hf_mp fp16-lean": "#bf616a",
    "hf_mp bf16": "#8fae6e",
    "hf_mp bf16-lean": "#b48ead",
    STOCK_BF16: "#5e81ac",
}
SCALERS = {
    "headroom": ["--loss_scale", "headroom"],
    "dynamic": ["--loss_scale", "dynamic"],
    "static": ["--loss_scale", "128"],
    "dynamic, growth_interval=100": ["--loss_scale", "dynamic", "--loss_scaler_settings", '{"growth_interval": 100}'],
}


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


def train_scaler(flags: Sequence[str]) -> dict[str, Any]:
    """One run in FP16, from its log of each step: the scale over the run, and the steps that it wasted.

    ``scale_changes`` are pairs of a step, counted from 1, and the scale that it and the following ones used.
    """
    trainer, found = train(["--max_steps", "1000", "--precision", "fp16", *flags, "--logging_steps", "1"])
    logs = [entry for entry in trainer.state.log_history if "loss_scale" in entry]
    # A log holds what the step has left: the scale of the next one.
    used = [trainer.mixed_precision.stats.loss_scale_first, *(entry["loss_scale"] for entry in logs[:-1])]
    skipped = [0, *(int(entry["skipped_steps"]) for entry in logs)]
    return {
        "skipped_steps": skipped[-1],
        "first_scale": used[0],
        "last_scale": used[-1],
        "smallest_scale": min(used),
        "largest_scale": max(used),
        "steps": trainer.state.global_step,
        "skipped_at": [step for step, (a, b) in enumerate(itertools.pairwise(skipped), 1) if b > a],
        "scale_changes": [(step, scale) for step, scale in enumerate(used, 1) if step == 1 or scale != used[step - 2]],
        "final_eval_loss": found["eval_loss"],
        "train_seconds": found["train_seconds"],
    }


def draw_losses(result: Mapping[str, Any], path: Path) -> None:
    """Training losses over the steps, and how far they are from those of ``fp32``."""
    figure, (top, bottom) = new_picture(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 1))
    reference = result["fp32"]["losses"]
    for name, curve in result.items():
        label = f"{name}: {curve['eval_loss']:.4f} held out"
        top.plot(curve["steps"], curve["losses"], label=label, color=PRECISIONS[name])
        difference = [100 * (ours / theirs - 1) for ours, theirs in zip(curve["losses"], reference, strict=True)]
        bottom.plot(curve["steps"], difference, color=PRECISIONS[name])
    top.set(ylabel="training loss")
    top.legend(frameon=False)
    bottom.set(ylabel="off FP32, %", xlabel="step")
    save_picture(figure, path)


def run(what: str, flags: list[str]) -> tuple[dict[str, Any], Any]:
    """What a recipe comes to, and what draws it."""
    if what == "precisions":
        return {name: train_precision(name, flags) for name in PRECISIONS}, draw_losses
    if what == "scalers":
        return {name: train_scaler([*flags, *choice]) for name, choice in SCALERS.items()}, None
    recipe = import_module(what)
    found = recipe.run(parse_options(recipe.Options, flags), Console(highlight=False))
    found["options"].pop("output_dir", None)  # where it lies means nothing on another machine
    return {"threads": torch.get_num_threads(), **found}, getattr(recipe, "draw", None)


def main(argv: Sequence[str], directory: Path = RESULTS) -> None:
    """Run, store and show the numbers; draw what is a picture on a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", choices=NAMES)
    parser.add_argument("--name", help="of the result; default: one for each")
    arguments, flags = parser.parse_known_args(argv)
    payload, draw = run(arguments.what, flags)
    path = save_result(arguments.name or NAMES[arguments.what], payload, directory=directory)
    if draw is not None:
        draw(payload, path.with_suffix(".png"))
    pprint(payload, max_length=20)
    print(f"stored in {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
