"""The recipe in FP16 under each loss scaler, same seed and data order: which steps are wasted, where the scale goes.

    python scripts/compare_scalers.py [--max_steps 1000] [any other flag of the recipe]

torch's defaults try a larger scale every 2000 steps only, so a run of 1000 does not show them probing. The last
contender probes every 100 steps instead, and shows in 1000 steps what they do in 20,000.

Stores ``scripts/results/compare_scalers.json`` and draws the scales into ``compare_scalers.png``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from _plots import draw_scales
from _recipe import recipe_trainer
from _results import RESULTS, save_result
from hf_mp import MixedPrecisionTrainer

CONTENDERS = {
    "headroom": ["--loss_scale", "headroom"],
    "dynamic": ["--loss_scale", "dynamic"],
    "static": ["--loss_scale", "128"],
    "dynamic, growth_interval=100": ["--loss_scale", "dynamic", "--loss_scaler_settings", '{"growth_interval": 100}'],
}


@dataclass(frozen=True)
class ScaleRun:
    """One run of the recipe.

    Attributes:
        steps: optimizer steps, skipped ones included.
        skipped_at: numbers of the steps that were skipped, counted from 1.
        scale_changes: pairs of a step and the scale that it and the following ones used.
        final_eval_loss: on the held-out text, after training.
        train_seconds: of this machine while it ran; not a benchmark.
    """

    steps: int
    skipped_at: list[int]
    scale_changes: list[tuple[int, float]]
    final_eval_loss: float
    train_seconds: float

    def summary(self) -> dict[str, float]:
        """The scale over the run, and how many steps it wasted."""
        scales = [scale for _, scale in self.scale_changes]
        return {
            "skipped_steps": len(self.skipped_at),
            "first_scale": scales[0],
            "last_scale": scales[-1],
            "smallest_scale": min(scales),
            "largest_scale": max(scales),
        }


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


def main(flags: Sequence[str], directory: Path = RESULTS) -> None:
    """Train under each scaler, store the numbers, draw the scales."""
    runs = {name: run([*flags, *choice]) for name, choice in CONTENDERS.items()}
    Console(highlight=False).print(table(runs))
    payload = {name: {**found.summary(), **asdict(found)} for name, found in runs.items()}
    path = save_result("compare_scalers", payload, directory=directory)
    draw_scales(payload, path.with_suffix(".png"))
    print(f"stored {path.name} and {path.with_suffix('.png').name}")


def run(flags: Sequence[str]) -> ScaleRun:
    """One run of the recipe in FP16."""
    with recipe_trainer(["--max_steps", "1000", "--precision", "fp16", *flags]) as trainer:
        watch = ScaleWatch(trainer)
        trainer.add_callback(watch)
        print(f"training: {' '.join(flags)}", flush=True)
        seconds = trainer.train().metrics["train_runtime"]
        eval_loss = trainer.evaluate()["eval_loss"]
        return ScaleRun(trainer.state.global_step, watch.skipped_at, watch.scale_changes, eval_loss, seconds)


def table(runs: Mapping[str, ScaleRun]) -> Table:
    """A row for each scaler."""
    shown = Table("loss scaler", "skipped", "at steps", "scale", "evaluation loss")
    for name, found in runs.items():
        summary = {key: f"{value:,.10g}" for key, value in found.summary().items()}
        scale = "{first_scale} to {last_scale} (within {smallest_scale} to {largest_scale})".format(**summary)
        at = ", ".join(map(str, found.skipped_at)) or "none"
        shown.add_row(name, f"{len(found.skipped_at)} of {found.steps:,}", at, scale, f"{found.final_eval_loss:.4f}")
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
