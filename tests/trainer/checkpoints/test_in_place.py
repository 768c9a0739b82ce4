"""Checkpoints that a stock Trainer writes in place: whole, or seen to be half-written, whenever a kill comes."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import arguments, make_trainer, same, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainerControl, TrainerState

import hf_mp.trainer.checkpoints.in_place as in_place
import hf_mp.trainer.checkpoints.inspection as inspection
from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.in_place import InPlaceSaves, clear_up
from hf_mp.trainer.checkpoints.inspection import find_problems
from hf_mp.trainer.checkpoints.lock import DirectoryLock
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, UNFINISHED_NAME, finish, read_manifest

pytestmark = pytest.mark.usefixtures("without_first_check")

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2}


def make(folder: Path, contender: str = "callback", **settings: Any) -> Any:
    named = {name: settings.pop(name) for name in ("callbacks", "eval_dataset", "base") if name in settings}
    args = arguments(folder, **{**SAVING, **settings})
    return make_trainer(contender, "fp16", tiny_gpt2(resid_pdrop=0.1), args, train_dataset=token_rows(), **named)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    found: list[str] = []
    for module in (in_place, inspection):
        monkeypatch.setattr(module.logger, "warning", found.append)
    return found


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# One save, killed at each of its calls to the system


class Killed(BaseException):
    pass


def run_arguments(folder: Path, **settings: Any) -> Any:
    values = {"output_dir": str(folder), "should_save": True, "world_size": 1, "save_strategy": "steps", **settings}
    return SimpleNamespace(**values)


def write(checkpoint: Path, content: str) -> None:
    """As the stock Trainer: file after file, the state of the Trainer last."""
    checkpoint.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "trainer_state.json"):
        text = json.dumps({"global_step": 4} if name == "trainer_state.json" else {"content": content})
        with open(os.open(checkpoint / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            file.write(text)


def save(folder: Path, content: str) -> None:
    """A save of step 4, with the calls that a Trainer makes."""
    saves, state, control = InPlaceSaves(), TrainerState(global_step=4), TrainerControl(should_save=True)
    args = run_arguments(folder)
    saves.on_step_end(args, state, control)
    write(folder / "checkpoint-4", content)
    finish(folder / "checkpoint-4", step=4, world_size=1, precision="fp16")
    saves.on_save(args, state, control)


def kill_at(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Have the call ``number`` to the system not return, and none after it be made."""
    calls: list[str] = []

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) >= number:
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in ("rename", "fsync", "rmdir", "unlink", "mkdir", "open"):
        patch.setattr(os, name, counted(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaces"])
@pytest.mark.usefixtures("told")
def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(tmp_path: Path, replaces: bool) -> None:
    number, found = 0, set()
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        if replaces:
            write(folder / "checkpoint-4", "old")
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            calls = kill_at(patch, number)
            save(folder, "new")
        for _, lock in in_place._announced.values():  # a killed process holds no lock
            lock._lock.release(force=True)
        in_place._announced.clear()
        clear_up(run_arguments(folder))
        left = [name for name in entries(folder) if not name.startswith(".hf_mp.lock")]
        assert left == ["checkpoint-4"] or (left == [] and not replaces), (number, calls)
        if left:
            assert find_problems(folder / "checkpoint-4") == []
            assert not (folder / "checkpoint-4" / UNFINISHED_NAME).exists()
            texts = [(folder / "checkpoint-4" / name).read_text() for name in ("config.json", "tokenizer.json")]
            content = {json.loads(text)["content"] for text in texts}
            assert len(content) == 1, number
            found |= content
        if len(calls) < number:
            break
    assert number > 20 and found == ({"old", "new"} if replaces else {"new"})


def test_a_save_that_was_announced_and_did_not_come(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-4", "old")
    saves, state, control = InPlaceSaves(), TrainerState(global_step=4), TrainerControl(should_save=True)
    saves.on_step_end(run_arguments(tmp_path), state, control)
    assert entries(tmp_path / "checkpoint-4") == [UNFINISHED_NAME]
    saves.on_step_begin(run_arguments(tmp_path), state, control)
    assert entries(tmp_path) == ["checkpoint-4"] and find_problems(tmp_path / "checkpoint-4") == []


def test_one_process_announces_and_the_others_wait_for_it_to_clear_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, state, control = InPlaceSaves(), TrainerState(global_step=4), TrainerControl(should_save=True)
    saves.on_step_end(run_arguments(tmp_path, should_save=False), state, control)
    assert entries(tmp_path) == []
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / UNFINISHED_NAME).write_text("{}")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            clear_up(run_arguments(tmp_path))

    monkeypatch.setattr(in_place.time, "sleep", sleep)
    clear_up(run_arguments(tmp_path, should_save=False))
    assert len(slept) == 3 and entries(tmp_path) == []


def test_random_numbers_of_a_process_that_was_killed_before_it_wrote_them(tmp_path: Path, told: list[str]) -> None:
    write(tmp_path / "checkpoint-4", "new")
    (tmp_path / "checkpoint-4" / UNFINISHED_NAME).write_text('{"world_size": 2}')
    torch.save({}, tmp_path / "checkpoint-4" / "rng_state_0.pth")
    clear_up(run_arguments(tmp_path))
    assert entries(tmp_path) == [] and "it has 1 of 2 rng_state files" in told[0]


def test_what_another_run_is_writing_stays(tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / UNFINISHED_NAME).write_text("{}")
    with DirectoryLock(tmp_path):
        clear_up(run_arguments(tmp_path))
    assert "are left as they are" in told[0] and "in use by another run" in told[0]
    assert (tmp_path / "checkpoint-4" / UNFINISHED_NAME).exists()


def test_a_directory_without_a_mark_is_not_ours_to_remove(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-4", "old")
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    clear_up(run_arguments(tmp_path))
    assert entries(tmp_path / "checkpoint-4") == ["config.json", "tokenizer.json"]


# In a Trainer


def test_a_checkpoint_is_marked_from_its_first_file_to_its_last(tmp_path: Path) -> None:
    seen = []

    class Look(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            checkpoint = tmp_path / f"checkpoint-{self.state.global_step}"
            seen.append((checkpoint / UNFINISHED_NAME).is_file())
            super()._save_checkpoint(*args, **kwargs)
            seen.append((checkpoint / UNFINISHED_NAME).is_file())
            assert find_problems(checkpoint) == [f"{UNFINISHED_NAME} is there: it was never finished"]

    trainer = make(tmp_path, base=Look)
    trainer.train()
    assert seen == [True] * 6
    assert entries(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for path in tmp_path.iterdir():
        manifest = read_manifest(path)
        assert manifest is not None and UNFINISHED_NAME not in manifest.files and find_problems(path) == []
        assert not (path / UNFINISHED_NAME).exists()
    assert not any(isinstance(callback, InPlaceSaves) for callback in trainer.callback_handler.callbacks)


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_other_strategies_are_announced_too(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    real = in_place._begin
    monkeypatch.setattr(in_place, "_begin", lambda path, size: begun.append(path.name) or real(path, size))
    best = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "greater_is_better": False}
    settings = best if strategy == "best" else {}
    make(tmp_path, save_strategy=strategy, eval_dataset=token_rows(4), **settings).train()
    expected = ["checkpoint-3", "checkpoint-6"] if strategy == "best" else ["checkpoint-6"]
    assert begun == expected
    assert entries(tmp_path) == expected  # the loss falls, so both are the best when they are saved


def test_resuming_after_a_kill_passes_the_half_written_one_over(tmp_path: Path, told: list[str]) -> None:
    straight = make(tmp_path)
    straight.train()
    half = tmp_path / "checkpoint-6"
    (half / "trainer_state.json").unlink()
    (half / MANIFEST_NAME).unlink()
    (half / UNFINISHED_NAME).write_text('{"world_size": 1}')
    resumed = make(tmp_path)
    assert "checkpoint-6 is half-written by a run that was killed (trainer_state.json is missing" in told[0]
    assert told[1] == f"the newest whole checkpoint in {tmp_path} is checkpoint-4"
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(straight.model), weights(resumed.model))
    assert entries(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_run_that_is_resumed_at_its_end_changes_no_weight(tmp_path: Path, told: list[str]) -> None:
    straight = make(tmp_path)
    straight.train()
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert "training is at its end, step 6" in told[0]
    assert same(weights(straight.model), weights(resumed.model))


def test_a_save_that_raises_leaves_nothing_that_a_new_trainer_does_not_clear(tmp_path: Path, told: list[str]) -> None:
    class Full(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super()._save_optimizer_and_scheduler(output_dir)

    trainer = make(tmp_path, base=Full)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert (tmp_path / "checkpoint-4" / UNFINISHED_NAME).is_file()
    resumed = make(tmp_path)  # while the first one is still there
    assert entries(tmp_path) == ["checkpoint-2"]
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_saves_under_another_name_leave_no_empty_directory(tmp_path: Path) -> None:
    class Elsewhere(Trainer):
        def _get_output_dir(self, trial: Any) -> str:
            return str(tmp_path / "elsewhere")

    make(tmp_path / "run", base=Elsewhere).train()
    assert entries(tmp_path / "run") == []
    assert entries(tmp_path / "elsewhere") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_damaged_checkpoint_is_refused_with_the_newest_whole_one(tmp_path: Path) -> None:
    make(tmp_path).train()
    (tmp_path / "checkpoint-6" / "model.safetensors").write_bytes(
        (tmp_path / "checkpoint-6" / "model.safetensors").read_bytes()[:-1] + b"\0"
    )
    message = r"checkpoint-6 is damaged.*model\.safetensors.*newest whole checkpoint in .* is checkpoint-4"
    with pytest.raises(CheckpointError, match=message):
        make(tmp_path, max_steps=8).train(resume_from_checkpoint=True)


# What is missing


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder, not to be changed, of a run of a contender that ended after 4 steps."""

    @functools.cache
    def train(contender: str) -> Path:
        folder = tmp_path_factory.mktemp(contender)
        make(folder, contender, max_steps=4).train()
        return folder

    return train


@pytest.mark.parametrize("contender", ["subclass", "callback"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.pt", r"no optimizer.pt: the optimizer's state \(Adam's moments\) and the learning rate's schedule"),
        ("scheduler.pt", r"no scheduler.pt: the optimizer's state \(Adam's moments\) and the learning rate's schedule"),
        ("rng_state.pth", "no rng_state.pth: random numbers start anew"),
    ],
)
def test_what_a_checkpoint_lacks_is_told(
    tmp_path: Path, told: list[str], contender: str, name: str, message: str, half_trained: Callable[[str], Path]
) -> None:
    shutil.copytree(half_trained(contender), tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).unlink()
    (tmp_path / "checkpoint-4" / name).unlink()
    make(tmp_path, contender).train(resume_from_checkpoint=True)
    assert len(told) == 1 and re.search(message, told[0])


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_nothing_is_told_of_a_whole_one(
    tmp_path: Path, told: list[str], contender: str, half_trained: Callable[[str], Path]
) -> None:
    shutil.copytree(half_trained(contender), tmp_path, dirs_exist_ok=True)
    make(tmp_path, contender).train(resume_from_checkpoint=True)
    assert told == []


def test_a_weights_only_checkpoint_is_told(tmp_path: Path, told: list[str]) -> None:
    make(tmp_path, "subclass", max_steps=4, save_only_model=True).train()
    make(tmp_path, "subclass").train(resume_from_checkpoint=True)
    assert "has no optimizer.pt, scheduler.pt, rng_state.pth" in told[0]
