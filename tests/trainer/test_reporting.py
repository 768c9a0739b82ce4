"""What a Trainer shows of its precision: log, TensorBoard, report; through subclass and callback."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from trainer_runs import arguments, poisoned, same, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainingArguments
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_mp import LossScaleError, MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer
from hf_mp.diagnostics.report import PAGE_NAME
from hf_mp.diagnostics.run_log import LOG_NAME, read_run

pytestmark = pytest.mark.usefixtures("without_first_check")

CONTENDERS = ["subclass", "callback"]


def train(contender: str, path: Path, base: type[Trainer] = Trainer, callbacks: Any = (), **settings: Any) -> Trainer:
    """A short run; ``settings`` are for the Trainer's arguments, or for the callback where it has them."""
    names = ("histogram_steps", "precision_report", "explain_overflows")
    checkpoint = settings.pop("resume_from_checkpoint", None)
    model = settings.pop("model", None) or tiny_gpt2()
    if contender == "subclass":
        args = arguments(path, MixedPrecisionArguments, **settings)
        ours = type("Ours", (MixedPrecisionTrainer, base), {})
        trainer = ours(model=model, args=args, train_dataset=token_rows(), callbacks=list(callbacks))
    else:
        own = {name: settings.pop(name) for name in names if name in settings}
        callbacks = [*callbacks, MixedPrecisionCallback("fp16", **own)]
        args = arguments(path, **settings)
        trainer = base(model=model, args=args, train_dataset=token_rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_run_that_is_asked_to_leaves_a_log_and_a_page(contender: str, tmp_path: Path) -> None:
    trainer = train(contender, tmp_path, poisoned(Trainer, (1,)), histogram_steps=2, precision_report=True, max_steps=5)
    run = read_run(tmp_path)
    assert run.missing == [] and run.has_ended
    assert [step.skipped for step in run.steps.values()] == [False, True, False, False, False]
    assert "output 'loss' has inf, NaN or a magnitude of 2**64 or more" in run.steps[2].cause
    assert run.magnitudes is not None and run.magnitudes.step == 5
    assert run.start["settings"]["learning_rate"] == 0.5 and run.start["histogram_steps"] == 2
    assert "1 of 5 steps skipped." in (tmp_path / PAGE_NAME).read_text(encoding="utf-8")
    assert str(tmp_path) not in (tmp_path / LOG_NAME).read_text(encoding="utf-8")
    trainer.train()  # again, after the report, and evaluate
    assert trainer.evaluate(token_rows(4))["eval_loss"] > 0


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize(
    "settings", [{"histogram_steps": 2}, {"precision_report": True}, {}], ids=["histograms", "report", "neither"]
)
def test_each_can_be_had_alone_and_nothing_unasked(contender: str, settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = train(contender, tmp_path, **settings)
    assert (tmp_path / LOG_NAME).is_file() == bool(settings)
    assert (tmp_path / PAGE_NAME).is_file() == ("precision_report" in settings)
    assert not settings or (read_run(tmp_path).magnitudes is not None) == ("histogram_steps" in settings)
    shares = any("share" in key for entry in trainer.state.log_history for key in entry)
    assert shares == ("histogram_steps" in settings)


def test_both_contenders_record_the_same(tmp_path: Path) -> None:
    for contender in CONTENDERS:
        train(contender, tmp_path / contender, histogram_steps=2)
    found, other = (read_run(tmp_path / contender) for contender in CONTENDERS)
    assert found.magnitudes == other.magnitudes and found.steps == other.steps


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", [LOG_NAME, PAGE_NAME])
def test_a_report_that_cannot_be_written_costs_no_training(contender: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with CaptureLogger(logging.get_logger("hf_mp.trainer.reporting")) as captured:
        trainer = train(contender, tmp_path, precision_report=True)
    assert trainer.state.global_step == 4
    assert "the precision report of this run could not be written" in captured.out


def test_training_that_cannot_go_on_leaves_its_report(tmp_path: Path) -> None:
    settings = {"loss_scale": "1024", "loss_scaler_settings": {"max_consecutive_skips": 2}, "max_steps": 8}
    with pytest.raises(LossScaleError):
        train("subclass", tmp_path, poisoned(Trainer, (3, 4)), precision_report=True, **settings)
    assert "2 of 5 steps skipped." in (tmp_path / PAGE_NAME).read_text(encoding="utf-8")
    assert read_run(tmp_path).has_ended


@pytest.mark.parametrize("contender", CONTENDERS)
def test_settings_that_json_has_no_word_for_are_told_as_text(contender: str, tmp_path: Path) -> None:
    train(contender, tmp_path, precision_report=True, max_grad_norm=float("inf"))
    assert read_run(tmp_path).start["settings"]["max_grad_norm"] == "inf"


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize(
    ("steps", "settings", "told"),
    [
        (range(6), {}, "0 of 6 steps were taken: .* No smaller loss scale helps. Look for a division by zero"),
        (range(6), {"explain_overflows": False}, "0 of 6 steps were taken: .* explain_overflows=False hid the reason"),
        (range(2, 6), {}, "2 of 6 steps were taken: the others were skipped .* Look for a division by zero"),
        (range(3, 6), {}, None),
    ],
    ids=["explained", "not explained", "most were skipped", "half of them were taken"],
)
def test_a_run_that_skipped_most_of_its_steps_says_so_and_what_to_do(
    contender: str, steps: Sequence[int], settings: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    with CaptureLogger(logging.get_logger("hf_mp.trainer.reporting")) as captured:
        train(contender, tmp_path, poisoned(Trainer, tuple(steps)), max_steps=6, **settings)
    assert re.search(told, captured.out) if told else "steps were taken" not in captured.out


@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_resumed_run_that_took_no_step_says_so(contender: str, tmp_path: Path) -> None:
    train(contender, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    with CaptureLogger(logging.get_logger("hf_mp.trainer.reporting")) as captured:
        train(contender, tmp_path, poisoned(Trainer, (2, 3)), max_steps=4, resume_from_checkpoint=True)
    assert "0 of 2 steps were taken" in captured.out


# Logs and TensorBoard


@pytest.mark.parametrize("contender", CONTENDERS)
def test_tensorboard_has_the_scalars(contender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = train(contender, tmp_path, report_to="tensorboard", histogram_steps=2, max_steps=4)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    scalars = {
        f"train/{name}" for name in ("loss_scale", "skipped_steps", "headroom", "underflowed_share", "swamped_share")
    }
    assert scalars <= set(events.Tags()["scalars"])
    logged = [entry["swamped_share"] for entry in trainer.state.log_history if "swamped_share" in entry]
    assert [event.value for event in events.Scalars("train/swamped_share")] == pytest.approx(logged)


# Settings


def test_a_resumed_run_goes_on_in_the_same_log(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "histogram_steps": 2, "max_steps": 4}
    whole = train("subclass", tmp_path / "whole", **settings)
    args = arguments(tmp_path / "parts", MixedPrecisionArguments, **settings)
    for resume in (False, str(tmp_path / "parts" / "checkpoint-2")):
        trainer = MixedPrecisionTrainer(tiny_gpt2(), args, train_dataset=token_rows())
        trainer.train(resume_from_checkpoint=resume)
    assert same(weights(whole.model), weights(trainer.model))
    run, expected = read_run(tmp_path / "parts"), read_run(tmp_path / "whole")
    assert run.steps == expected.steps


def test_wrong_settings_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="histogram_steps=-1 must be a whole"):
        MixedPrecisionArguments(output_dir=str(tmp_path), histogram_steps=-1)
    with pytest.raises(ValueError, match="histogram_steps=-1 must be a whole"):
        MixedPrecisionCallback("fp16", histogram_steps=-1)
    with pytest.raises(TypeError, match=r"histogram_layers is no option .*histogram_steps"):
        MixedPrecisionCallback("fp16", histogram_steps=1, histogram_layers=["lm_head"])


def test_the_callback_takes_them_from_the_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, MixedPrecisionArguments, histogram_steps=2)
    with CaptureLogger(logging.get_logger("hf_mp.trainer.session")) as captured:
        Trainer(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[MixedPrecisionCallback()]).train()
    latest = read_run(tmp_path).magnitudes
    assert latest is not None and "lm_head" in latest.layers
    assert "no effect" not in captured.out


@pytest.mark.parametrize("contender", CONTENDERS)
def test_what_has_no_effect_in_fp32_is_told(contender: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, MixedPrecisionArguments, precision="fp32", histogram_steps=5, loss_scale="dynamic")
    args.loss_scaler_settings = {"growth_interval": 500}
    with CaptureLogger(logging.get_logger("hf_mp.trainer.session")) as captured:
        if contender == "subclass":
            MixedPrecisionTrainer(tiny_gpt2(), args, rules={"lm_head": "fp32"})
        else:
            Trainer(tiny_gpt2(), args, callbacks=[MixedPrecisionCallback(rules={"lm_head": "fp32"})])
    assert "no effect with precision='fp32': loss_scale, loss_scaler_settings, rules, histogram_steps\n" in captured.out


def test_other_processes_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "process_index", property(lambda self: 1))
    args = arguments(tmp_path, MixedPrecisionArguments, histogram_steps=1)
    trainer = MixedPrecisionTrainer(tiny_gpt2(), args, train_dataset=token_rows())
    assert trainer.session.recorder is None
    assert isinstance(trainer.model, nn.Module)
