"""GRPO with TRL in FP32, BF16 and FP16: does the trainer compute what the generator computed, and what is it worth?

    python recipes/grpo_fp16.py                                # every precision under one seed; minutes on a CPU
    python recipes/grpo_fp16.py --scale small                  # seconds: to see that it runs
    python recipes/grpo_fp16.py --seeds 5 --variants fp32 bf16-stock fp16

A tiny Qwen learns in FP32 to repeat its prompt, from text in which half of the tokens are wrong, and is saved in BF16
as models on the Hub are. GRPO then rewards the share of tokens that are right. Reinforcement learning has two policies:
one draws the tokens, one by one with cached keys, the other is trained on them. In exact arithmetic they are one; in 16
bits they differ, more so in BF16 than in FP16 (Qi et al. 2025, arXiv 2510.26788). And a BF16 model that is loaded by
default is trained without FP32 masters.

The table shows what came out, whatever it is.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from datasets import Dataset
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import hf_mp
from _options import check_training, parse_options, save_numbers

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
SPECIAL = ["<pad>", "<eos>", "<unk>"]


@dataclass(frozen=True)
class Scale:
    """How large the model and its trainings are."""

    width: int = 64
    layers: int = 2
    length: int = 8  # tokens of a prompt, and of what is generated
    pretraining_steps: int = 400
    pretraining_rate: float = 3e-3
    right: float = 0.5  # share of the tokens that the pretraining shows right
    steps: int = 200
    prompts: int = 8  # in a step
    generations: int = 8  # for each
    measure_every: int = 20
    measured: int = 64  # prompts to measure the gap with


SCALES = {
    "full": Scale(),
    "small": Scale(width=32, layers=1, length=4, pretraining_steps=40, steps=4, prompts=2, generations=4,
                   measure_every=2, measured=4),
}  # fmt: skip


# The variants: how the saved model is loaded, and what the Trainer gets


@dataclass(frozen=True)
class Variant:
    what: str
    loading: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=lambda: {"bf16": False})
    precision: str | None = None  # of our callback
    fp32_head: bool = False


VARIANTS = {
    "fp32": Variant("the model loaded in FP32, stock Trainer", loading={"dtype": torch.float32}),
    "bf16-stock": Variant("loaded by default, TRL's default bf16=True: no FP32 masters", settings={}),
    "bf16": Variant("loaded by default, MixedPrecisionCallback('bf16')", precision="bf16"),
    "fp16": Variant("loaded by default, MixedPrecisionCallback('fp16')", precision="fp16"),
    "fp16-head": Variant("the same, with fp32_head=True", precision="fp16", fp32_head=True),
}


# The model, and what it should learn


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *LETTERS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def draw_letters(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(len(SPECIAL), len(SPECIAL) + len(LETTERS), (rows, length), generator=generator)


def pretrain(scale: Scale) -> PreTrainedModel:
    """A tiny Qwen that repeats its prompt about as often as the text it has seen, in FP32."""
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(LETTERS),
        hidden_size=scale.width,
        intermediate_size=2 * scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=scale.width // 4,
        max_position_embeddings=64,
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.pretraining_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, scale.pretraining_rate, scale.pretraining_steps, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(scale.pretraining_steps):
        prompts = draw_letters(64, scale.length, generator)
        is_right = torch.rand(prompts.shape, generator=generator) < scale.right
        answers = torch.where(is_right, prompts, draw_letters(64, scale.length, generator))
        ids = torch.cat([prompts, answers], 1)
        labels = torch.cat([torch.full_like(prompts, -100), answers], 1)
        cast(Any, model)(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def share_right(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """The reward: the share of the prompt's tokens that the completion has in their places."""
    pairs = [(prompt.split(), completion.split()) for prompt, completion in zip(prompts, completions, strict=True)]
    return [sum(a == b for a, b in zip(asked, given, strict=False)) / len(asked) for asked, given in pairs]


# One training


@dataclass(frozen=True)
class Run:
    """One variant under one seed.

    Attributes:
        rewards: mean of every step's completions.
        gaps: what ``hf_mp.log_probability_gap`` found, and the step after which.
        moved_norms: share of the norm weights that the training moved.
        skipped_steps: updates not applied for an overflow.
    """

    rewards: list[float]
    gaps: list[dict[str, float]]
    moved_norms: float
    skipped_steps: int


class Watch(TrainerCallback):
    """Measures the gap between training forward and generation every few steps, on the same prompts each time."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.prompts = draw_letters(scale.measured, scale.length, torch.Generator().manual_seed(1))
        self.gaps: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.scale.measure_every:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(state.global_step)
            gap = gap_of(model, self.prompts, self.scale.length)
        self.gaps.append({"step": state.global_step, **gap})


def gap_of(model: Any, prompts: Tensor, length: int) -> dict[str, float]:
    """Draw completions as TRL does, and compare their tokens' log-probabilities with those of TRL's training forward.

    That multiplies by the head's weight in a function of TRL's own, which ``fused_lm_head`` asks for.
    """
    drawn = model.generate(prompts, do_sample=True, top_k=0, min_new_tokens=length, max_new_tokens=length)
    labels = drawn.clone()
    labels[:, : prompts.shape[1]] = -100
    gap = hf_mp.log_probability_gap(model, {"input_ids": drawn, "labels": labels, "fused_lm_head": True})
    return {
        "mean": gap.mean,
        "max": gap.maximum,
        "clipped": gap.clipped_share,
        "alpha": gap.alpha,
        "beta": gap.beta,
    }


def train(variant: Variant, scale: Scale, saved: Path, folder: Path, learning_rate: float, seed: int) -> Run:
    """GRPO from the saved model on; prompts and the tokens drawn depend on the seed alone."""
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(saved, **variant.loading)
    norms = {name: one.detach().float().clone() for name, one in model.named_parameters() if "norm" in name}
    prompts = draw_letters(scale.steps * scale.prompts, scale.length, torch.Generator().manual_seed(seed + 2))
    watch, tokenizer = Watch(scale), make_tokenizer()
    mixed = None
    if variant.precision is not None:
        mixed = hf_mp.MixedPrecisionCallback(variant.precision, fp32_head=variant.fp32_head)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_right,
        args=GRPOConfig(
            output_dir=str(folder),
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            max_steps=scale.steps,
            per_device_train_batch_size=scale.prompts * scale.generations,
            num_generations=scale.generations,
            max_completion_length=scale.length,
            generation_kwargs={"min_new_tokens": scale.length},
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
            **variant.settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts)}),
        processing_class=tokenizer,
        callbacks=[watch, *([mixed] if mixed else [])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    moved = [parameter.detach().float() != norms[name] for name, parameter in model.named_parameters() if name in norms]
    runtime = None if mixed is None else mixed.mixed_precision
    return Run(
        rewards=[entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
        gaps=watch.gaps,
        moved_norms=float(torch.cat([one.flatten() for one in moved]).float().mean()),
        skipped_steps=0 if runtime is None else runtime.stats.skipped_steps,
    )


# What it came to


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """One variant over all seeds; gaps are means over the measurements of all seeds.

    Returns:
        ``first_reward``, ``last_reward``: mean of the first and of the last tenth of the steps; ``last_range``: the
        smallest and the largest of the last ones by seed; ``gap``: mean of ``|log r|``, where r is a token's
        probability in training over that in generation; ``largest_gap``: of all tokens; ``clipped``: share of the
        tokens whose r alone lies outside of 1 ± 0.2, GRPO's clipping range; ``beta``: of the fit log r = alpha + beta *
        log p, where p is the probability in generation; ``moved_norms``, ``skipped_steps``: as of a :class:`Run`.
    """
    rewards = torch.tensor([run.rewards for run in runs], dtype=torch.float64)
    tenth = max(1, rewards.shape[1] // 10)
    lasts = rewards[:, -tenth:].mean(1)
    gaps = [gap for run in runs for gap in run.gaps]
    means = {key: statistics.mean(gap[key] for gap in gaps) for key in ("mean", "clipped", "beta")}
    return {
        "first_reward": rewards[:, :tenth].mean().item(),
        "last_reward": lasts.mean().item(),
        "last_range": (lasts.min().item(), lasts.max().item()),
        "gap": means["mean"],
        "largest_gap": max(gap["max"] for gap in gaps),
        "clipped": means["clipped"],
        "beta": means["beta"],
        "moved_norms": statistics.mean(run.moved_norms for run in runs),
        "skipped_steps": sum(run.skipped_steps for run in runs),
    }


def table_of(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Rewards of the first and the last tenth of the steps, the gaps, and the norm weights that moved."""
    table = Table("", box=SIMPLE_HEAD)
    for column in ("reward", "mean |log r|", "largest", "clipped", "beta", "norms moved", "skipped"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        rewards = f"{row['first_reward']:.3f} to {row['last_reward']:.3f}"
        gaps = (f"{row['gap']:.1e}", f"{row['largest_gap']:.1e}", f"{row['clipped']:.2%}", f"{row['beta']:+.1e}")
        table.add_row(name, rewards, *gaps, f"{row['moved_norms']:.0%}", str(row["skipped_steps"]))
    return table


# The program


@dataclass(frozen=True)
class Options:
    """What to run."""

    variants: list[str] = field(
        default_factory=lambda: list(VARIANTS), metadata={"choices": list(VARIANTS), "help": "Default: all of them."}
    )
    seeds: int = field(default=1, metadata={"help": "Orders of the prompts, and draws of the tokens, to train on."})
    learning_rate: float = field(default=2e-4, metadata={"help": "Of GRPO."})
    scale: str = field(default="full", metadata={"choices": list(SCALES), "help": "Of model and training."})
    output_dir: str = field(default="outputs/grpo_fp16", metadata={"help": "For the numbers."})

    def __post_init__(self) -> None:
        check_training(self.seeds, self.learning_rate)


def run(options: Options, console: Console) -> dict[str, Any]:
    """Pretrain once, train every variant under every seed, and print what came of it; all numbers."""
    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    scale = SCALES[options.scale]
    runs: dict[str, list[Run]] = {name: [] for name in options.variants}
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory, "saved")
        console.print(f"pretraining in FP32: {scale.pretraining_steps} steps; saved in BF16")
        model = pretrain(scale)
        torch.nn.Module.to(model, torch.bfloat16)
        model.save_pretrained(saved)
        for seed, (name, of_seeds) in itertools.product(range(options.seeds), runs.items()):
            console.print(f"GRPO under seed {seed}: {scale.steps} steps of {name}, {VARIANTS[name].what}")
            of_seeds.append(train(VARIANTS[name], scale, saved, Path(directory, "run"), options.learning_rate, seed))
    rows = {name: summarize(of_seeds) for name, of_seeds in runs.items()}
    console.print(table_of(rows))
    return {
        "options": {**asdict(options), **asdict(scale)},
        "rows": rows,
        "gaps": {name: [run.gaps for run in of_seeds] for name, of_seeds in runs.items()},
        "rewards": {name: [run.rewards for run in of_seeds] for name, of_seeds in runs.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(Options, arguments)
    save_numbers(run(options, Console(highlight=False)), Path(options.output_dir))


if __name__ == "__main__":
    main()
