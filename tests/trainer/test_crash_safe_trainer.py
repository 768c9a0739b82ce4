"""The Trainer around the checkpoints: failing saves, rotation, signals, the callback's manifest."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from covering import covering
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from trainer_runs import arguments, make_trainer, same, tiny_gpt2, token_rows, weights
from transformers import TrainerCallback
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

import hf_mp.trainer.checkpoints.unfinished_marker as unfinished_marker
from hf_mp import CheckpointError, LossScaleError, MixedPrecisionArguments, Preempted
from hf_mp.trainer import checkpoint_saver
from hf_mp.trainer.checkpoints import lock
from hf_mp.trainer.checkpoints.inspection import find_problems, list_checkpoints
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, read_manifest
from hf_mp.trainer.checkpoints.preemption import PREEMPTED_EXIT_CODE, SIGNALS, PreemptionCallback

pytestmark = pytest.mark.usefixtures("without_first_check")

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2}

Trained = Callable[..., tuple[list[Tensor], Path]]


def make(folder: Path, contender: str = "subclass", precision: str = "fp16", **settings: Any) -> Any:
    named = {name: settings.pop(name) for name in ("callbacks", "eval_dataset") if name in settings}
    args = arguments(folder, MixedPrecisionArguments, **{**SAVING, **settings})
    args.precision = precision
    model = tiny_gpt2(resid_pdrop=0.1)
    return make_trainer(contender, precision, model, args, train_dataset=token_rows(), **named)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of a run that nothing disturbs: its weights, and its folder, which stays as it is. Each is trained once."""

    @functools.cache
    def train(**settings: Any) -> tuple[list[Tensor], Path]:
        folder = tmp_path_factory.mktemp("trained")
        trainer = make(folder, **settings)
        trainer.train()
        return weights(trainer.model), folder

    return train


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_a_manifest_says_what_wrote_the_checkpoint(trained: Trained) -> None:
    said = json.loads((trained()[1] / "checkpoint-2" / MANIFEST_NAME).read_text())
    assert (said["step"], said["world_size"], said["precision"]) == (2, 1, "fp16")
    assert {"hf_mp", "torch", "transformers"} <= said["versions"].keys()


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_the_best_model_is_not_loaded_where_it_is_damaged(tmp_path: Path, contender: str) -> None:
    class Damage(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                assert state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
                (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"x")

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = make(tmp_path, contender, **best, callbacks=[Damage()], eval_dataset=token_rows(4))
    with pytest.raises(CheckpointError, match=r"checkpoint-4: model.safetensors has 1"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-4")


# Saves that fail


class Failing(TrainerCallback):
    """Has the manifest fail to be written in the save of one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
        self._patch, self._step = monkeypatch, step
        self._error = OSError(number, os.strerror(number))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._patch.setattr(unfinished_marker, "finish", self._fail)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._patch.undo()

    def _fail(self, *args: Any, **kwargs: Any) -> None:
        raise self._error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE], ids=errno.errorcode.get)
def test_a_run_goes_on_after_a_save_that_failed(tmp_path: Path, number: int, trained: Trained) -> None:
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as logged:
        logged.setattr(checkpoint_saver.logger, "error", messages.append)
        trainer = make(tmp_path / "run", callbacks=[Failing(patch, 4, number)], save_total_limit=1)
        trainer.train()
    (message,) = messages
    assert "checkpoint-4 could not be saved" in message and os.strerror(number) in message
    assert re.search(r"the newest whole checkpoint in .* is checkpoint-2. Training goes on", message)
    assert names(tmp_path / "run") == ["checkpoint-6"]
    assert same(trained()[0], weights(trainer.model))


def test_a_run_stops_after_a_save_that_failed_where_it_is_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, 4, errno.ENOSPC)
    with pytest.raises(CheckpointError, match=r"No space left.*newest whole checkpoint in .*-2.*ends here"):
        make(tmp_path, callbacks=[failing], save_failure="stop").train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_an_error_of_the_program_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    monkeypatch.setattr(trainer.model, "save_pretrained", lambda *args, **kwargs: {}["x"])
    with pytest.raises(KeyError):
        trainer.train()


@pytest.mark.parametrize(("error", "is_failure"), [(OSError(errno.ENOSPC, "full"), True), (KeyError("ours"), False)])
def test_a_full_disk_under_shards_is_a_failed_save(error: Exception, is_failure: bool) -> None:
    assert checkpoint_saver.is_write_failure(CheckpointException("save", {1: (error, StackSummary())})) is is_failure


def test_an_unknown_answer_to_a_failed_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_failure='ignore': choose"):
        MixedPrecisionArguments(output_dir=str(tmp_path), use_cpu=True, save_failure="ignore")


# Rotation


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_older_ones_are_removed_only_when_the_newer_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contender: str
) -> None:
    finish, seen = unfinished_marker.finish, []

    def look(checkpoint: Path, **about: Any) -> None:
        seen.append(names(tmp_path))
        finish(checkpoint, **about)

    monkeypatch.setattr(unfinished_marker, "finish", look)
    trainer = make(tmp_path, contender, save_total_limit=1)
    trainer.train()
    assert seen == [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]
    assert names(tmp_path) == ["checkpoint-6"]
    saved = torch.load(tmp_path / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == trainer.args.save_total_limit == 1


# Signals


class Signal(TrainerCallback):
    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            signal.raise_signal(self._number)


@pytest.mark.parametrize(
    ("settings", "number"),
    covering([{}, {"save_strategy": "no"}, {"precision": "fp32"}], SIGNALS, together=1),
    ids=str,
)
def test_a_signal_ends_the_run_in_a_checkpoint(
    tmp_path: Path, number: int, settings: dict[str, Any], trained: Trained
) -> None:
    with pytest.raises(Preempted, match="checkpoint-3") as ended:
        make(tmp_path / "run", callbacks=[Signal(2, number)], **settings).train()
    assert ended.value.code == PREEMPTED_EXIT_CODE == 75
    assert signal.getsignal(number) is signal.SIG_DFL
    resumed = make(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert Path(str(resumed._resumed_from)).name == "checkpoint-3"
    assert same(trained(**settings)[0], weights(resumed.model))


def test_a_signal_skips_an_evaluation_that_is_due_and_waits_for_one_that_runs(tmp_path: Path) -> None:
    class Evaluated(TrainerCallback):
        """Notes the evaluations that come to their end; the second run is signalled in its first."""

        def __init__(self, in_step: bool) -> None:
            self.in_step, self.steps = in_step, list[int]()

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.in_step and state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.in_step and state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps.append(state.global_step)

    for in_step, ends_at in ((True, 4), (False, 3)):
        evaluated = Evaluated(in_step)
        settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": token_rows(8)}
        with pytest.raises(Preempted, match=f"checkpoint-{ends_at}"):
            make(tmp_path / str(in_step), callbacks=[evaluated], **settings).train()
        assert evaluated.steps == [2]


def test_outside_of_the_main_thread_no_signal_is_handled() -> None:
    with CaptureLogger(logging.get_logger("hf_mp.trainer.checkpoints.preemption")) as said:
        thread = threading.Thread(target=PreemptionCallback(max).handling_signals().__enter__)
        thread.start()
        thread.join()
    assert "a signal will not end it in a checkpoint" in said.out
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in SIGNALS)


def test_a_preempted_run_keeps_its_checkpoint_beside_the_best(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    with pytest.raises(Preempted):
        make(tmp_path, **best, eval_dataset=token_rows(4), callbacks=[Signal(2, signal.SIGTERM)]).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize(
    ("event", "settings"),
    [("on_save", {}), ("on_train_end", {}), ("on_train_end", {"save_strategy": "no"})],
    ids=["save", "end", "end without saves"],
)
def test_a_signal_after_the_last_step_ends_the_same_way(
    tmp_path: Path, event: str, settings: dict[str, str], trained: Trained
) -> None:
    def at_the_last_step(args: Any, state: Any, *rest: Any, **named: Any) -> None:
        if state.global_step == 6:
            signal.raise_signal(signal.SIGTERM)

    callback = TrainerCallback()
    setattr(callback, event, at_the_last_step)
    with pytest.raises(Preempted, match="checkpoint-6"):
        make(tmp_path / "run", callbacks=[callback], **settings).train()
    resumed = make(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6 and same(trained()[0], weights(resumed.model))


def test_a_signal_whose_checkpoint_cannot_be_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = [Signal(2, signal.SIGTERM), Failing(monkeypatch, 3, errno.ENOSPC)]
    with pytest.raises(CheckpointError, match="SIGTERM ended the run, and checkpoint-3"):
        make(tmp_path, callbacks=callbacks).train()
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_further_signal_changes_nothing(tmp_path: Path) -> None:
    callbacks = [Signal(2, signal.SIGTERM), Signal(2, signal.SIGUSR1), Signal(2, signal.SIGTERM)]
    with pytest.raises(Preempted, match=r"SIGTERM .*checkpoint-3"):
        make(tmp_path, callbacks=callbacks).train()


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        trainer = make(tmp_path, callbacks=[Signal(2, signal.SIGTERM)])
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM] and trainer.state.global_step == 6


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_checkpoint_of_transformers_jit_callback_is_whole(tmp_path: Path, contender: str) -> None:
    class Request(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                jit.jit_manager.is_checkpoint_requested = True

    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = make(tmp_path, contender, enable_jit_checkpoint=True, save_strategy="no", callbacks=[Request()])
        (jit,) = (cb for cb in trainer.callback_handler.callbacks if hasattr(cb, "jit_manager"))
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    (checkpoint,) = tmp_path.iterdir()
    assert read_manifest(checkpoint) is not None and find_problems(checkpoint) == []
    assert not (checkpoint / "checkpoint-is-incomplete.txt").exists()


def test_signals_are_left_alone_where_that_is_asked(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    make(tmp_path, handle_preemption=False, callbacks=[Look()]).train()


# The callback


def test_a_second_run_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "ORPHAN_SECONDS", 0.1)

    class Second(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                with pytest.raises(CheckpointError, match="in use by another run"):
                    make(tmp_path).train()

    make(tmp_path, callbacks=[Second()]).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    shutil.rmtree(tmp_path)


# Training that cannot go on


class Stuck(TrainerCallback):
    """Has gradients be NaN from the fourth step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            model.transformer.ln_f.weight.register_hook(lambda gradient: gradient * float("nan"))


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_training_that_cannot_go_on_keeps_what_the_last_good_step_left(tmp_path: Path, strategy: str) -> None:
    settings = {"loss_scale": "1024", "lr_scheduler_type": "constant", "save_strategy": strategy}
    straight = make(tmp_path / "straight", max_steps=3, **settings)
    straight.train()
    settings["loss_scaler_settings"] = {"max_consecutive_skips": 5}
    with pytest.raises(LossScaleError, match="5 optimizer steps in a row") as caught:
        make(tmp_path / "run", callbacks=[Stuck()], explain_overflows=False, max_steps=20, **settings).train()
    last = tmp_path / "run" / "checkpoint-7"
    assert any(str(last) in note for note in caught.value.__notes__)
    assert find_problems(last) == []
    saved = load_file(last / "model.safetensors")
    trained = dict(straight.model.named_parameters())
    assert all(torch.equal(value, trained[name].detach()) for name, value in saved.items())
    # The cause is gone.
    resumed = make(tmp_path / "run", max_steps=10, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10 and resumed.mixed_precision.stats.skipped_steps == 5
