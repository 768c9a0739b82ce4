"""What a recipe reports at its end: the numbers of the run, the saved model's footprints, a text that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, set_seed

from _text import first_line
from hf_mp import MixedPrecisionTrainer

MIB = 2**20


@dataclass(frozen=True)
class LossScale:
    """The loss scale over a run."""

    first: float
    last: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.first:,.0f} first, {self.last:,.0f} last, from {self.lowest:,.0f} to {self.highest:,.0f}"


@dataclass(frozen=True)
class Footprint:
    """``get_memory_footprint()`` of a loaded model; None where it cannot be loaded, for the reason in ``note``."""

    mib: float | None
    note: str = ""


@dataclass(frozen=True)
class PeakMemory:
    """The highest use of memory so far; None where the system does not tell."""

    mib: float | None
    of: str


@dataclass(frozen=True)
class Summary:
    """What the table shows and ``summary.json`` holds."""

    model: str
    parameters: int
    device: str
    precision: str
    steps: int
    skipped_steps: int
    loss_scale: LossScale | None
    eval_loss_before: float
    eval_loss_after: float
    perplexity_before: float
    perplexity_after: float
    unigram_perplexity: float
    train_seconds: float
    train_tokens: int
    tokens_per_second: float
    peak_memory: PeakMemory
    footprints: dict[str, Footprint]


def loss_scale_of_run(trainer: MixedPrecisionTrainer) -> LossScale | None:
    if trainer.mixed_precision is None or trainer.precision_policy.loss_scale is None:
        return None
    stats = trainer.mixed_precision.stats
    return LossScale(stats.loss_scale_first, stats.loss_scale, stats.loss_scale_min, stats.loss_scale_max)


def peak_memory() -> PeakMemory:
    if torch.cuda.is_available():
        return PeakMemory(torch.cuda.max_memory_allocated() / MIB, "allocated on the GPU")
    try:
        import resource
    except ImportError:  # Windows
        return PeakMemory(None, "not measured on this system")
    unit = 1 if sys.platform == "darwin" else 1024
    return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, "resident, whole process")


def measure_footprints(saved: Path) -> dict[str, Footprint]:
    """Of the saved model, loaded back as FP32, FP16 and INT8."""
    return {
        "fp32": Footprint(load_back(saved, dtype=torch.float32).get_memory_footprint() / MIB),
        "fp16": Footprint(load_back(saved, dtype=torch.float16).get_memory_footprint() / MIB),
        "int8": measure_int8_footprint(saved),
    }


def measure_int8_footprint(saved: Path) -> Footprint:
    if importlib.util.find_spec("bitsandbytes") is None:
        return Footprint(None, "needs bitsandbytes: pip install bitsandbytes")
    try:
        model = load_back(saved, quantization_config=BitsAndBytesConfig(load_in_8bit=True), dtype=torch.float16)
    except Exception as error:  # the numbers of a finished training are worth more than this one
        return Footprint(None, f"bitsandbytes cannot load it: {first_line(error)}")
    in_int8 = [weight for weight in model.parameters() if weight.dtype is torch.int8]
    share = sum(weight.numel() for weight in in_int8) / model.num_parameters()
    scales = sum(cast(Any, weight).SCB.nbytes for weight in in_int8) / MIB
    return Footprint(
        model.get_memory_footprint() / MIB,
        f"({share:.0%} of the weights, the others FP16; without {scales:.2f} MiB of scales)",
    )


def load_back(saved: Path, **settings: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(saved, **settings)


def write_summary(summary: Summary, path: Path) -> None:
    path.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def summary_table(summary: Summary) -> Table:
    table = Table(title=f"{summary.model} in {summary.precision}", title_justify="left", show_header=False)
    for name, value in summary_rows(summary):
        table.add_row(name, Text(value))
    return table


def summary_rows(s: Summary) -> list[tuple[str, str]]:
    speed = f"{s.tokens_per_second:,.0f} ({s.train_tokens:,} in {s.train_seconds:,.1f} s on {s.device})"
    return [
        ("evaluation loss", f"{s.eval_loss_before:.3f} before, {s.eval_loss_after:.3f} after"),
        ("perplexity on held-out text", f"{s.perplexity_before:,.1f} before, {s.perplexity_after:,.1f} after"),
        ("  of the unigram distribution", f"{s.unigram_perplexity:,.1f} (from token counts alone)"),
        ("tokens per second", speed),
        ("precision", s.precision),
        ("loss scale", "none" if s.loss_scale is None else str(s.loss_scale)),
        ("steps", f"{s.steps:,}, {s.skipped_steps:,} of them skipped for an overflow"),
        ("peak memory", f"{in_mib(s.peak_memory.mib)} {s.peak_memory.of}"),
        *((f"saved model in {name.upper()}", f"{in_mib(f.mib)} {f.note}") for name, f in s.footprints.items()),
    ]


def in_mib(size: float | None) -> str:
    return "" if size is None else f"{size:,.2f} MiB" if size < 100 else f"{size:,.0f} MiB"


def write_text(saved: Path, prompt: str, seed: int) -> str:
    """What the saved model writes after ``prompt``."""
    model, tokenizer = load_back(saved), AutoTokenizer.from_pretrained(saved)
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
