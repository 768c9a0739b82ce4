"""Checkpoints that are written in place: whole, or seen to be half-written, whenever a kill comes."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from huggingface_hub.utils import filter_repo_objects
from kills import Killed, kill_at
from trainer_runs import arguments, make_trainer, same, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainerCallback

import hf_mp.trainer.checkpoints.inspection as inspection
import hf_mp.trainer.checkpoints.unfinished_marker as unfinished_marker
from hf_mp.trainer.checkpoints import lock, resuming
from hf_mp.trainer.checkpoints.inspection import find_problems
from hf_mp.trainer.checkpoints.lock import lock_directory
from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    CheckpointError,
    finish,
    read_manifest,
)
from hf_mp.trainer.checkpoints.resuming import remove_unfinished
from hf_mp.trainer.checkpoints.unfinished_marker import abort_save, begin, complete

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
    for module in (unfinished_marker, inspection, resuming):
        monkeypatch.setattr(module.logger, "warning", found.append)
    return found


NEVER_FINISHED = f"{UNFINISHED_NAME} is there: it was never finished"


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# One save, killed at each of its calls to the system


def write(checkpoint: Path, content: str) -> None:
    """As the stock Trainer: file after file, the state of the Trainer last."""
    checkpoint.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "trainer_state.json"):
        text = json.dumps({"global_step": 4} if name == "trainer_state.json" else {"content": content})
        with open(os.open(checkpoint / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            file.write(text)


def save(folder: Path, content: str) -> None:
    """A save of step 4, with the calls that a Trainer makes."""
    checkpoint = folder / "checkpoint-4"
    begin(checkpoint)
    write(checkpoint, content)
    complete(checkpoint, step=4, world_size=1, precision="fp16")


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
        remove_unfinished(folder)
        left = entries(folder)
        assert left == ["checkpoint-4"] or (left == [] and not replaces), (number, calls)
        if left:
            assert find_problems(folder / "checkpoint-4") == []
            texts = [(folder / "checkpoint-4" / name).read_text() for name in ("config.json", "tokenizer.json")]
            content = {json.loads(text)["content"] for text in texts}
            assert len(content) == 1, number
            found |= content
        if len(calls) < number:
            break
    assert number > 20 and found == ({"old", "new"} if replaces else {"new"})


def test_every_file_is_on_disk_before_the_mark_becomes_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[int] = []
    fsync, replace = os.fsync, os.replace

    def note(descriptor: int) -> None:
        fsync(descriptor)
        on_disk.append(os.fstat(descriptor).st_ino)

    def look(source: Path, target: Path) -> None:
        assert target.name == MANIFEST_NAME
        assert {path.stat().st_ino for path in (target.parent, *target.parent.iterdir())} <= set(on_disk)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", look)
    save(tmp_path, "new")
    assert on_disk[-2:] == [(tmp_path / "checkpoint-4").stat().st_ino, tmp_path.stat().st_ino]  # the names, too


def test_a_save_that_fails_puts_back_what_it_was_to_replace(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-4", "old")
    abort_save(tmp_path / "checkpoint-4")  # of a save that could not begin
    assert "old" in (tmp_path / "checkpoint-4" / "config.json").read_text()
    begin(tmp_path / "checkpoint-4")
    assert entries(tmp_path / "checkpoint-4") == [UNFINISHED_NAME]
    assert find_problems(tmp_path / "checkpoint-4") == [NEVER_FINISHED]
    (tmp_path / "checkpoint-4" / "config.json").write_text("{}")
    abort_save(tmp_path / "checkpoint-4")
    assert entries(tmp_path) == ["checkpoint-4"] and find_problems(tmp_path / "checkpoint-4") == []
    assert "old" in (tmp_path / "checkpoint-4" / "config.json").read_text()


def _fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_a_failing_disk_keeps_stays_marked_until_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "config.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _fail)
        abort_save(tmp_path / "checkpoint-4")
    assert find_problems(tmp_path / "checkpoint-4")
    save(tmp_path, "new")
    assert entries(tmp_path) == ["checkpoint-4"] and find_problems(tmp_path / "checkpoint-4") == []


def test_what_another_run_is_writing_stays(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "ORPHAN_SECONDS", 0.1)
    begin(tmp_path / "checkpoint-4")
    with lock_directory(tmp_path):
        remove_unfinished(tmp_path)
    assert "are left as they are" in told[0] and "in use by another run" in told[0]
    assert entries(tmp_path / "checkpoint-4") == [UNFINISHED_NAME]


@pytest.mark.usefixtures("told")
def test_an_empty_directory_of_a_kill_before_its_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    remove_unfinished(tmp_path)
    assert entries(tmp_path) == []


def test_a_directory_without_a_mark_is_not_ours_to_remove(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-4", "old")
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    remove_unfinished(tmp_path)
    assert entries(tmp_path / "checkpoint-4") == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("what", ["folder", "entry", "checkpoint"])
@pytest.mark.usefixtures("told")
def test_a_link_in_the_place_of_ours_leaves_the_other_directory_alone(tmp_path: Path, what: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    for name in ("checkpoint-2", "checkpoint-4"):
        write(other / name, "theirs")
    staging = run / unfinished_marker.STAGING_FOLDER
    if what == "folder":
        staging.symlink_to(other)
    elif what == "entry":
        staging.mkdir()
        (staging / "checkpoint-4").symlink_to(other / "checkpoint-4")
    else:
        (run / "checkpoint-4").symlink_to(other / "checkpoint-4")
    if what != "checkpoint":
        unfinished_marker.remove_unfinished(run)
        assert entries(run) == []
    save(run, "ours")
    assert entries(run) == ["checkpoint-4"] and not (run / "checkpoint-4").is_symlink()
    assert entries(other) == ["checkpoint-2", "checkpoint-4"]
    assert "theirs" in (other / "checkpoint-4" / "config.json").read_text()


@pytest.mark.usefixtures("told")
def test_a_finished_checkpoint_that_is_unsafe_to_load_is_put_back_after_a_kill(tmp_path: Path) -> None:
    aside = unfinished_marker.backup_path(tmp_path / "checkpoint-5")
    aside.mkdir(parents=True)
    torch.save({"state": Path("of no class that a checkpoint may hold unasked")}, aside / "optimizer.pt")
    finish(aside, step=5)
    assert find_problems(aside)
    unfinished_marker.remove_unfinished(tmp_path)
    assert entries(tmp_path) == ["checkpoint-5"]


@pytest.mark.usefixtures("told")
def test_a_loops_checkpoint_that_was_set_aside_is_put_back(tmp_path: Path) -> None:
    aside = unfinished_marker.backup_path(tmp_path / "last")
    aside.mkdir(parents=True)
    finish(aside, step=5)
    unfinished_marker.remove_unfinished(tmp_path)
    assert entries(tmp_path) == ["last"]


# Removal


@pytest.mark.parametrize("has_manifest", [True, False], ids=["ours", "stock"])
@pytest.mark.usefixtures("told")
def test_a_kill_at_any_call_of_a_removal_leaves_a_whole_one_or_a_marked_one(tmp_path: Path, has_manifest: bool) -> None:
    number, found = 0, set()
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "checkpoint-4", "old")
        if has_manifest:
            finish(folder / "checkpoint-4")
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            calls = kill_at(patch, number)
            patch.setattr(os, "replace", counting(calls, number, os.replace))
            unfinished_marker.remove(folder / "checkpoint-4")
        if (folder / "checkpoint-4").exists() and find_problems(folder / "checkpoint-4"):
            assert unfinished_marker.is_unfinished(folder / "checkpoint-4"), (number, calls)
            found.add("marked")
        elif (folder / "checkpoint-4").exists():
            assert len(entries(folder / "checkpoint-4")) == 3 + has_manifest
            found.add("whole")
        remove_unfinished(folder)
        assert entries(folder) == (["checkpoint-4"] if number == 1 else []), (number, calls)
        if len(calls) < number:
            break
    assert number > 5 and found == {"marked", "whole"}


def counting(calls: list[str], number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(real.__name__)
        if len(calls) >= number:
            raise Killed
        return real(*args)

    return call


@pytest.mark.usefixtures("told")
def test_a_rotation_keeps_the_newest_and_the_best_and_other_programs_folders(tmp_path: Path) -> None:
    for age, step in enumerate((8, 2, 4, 6), 1):  # an earlier run has left the first
        write(tmp_path / f"checkpoint-{step}", "old")
        os.utime(tmp_path / f"checkpoint-{step}", (age * 100, age * 100))
    write(tmp_path / "checkpoint-best", "copied by hand")
    (tmp_path / "checkpoint-10").symlink_to(tmp_path / "checkpoint-2")
    unfinished_marker.rotate(tmp_path, None, None)
    unfinished_marker.rotate(tmp_path, 0, None)
    assert len(entries(tmp_path)) == 6
    unfinished_marker.rotate(tmp_path, 3, str(tmp_path / "elsewhere" / ".." / "checkpoint-2"))  # spelled otherwise
    left = ["checkpoint-10", "checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-best"]
    assert entries(tmp_path) == left  # a link stays, and counts as little as the folder by hand


def test_a_rotation_that_the_disk_stops_leaves_a_mark_and_the_next_one_goes_on(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 6):
        write(tmp_path / f"checkpoint-{step}", "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _fail)
        unfinished_marker.rotate(tmp_path, 2, None)
    assert told == [f"older checkpoints in {tmp_path} could not be removed, and stay ([Errno 5] Input/output error)"]
    assert find_problems(tmp_path / "checkpoint-2") == [NEVER_FINISHED]
    unfinished_marker.rotate(tmp_path, 2, None)
    assert entries(tmp_path) == ["checkpoint-4", "checkpoint-6"]


# In a Trainer


@pytest.mark.parametrize("contender", ["callback", "subclass"])
@pytest.mark.parametrize("strategy", ["steps", "epoch", "best"])
def test_a_checkpoint_is_marked_from_its_first_file_to_its_last(tmp_path: Path, contender: str, strategy: str) -> None:
    class Look(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            checkpoint = tmp_path / f"checkpoint-{self.state.global_step}"
            assert entries(checkpoint) == [UNFINISHED_NAME]
            super()._save_checkpoint(*args, **kwargs)
            assert find_problems(checkpoint) == [NEVER_FINISHED]
            seen.append(checkpoint.name)

    seen: list[str] = []
    best = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "greater_is_better": False}
    settings = best if strategy == "best" else {}
    trainer = make(tmp_path, contender, base=Look, save_strategy=strategy, eval_dataset=token_rows(4), **settings)
    trainer.train()
    # The loss falls, so both are the best when they are saved.
    steps = {"steps": (2, 4, 6), "epoch": (6,), "best": (3, 6)}[strategy]
    assert entries(tmp_path) == seen == [f"checkpoint-{step}" for step in steps]
    for path in tmp_path.iterdir():
        assert read_manifest(path) is not None and find_problems(path) == []


@pytest.mark.parametrize("contender", ["callback", "subclass"])
def test_a_run_that_is_resumed_at_its_end_takes_no_step(tmp_path: Path, contender: str) -> None:
    straight = make(tmp_path, contender)
    straight.train()
    resumed = make(tmp_path, contender)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert same(weights(straight.model), weights(resumed.model))


@pytest.mark.parametrize("contender", ["callback", "subclass"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
def test_a_save_that_raises_leaves_nothing(tmp_path: Path, contender: str, error: BaseException) -> None:
    class Failing(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise error
            super()._save_optimizer_and_scheduler(output_dir)

    trainer = make(tmp_path, contender, base=Failing, save_total_limit=1, max_steps=4)
    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
        trainer.train()
    assert entries(tmp_path) == ["checkpoint-2"]
    resumed = make(tmp_path, contender)  # while the first one is still there
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_saves_in_another_directory_are_whole_too(tmp_path: Path) -> None:
    class Elsewhere(Trainer):
        def _get_output_dir(self, trial: Any) -> str:
            return str(tmp_path / "elsewhere")

    make(tmp_path / "run", base=Elsewhere).train()
    assert entries(tmp_path / "run") == []
    assert entries(tmp_path / "elsewhere") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all(read_manifest(path) is not None for path in (tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("contender", ["callback", "subclass"])
def test_a_push_has_nothing_that_goes_away_again_and_leaves_the_checkpoint_where_it_fails(
    tmp_path: Path, contender: str
) -> None:
    class Pushing(Trainer):
        def init_hf_repo(self, token: str | None = None) -> None:
            pass

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            # As the stock Trainer: the checkpoint, and the directory of the run without some names.
            pushed.append(set(entries(Path(checkpoint_folder))))
            beside.extend(filter_repo_objects(entries(tmp_path), ignore_patterns=["_*", "checkpoint-*"]))
            if self.state.global_step == 4:
                raise OSError("the hub is not to be reached")

    pushed: list[set[str]] = []
    beside: list[str] = []
    write(tmp_path / "checkpoint-2", "old")
    settings = {"push_to_hub": True, "hub_strategy": "checkpoint", "save_total_limit": 1}
    with pytest.raises(OSError, match="not to be reached"):
        make(tmp_path, contender, base=Pushing, **settings).train()
    assert pushed[0] == pushed[1] <= set(entries(tmp_path / "checkpoint-4")) and beside == []


@pytest.mark.parametrize("contender", ["callback", "subclass"])
@pytest.mark.parametrize("best", [False, True], ids=["limit", "best"])
def test_what_a_trainer_removes_is_marked_and_the_directory_locked(
    tmp_path: Path, contender: str, best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    rmtree = shutil.rmtree

    def look(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).parent == tmp_path and Path(path).name.startswith("checkpoint-"):
            assert entries(path) in ([UNFINISHED_NAME], [])
            with pytest.raises(Timeout):
                FileLock(tmp_path / lock.LOCK_NAME).acquire(timeout=0)
            removed.append(Path(path).name)
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", look)
    settings: dict[str, Any] = {"save_total_limit": 1, "max_steps": 8}
    if best:
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        settings |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = make(tmp_path, contender, eval_dataset=token_rows(4), **settings)
    trainer.train()
    kept = Path(trainer.state.best_model_checkpoint).name if best else "checkpoint-8"
    assert sorted(removed) == [f"checkpoint-{step}" for step in (2, 4, 6, 8) if kept != f"checkpoint-{step}"]
    assert entries(tmp_path) == [kept] and trainer.args.save_total_limit == 1


@pytest.mark.parametrize("contender", ["callback", "subclass"])
def test_a_best_checkpoint_that_is_gone_is_an_error(tmp_path: Path, contender: str) -> None:
    class Remove(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                shutil.rmtree(state.best_model_checkpoint)

    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = make(tmp_path, contender, callbacks=[Remove()], eval_dataset=token_rows(4), **best)
    with pytest.raises(CheckpointError, match=r"checkpoint-., the best checkpoint"):
        trainer.train()


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


TRAINING = "the optimizer's state and the learning rate's schedule"


@pytest.mark.parametrize("contender", ["subclass", "callback"])
@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        (["optimizer.pt"], TRAINING),
        (["scheduler.pt"], TRAINING),
        (["rng_state.pth"], "random numbers"),
        (["optimizer.pt", "scheduler.pt", "rng_state.pth"], f"{TRAINING} and random numbers"),
        ([], None),
    ],
)
def test_what_a_checkpoint_lacks_is_told(
    tmp_path: Path,
    told: list[str],
    contender: str,
    missing: list[str],
    lost: str | None,
    half_trained: Callable[[str], Path],
) -> None:
    shutil.copytree(half_trained(contender), tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoint-2")
    for name in [MANIFEST_NAME, *missing]:
        (tmp_path / "checkpoint-4" / name).unlink()
    make(tmp_path, contender).train(resume_from_checkpoint=True)
    checkpoint = tmp_path / "checkpoint-4"
    assert told == ([] if lost is None else [f"{checkpoint} has no {', '.join(missing)}: {lost} start anew"])
