"""Adafactor with steps of its own: the learning rate in the logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_runs import arguments, make_trainer, tiny_gpt2, token_rows
from transformers.optimization import Adafactor, AdafactorSchedule, get_constant_schedule

from hf_mp.trainer.relative_step import read_learning_rate_from_state


def learning_rates(path: Path, precision: str, contender: str = "subclass") -> list[float]:
    model = tiny_gpt2()
    optimizer = Adafactor(model.parameters(), scale_parameter=False, relative_step=True, warmup_init=True)
    optimizers: Any = (optimizer, AdafactorSchedule(optimizer))
    trainer = make_trainer(
        contender, precision, model, arguments(path), train_dataset=token_rows(), optimizers=optimizers
    )
    trainer.train()
    return [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_lean_layouts_log_the_learning_rate_of_a_stock_run(tmp_path: Path, precision: str) -> None:
    expected = learning_rates(tmp_path / "stock", "", contender="stock")
    assert len(set(expected)) == 4
    assert learning_rates(tmp_path / "lean", precision) == expected


def test_other_schedules_stay_what_they_are() -> None:
    schedule = get_constant_schedule(Adafactor(tiny_gpt2().parameters(), lr=0.1, relative_step=False))
    kind = type(schedule)
    read_learning_rate_from_state(schedule)
    read_learning_rate_from_state(None)
    assert type(schedule) is kind
