"""``log_probability_gap_steps`` of a plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import arguments, callback_of, logged, make_trainer, tiny_gpt2, token_rows
from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback


def run(path: Path, contender: str, **settings: Any) -> Any:
    args = arguments(path, MixedPrecisionArguments, max_steps=4, **settings)
    trainer = make_trainer(contender, "fp16", tiny_gpt2(), args, train_dataset=token_rows())
    trainer.train()
    return trainer


@pytest.mark.parametrize("contender", ["callback", "subclass"])
def test_it_is_logged(tmp_path: Path, contender: str) -> None:
    trainer = run(tmp_path, contender, log_probability_gap_steps=2)
    assert [entry["step"] for entry in trainer.state.log_history if "logp_gap" in entry] == [2, 4]
    assert all(0.0 <= gap < 0.05 for gap in logged(trainer, "logp_gap"))


def test_what_does_not_generate_is_named(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=32, pad_token_id=0, num_labels=2)
    args = arguments(tmp_path, MixedPrecisionArguments, max_steps=1, log_probability_gap_steps=1)
    data = [{"input_ids": [1, 2, 3], "labels": index % 2} for index in range(8)]
    trainer = make_trainer("callback", "fp16", GPT2ForSequenceClassification(config), args, train_dataset=data)
    with pytest.raises(ValueError, match=r"gap_steps=1 is for a causal .* GPT2ForSeq.* is none: leave it"):
        trainer.train()
    callback_of(trainer).detach()
    with pytest.raises(ValueError, match="log_probability_gap_steps=-1 must be a whole number of steps"):
        arguments(tmp_path, MixedPrecisionArguments, log_probability_gap_steps=-1)


class Unlabelled(Trainer):
    """Whose second batch has no token that counts, as TRL's GRPO has where all completions were truncated."""

    def training_step(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        if self.state.global_step == 1:
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
        if self.state.global_step == 2:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        return super().training_step(model, inputs, *given, **named)


def test_a_batch_that_cannot_be_measured_has_no_entry(tmp_path: Path) -> None:
    args = arguments(tmp_path, MixedPrecisionArguments, log_probability_gap_steps=1)
    logging.warning_once.cache_clear()
    trainer = make_trainer("callback", "fp16", tiny_gpt2(), args, base=Unlabelled, train_dataset=token_rows())
    with CaptureLogger(logging.get_logger("hf_mp.trainer.logged_gap")) as said:
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "logp_gap" in entry] == [1, 4]
    assert "steps without logp_gap: " in said.out and "has token_type_ids, of" in said.out


@pytest.mark.parametrize(
    ("settings", "column", "message"),
    [
        ({"label_smoothing_factor": 0.1}, (), "trained on input_ids and labels, and this GPT2.* was given input_ids"),
        ({}, ("token_type_ids",), "gap_steps=3: batch has token_type_ids, of which .*; or leave it at 0"),
        ({}, ("position_ids",), "gap_steps=3: batch has position_ids, of which .*; or leave it at 0"),
    ],
)
def test_what_no_step_could_measure_ends_the_first(
    tmp_path: Path, settings: dict[str, Any], column: tuple[str, ...], message: str
) -> None:
    args = arguments(tmp_path, MixedPrecisionArguments, log_probability_gap_steps=3, **settings)
    rows = [{**row, **{name: torch.zeros_like(row["labels"]) for name in column}} for row in token_rows()]
    trainer = make_trainer("callback", "fp16", tiny_gpt2(), args, train_dataset=rows)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    callback_of(trainer).detach()


def test_the_callback_takes_the_options(tmp_path: Path) -> None:
    options = {"fp32_head": True, "exact_generation": True, "log_probability_gap_steps": 5}
    callback = MixedPrecisionCallback("bf16", **options)
    trainer = Trainer(tiny_gpt2(), arguments(tmp_path), train_dataset=token_rows(), callbacks=[callback])
    session = callback_of(trainer).session
    assert session is not None and session.settings.log_probability_gap_steps == 5
    assert str(session.settings.policy) == "bf16,fp32_head=true,exact_generation=true"
    args = arguments(tmp_path, MixedPrecisionArguments, **options)
    assert str(args.precision_policy) == "fp16,fp32_head=true,exact_generation=true"
    for name in ("fp32_head", "exact_generation"):  # what the callback was given is above the arguments
        off = MixedPrecisionCallback(**{name: False})
        Trainer(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[off])
        assert off.session is not None and not getattr(off.session.settings.policy, name)
        assert sum(getattr(off.session.settings.policy, other) for other in ("fp32_head", "exact_generation")) == 1
        off.detach()
    callback.detach()
