"""Skipped steps x gradient accumulation x resuming, by both adapters: bit for bit the run that went straight on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from trainer_runs import arguments, history, make_trainer, poisoned, same, tiny_gpt2, token_rows, weights
from transformers import Trainer

from hf_mp import MixedPrecisionArguments

STEPS = 6
# What the clock of a resumed run decides, and the totals that it begins anew.
TOTALS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}


class Case:
    """Runs of one setting, into one directory each."""

    def __init__(self, path: Path, contender: str, precision: str, skipped: tuple[int, ...], **settings: Any) -> None:
        self.path, self.contender, self.precision = path, contender, precision
        self.skipped, self.settings = skipped, settings

    def run(self, name: str, resume: Path | None = None) -> tuple[list[Tensor], list[str], list[int]]:
        settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
        settings["loss_scaler_settings"] = {"init_scale": 256.0}
        args = arguments(
            self.path / name,
            MixedPrecisionArguments,
            learning_rate=1e-2,
            **{**settings, **self.settings},
        )
        args.precision = self.precision
        if resume is not None:  # where the callback looks for what the subclass saved
            args.resume_from_checkpoint = str(resume)
        base = poisoned(Trainer, self.skipped)
        model = tiny_gpt2(resid_pdrop=0.1)
        # Rows that do not fill the last update of an epoch.
        trainer = make_trainer(self.contender, self.precision, model, args, base, train_dataset=token_rows(22, 8))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        logged = [entry["skipped_steps"] for entry in trainer.state.log_history if "skipped_steps" in entry]
        return weights(trainer.model), history(trainer, TOTALS), logged


def assert_resuming_changes_nothing(case: Case, steps: range | tuple[int, ...]) -> list[Tensor]:
    straight, log, skipped = case.run("straight")
    assert skipped == list(itertools.accumulate(step in case.skipped for step in range(STEPS)))
    for step in steps:
        resumed, log_of_resumed, _ = case.run(f"from-{step}", case.path / "straight" / f"checkpoint-{step}")
        assert same(straight, resumed), f"resumed at {step}"
        assert log == log_of_resumed
    return straight


def test_both_adapters_and_a_skip_before_and_after_the_save(tmp_path: Path) -> None:
    ends = [
        assert_resuming_changes_nothing(
            Case(tmp_path / contender, contender, "fp16", (1, 4), gradient_accumulation_steps=2), (2,)
        )
        for contender in ("subclass", "callback")
    ]
    assert same(*ends)


@pytest.mark.parametrize("step", [2, 4])
def test_either_adapter_resumes_what_the_other_saved(tmp_path: Path, step: int) -> None:
    settings = {"gradient_accumulation_steps": 3}
    cases = [Case(tmp_path, contender, "fp16", (1, 4), **settings) for contender in ("subclass", "callback")]
    straight, *_ = cases[0].run("a")
    resumed, *_ = cases[1].run("b", tmp_path / "a" / f"checkpoint-{step}")
    again, *_ = cases[0].run("c", tmp_path / "b" / f"checkpoint-{STEPS - 1}")
    assert same(straight, resumed) and same(straight, again)


@pytest.mark.outside
@pytest.mark.parametrize("skipped", [(), (0,), (2,), (5,), (1, 2), (0, 3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("accumulation", [1, 2, 3, 6])
@pytest.mark.parametrize("scale", [None, "dynamic", "none"])
@pytest.mark.parametrize("layout", ["fp16", "fp16-lean"])
def test_each(tmp_path: Path, layout: str, scale: str | None, accumulation: int, skipped: tuple[int, ...]) -> None:
    parameters = {"fp16": "fp32", "fp16-lean": "fp16"}[layout]
    precision = layout if scale is None else f"params={parameters},compute=fp16,loss_scale={scale}"
    ends = []
    for contender in ("subclass", "callback") if layout == "fp16" else ("subclass",):
        settings = {"gradient_accumulation_steps": accumulation}
        if scale == "none":
            settings["loss_scaler_settings"] = None
        case = Case(tmp_path / contender, contender, precision, skipped, **settings)
        ends.append(assert_resuming_changes_nothing(case, range(1, STEPS)))
    assert same(ends[0], ends[-1])
