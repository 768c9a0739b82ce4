"""A Trainer that takes one step at a time."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from _step_by_step import StepByStep


@pytest.fixture
def make_trainer(gpt2: GPT2LMHeadModel, batch, tmp_path):
    def make(max_steps: int = 100, bf16: bool = False, **callbacks: TrainerCallback) -> Trainer:
        args = TrainingArguments(
            str(tmp_path), bf16=bf16, max_steps=max_steps, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=1000, per_device_train_batch_size=2,
        )  # fmt: skip
        rows = [{name: values[0] for name, values in batch.items()}] * 4
        trainer = Trainer(gpt2, args, train_dataset=rows, callbacks=list(callbacks.values()))
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make


def test_each_step_is_one_update(make_trainer):
    trainer = make_trainer()
    steps = StepByStep(trainer)
    assert trainer.state.global_step == 0
    for number in (1, 2, 3):
        steps.step()
        assert trainer.state.global_step == number
    steps.close()
    assert trainer.state.global_step == 4


def test_a_step_after_the_last_is_refused(make_trainer):
    steps = StepByStep(make_trainer(max_steps=1))
    steps.step()
    with pytest.raises(RuntimeError, match="training has ended: give its TrainingArguments more max_steps"):
        steps.step()
    steps.close()


def test_what_the_training_raises_reaches_the_caller(make_trainer):
    class Fails(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            raise KeyError("planted")

    steps = StepByStep(make_trainer(fails=Fails()))
    with pytest.raises(KeyError, match="planted"):
        steps.step()


def test_the_training_sees_the_settings_of_torch_that_the_caller_made(make_trainer):
    class Limit(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.seen.append(torch._dynamo.config.recompile_limit)

    watch = Limit()
    with torch._dynamo.config.patch(recompile_limit=57):
        StepByStep(make_trainer(watch=watch)).close()
    assert watch.seen == [57]


def test_each_trainer_keeps_its_own_precision(make_trainer):
    class Precisions(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.seen.append(AcceleratorState().mixed_precision)

    mixed, plain = Precisions(), Precisions()
    first = StepByStep(make_trainer(bf16=True, watch=mixed))
    second = StepByStep(make_trainer(watch=plain))
    for _ in range(2):
        first.step()
        second.step()
    first.close()
    second.close()
    assert mixed.seen == ["bf16"] * 3
    assert plain.seen == ["no"] * 3
