"""What a recipe reports at its end: the numbers of the run, the saved model's footprints, a text that it writes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import transformers
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import hf_mp
from hf_mp.environment.libraries import first_line
from hf_mp.scaling.rules import scale_text

MIB = 2**20


Entry = dict[str, Any]  # of summary.json


def quiet_libraries() -> None:
    """Leave one progress bar, that of the training."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def log_line(step: int, logs: Entry) -> str:
    """A log of the Trainer in at most 80 columns; empty for the summary at the end of a training."""
    words = {
        "loss": "loss {:.3f}",
        "eval_loss": "evaluation loss {:.3f}",
        "loss_scale": "loss scale {:>6}",
        "learning_rate": "learning rate {:.1e}",
        "skipped_steps": "skipped {:,}",
    }
    if "loss_scale" in logs:
        logs = {**logs, "loss_scale": scale_text(logs["loss_scale"])}
    shown = [text.format(logs[name]) for name, text in words.items() if name in logs]
    return "  ".join([f"step {step:>5,}", *shown]) if shown else ""


def loss_scale_of_run(trainer: hf_mp.MixedPrecisionTrainer) -> Entry | None:
    """The loss scale over a run; None where nothing was scaled."""
    if trainer.mixed_precision is None or trainer.precision_policy.loss_scale is None:
        return None
    stats = trainer.mixed_precision.stats
    return {
        "first": stats.loss_scale_first,
        "last": stats.loss_scale,
        "lowest": stats.loss_scale_min,
        "highest": stats.loss_scale_max,
    }


def peak_memory() -> Entry:
    """The highest use of memory so far, and of what; None where the system does not tell."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():  # else the CPU has trained
        return {"mib": torch.cuda.max_memory_allocated() / MIB, "of": "allocated on the GPU"}
    try:
        import resource
    except ImportError:  # Windows
        return {"mib": None, "of": "not measured on this system"}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, "of": "resident, whole process"}


def measure_footprints(saved: Path) -> dict[str, Entry]:
    """``get_memory_footprint()`` of the saved model, loaded back in each precision; None for the reason in ``note``."""
    found: dict[str, Entry] = {}
    for precision in ("fp32", "fp16", "int8"):
        try:
            with warnings.catch_warnings(action="ignore"):  # INT8 leaves some weights in FP16
                model = hf_mp.load(saved, precision)
            found[precision] = {"mib": model.get_memory_footprint() / MIB, "note": ""}
        except Exception as error:  # the numbers of a finished training are worth more than this one
            found[precision] = {"mib": None, "note": f"cannot be loaded: {first_line(error)}"}
    return found


def summary_table(s: Entry) -> Table:
    """What ``summary.json`` holds, for reading."""
    speed = f"({s['train_tokens']:,} in {s['train_seconds']:,.1f} s on {s['device']})"
    rows = [
        ("evaluation loss", f"{s['eval_loss_before']:.3f} before, {s['eval_loss_after']:.3f} after"),
        ("perplexity on held-out text", f"{s['perplexity_before']:,.1f} before, {s['perplexity_after']:,.1f} after"),
        ("  of the unigram distribution", f"{s['unigram_perplexity']:,.1f} (from token counts alone)"),
        ("tokens per second", f"{s['tokens_per_second']:,.0f} {speed}"),
        ("precision", s["precision"]),
        ("loss scale", loss_scale_words(s["loss_scale"])),
        ("steps", f"{s['steps']:,}, {s['skipped_steps']:,} of them skipped for an overflow"),
        ("peak memory", f"{in_mib(s['peak_memory']['mib'])} {s['peak_memory']['of']}"),
        *(
            (f"saved model in {name.upper()}", f"{in_mib(one['mib'])} {one['note']}")
            for name, one in s["footprints"].items()
        ),
    ]
    table = Table(title=f"{s['model']} in {s['precision']}", title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def loss_scale_words(scale: Entry | None) -> str:
    """The scale at both ends of a run, and where it was lower or higher between them."""
    if scale is None:
        return "none"
    words = [f"{scale[name]:,.0f} {name}" for name in ("first", "last")]
    if scale["lowest"] < min(scale["first"], scale["last"]):
        words.append(f"{scale['lowest']:,.0f} lowest")
    if scale["highest"] > max(scale["first"], scale["last"]):
        words.append(f"{scale['highest']:,.0f} highest")
    return ", ".join(words)


def in_mib(size: float | None) -> str:
    return "" if size is None else f"{size:,.2f} MiB" if size < 100 else f"{size:,.0f} MiB"


def write_text(saved: Path, prompt: str, seed: int) -> str:
    """What the saved model writes after ``prompt``."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    half_context = (getattr(model.config, "max_position_embeddings", None) or 1024) // 2
    start = tokenizer(prompt, return_tensors="pt").input_ids[:, -half_context:]
    set_seed(seed)
    written = cast(Any, model).generate(
        start,
        attention_mask=torch.ones_like(start),
        do_sample=True,
        top_k=40,
        max_new_tokens=min(80, half_context),
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
