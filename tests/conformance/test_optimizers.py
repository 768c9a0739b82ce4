"""Each ``optim=`` of the Trainer that is installed here, with our callback added."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import arguments, callback_of, logged, make_trainer, poisoned, same, tiny_gpt2, token_rows, weights
from transformers import Trainer
from transformers.optimization import Adafactor, AdafactorSchedule
from transformers.training_args import OptimizerNames

LEARNING_RATES = {"sgd": 0.5, "rmsprop": 1e-3, "lion": 1e-3}


def learning_rate(name: str) -> float:
    return next((rate for key, rate in LEARNING_RATES.items() if key in name), 1e-2)


def each_optimizer() -> Iterator[Any]:
    """Where there is no GPU, a paged one is the one of its name without pages: one of them stands for all."""
    names = sorted(name.value for name in OptimizerNames)
    for name in names:
        is_like_another = name.removeprefix("paged_") != name != "paged_adamw_8bit" and not torch.cuda.is_available()
        yield pytest.param(name, marks=pytest.mark.exhaustive if is_like_another else ())


@pytest.mark.parametrize("name", list(each_optimizer()))
def test_training_with_each_optimizer(tmp_path: Path, name: str) -> None:
    args = {"optim": name, "learning_rate": learning_rate(name)}
    stock = make_trainer(
        "stock", "fp32", tiny_gpt2(), arguments(tmp_path / "stock", **args), train_dataset=token_rows()
    )
    try:
        stock.train()
    except (ImportError, ValueError) as error:
        pytest.skip(f"the stock Trainer has no {name} here: {error}")
    ours = make_trainer(
        "callback", "fp16", tiny_gpt2(), arguments(tmp_path / "ours", **args), train_dataset=token_rows()
    )
    ours.train()
    assert not same(weights(ours.model), weights(tiny_gpt2()))
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=5e-3)


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adafactor", "adamw_bnb_8bit"])
def test_a_skipped_step_leaves_the_optimizer_as_it_was(tmp_path: Path, name: str) -> None:
    """A run that skips its second step and one that never had it end alike, to the bit."""
    ends = []
    for steps, rows in (((1,), token_rows(12)), ((), token_rows(12)[:4] + token_rows(12)[8:])):
        args = arguments(
            tmp_path / str(steps),
            optim=name,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            max_steps=-1,
        )
        trainer = make_trainer(
            "callback", "params=fp32,loss_scale=1024", tiny_gpt2(), args, poisoned(Trainer, steps), train_dataset=rows
        )
        trainer.train()
        assert callback_of(trainer).mixed_precision.stats.skipped_steps == len(steps)
        ends.append(weights(trainer.model))
    assert same(*ends)


def test_relative_steps_are_logged_in_a_lean_layout_too(tmp_path: Path) -> None:
    """A step frees the gradients there, by which Transformers' schedule finds which parameters have been stepped."""

    def make(contender: str, precision: str, folder: str) -> Trainer:
        model = tiny_gpt2()
        optimizer = Adafactor(model.parameters())
        schedule = AdafactorSchedule(optimizer, initial_lr=0.5)
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=2)
        named = {"train_dataset": token_rows(), "optimizers": (optimizer, schedule)}
        return make_trainer(contender, precision, model, args, **named)

    stock, lean, resumed = (
        make("stock", "fp32", "a"),
        make("subclass", "fp16-lean", "b"),
        make("subclass", "fp16-lean", "c"),
    )
    stock.train()
    lean.train()
    rates = logged(stock, "learning_rate")
    assert len(set(rates)) > 2 and logged(lean, "learning_rate") == pytest.approx(rates, rel=1e-3)
    assert type(lean.lr_scheduler) is AdafactorSchedule
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert logged(resumed, "learning_rate") == logged(lean, "learning_rate")
    assert same(weights(resumed.model), weights(lean.model))
