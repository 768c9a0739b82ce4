"""Which checkpoint a training resumes from, after a kill, a flipped bit or a wrong name; both adapters alike."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainer_runs import arguments, make_trainer, same, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import hf_mp.trainer.checkpoints.in_place as in_place
from hf_mp import CheckpointError, NoCheckpointError
from hf_mp.trainer.checkpoints import lock, resuming
from hf_mp.trainer.checkpoints.inspection import find_problems, list_checkpoints
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, UNFINISHED_NAME

pytestmark = [
    pytest.mark.usefixtures("without_first_check"),
    pytest.mark.parametrize("contender", ["subclass", "callback"]),
]

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2}

Trained = Callable[..., tuple[list[Tensor], Path]]


class Begun(TrainerCallback):
    """Notes the step from which training goes on."""

    step: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step


def make(folder: Path, contender: str, base: type[Trainer] = Trainer, **settings: Any) -> Any:
    args, model = arguments(folder, **{**SAVING, **settings}), tiny_gpt2(resid_pdrop=0.1)
    trainer = make_trainer(contender, "fp16", model, args, base, train_dataset=token_rows())
    trainer.add_callback(begun := Begun())
    trainer.begun = begun
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of a run that nothing disturbs: its weights, and its folder, which stays as it is. Each is trained once."""

    @functools.cache
    def train(contender: str) -> tuple[list[Tensor], Path]:
        folder = tmp_path_factory.mktemp(contender)
        trainer = make(folder, contender)
        trainer.train()
        return weights(trainer.model), folder

    return train


@pytest.fixture
def run(tmp_path: Path, contender: str, trained: Trained) -> Path:
    """A run with checkpoint-2, checkpoint-4 and checkpoint-6."""
    shutil.copytree(trained(contender)[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    found: list[str] = []
    for module in (in_place, resuming):
        monkeypatch.setattr(module.logger, "warning", found.append)
    return found


def killed_in_the_save(checkpoint: Path) -> None:
    """Leave of a checkpoint what a kill in its save does."""
    (checkpoint / "trainer_state.json").unlink()
    (checkpoint / MANIFEST_NAME).rename(checkpoint / UNFINISHED_NAME)


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


# After a kill in a save


@pytest.mark.parametrize("asked", ["true", "before the Trainer is made", "after"])
def test_resuming_after_a_kill_passes_the_half_written_one_over(
    run: Path, told: list[str], contender: str, asked: str, trained: Trained
) -> None:
    killed_in_the_save(run / "checkpoint-6")
    last: Any = get_last_checkpoint(run)
    trainer = make(run, contender)
    last = {"true": True, "after": get_last_checkpoint(run)}.get(asked, last)
    trainer.train(resume_from_checkpoint=last)
    assert trainer.begun.step == 4 and same(trained(contender)[0], weights(trainer.model))
    assert names(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert "checkpoint-6 was not finished: it is removed" in told[0]
    assert asked == "true" or told[1:] == [
        f"{run / 'checkpoint-6'} was never finished: training goes on from checkpoint-4, the newest whole one there"
    ]


def test_without_an_earlier_one_training_starts_anew(
    run: Path, told: list[str], contender: str, trained: Trained
) -> None:
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoint-{step}")
    killed_in_the_save(run / "checkpoint-2")
    trainer = make(run, contender)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert trainer.begun.step == 0 and same(trained(contender)[0], weights(trainer.model))
    assert told[1].endswith("checkpoint-2 was never finished, and there is no earlier one: training starts anew")


def test_a_damaged_one_before_it_is_passed_over_too_and_alone_is_refused(
    run: Path, told: list[str], contender: str
) -> None:
    killed_in_the_save(run / "checkpoint-6")
    (run / "checkpoint-4" / "optimizer.pt").unlink()
    trainer = make(run, contender)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert trainer.begun.step == 2 and "checkpoint-4: optimizer.pt is missing" in told[1]
    shutil.rmtree(run / "checkpoint-4")
    killed_in_the_save(run / "checkpoint-6")
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-2: optimizer.pt is missing[^$]*Nothing is loaded"):
        make(run, contender).train(resume_from_checkpoint=str(run / "checkpoint-6"))


def test_where_a_save_was_to_replace_one_that_one_is_resumed_from(run: Path, told: list[str], contender: str) -> None:
    checkpoint = run / "checkpoint-6"
    in_place.begin(checkpoint)
    trainer = make(run, contender, max_steps=8)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.begun.step == 6
    assert [line.rpartition(" is ")[2] for line in told] == [
        "removed",
        "put back: the save that would have replaced it was interrupted",
    ]


def test_another_runs_unfinished_one_is_left_there(run: Path, tmp_path: Path, told: list[str], contender: str) -> None:
    killed_in_the_save(run / "checkpoint-6")
    trainer = make(tmp_path / "new", contender)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert trainer.begun.step == 4 and (run / "checkpoint-6").is_dir()
    assert len(told) == 1 and "goes on from checkpoint-4" in told[0]
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    with pytest.raises(NoCheckpointError, match=r"No valid checkpoint found in .*run: there is none yet"):
        make(tmp_path / "again", contender).train(resume_from_checkpoint=str(run / "checkpoint-6"))


def test_what_a_run_that_is_alive_is_writing_stays(
    run: Path, told: list[str], contender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "ORPHAN_SECONDS", 0.1)
    killed_in_the_save(run / "checkpoint-6")
    trainer = make(run, contender, save_strategy="no")
    with lock.lock_directory(run):
        if contender == "subclass":
            with pytest.raises(CheckpointError, match="in use by another run"):
                trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
            return
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert trainer.begun.step == 4 and (run / "checkpoint-6" / UNFINISHED_NAME).exists()
    assert "are left as they are" in told[0] and "goes on from checkpoint-4" in told[1]


# Damage


def test_the_newest_whole_one_is_taken_and_the_others_are_named(
    run: Path, told: list[str], contender: str, trained: Trained
) -> None:
    (run / "checkpoint-6" / "optimizer.pt").unlink()
    path = run / "checkpoint-4" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    trainer = make(run, contender)
    trainer.train(resume_from_checkpoint=True)
    (message,) = told
    assert "resuming from" in message and "checkpoint-2; newer ones were passed over" in message
    assert "checkpoint-6: optimizer.pt is missing" in message
    assert "checkpoint-4: model.safetensors is not what was written" in message
    assert same(trained(contender)[0], weights(trainer.model))
    assert names(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not any(find_problems(path) for path in list_checkpoints(run))  # they are saved anew


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_truncated_file_is_named_before_anything_is_loaded(
    run: Path, contender: str, name: str, has_manifest: bool
) -> None:
    path = run / "checkpoint-6" / name
    path.write_bytes(path.read_bytes()[:500])
    if not has_manifest:
        (path.parent / MANIFEST_NAME).unlink()
    trainer = make(run, contender)
    before = weights(trainer.model)
    found = "has 500 bytes, [0-9]+ were written" if has_manifest else "is no whole file of"
    remove = rf". If you changed a file yourself, remove {MANIFEST_NAME}" if has_manifest else ""
    message = rf"checkpoint-6: {name} {found}[^$]*\(the newest whole .* is checkpoint-4\){remove}$"
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=str(path.parent))
    assert same(before, weights(trainer.model))


def test_loaded_values_that_cannot_be_are_not_trained_on(run: Path, contender: str) -> None:
    checkpoint = run / "checkpoint-6"
    (checkpoint / MANIFEST_NAME).unlink()
    weights_file = load_file(checkpoint / "model.safetensors")
    weights_file["transformer.ln_f.bias"][0] = torch.nan
    save_file(weights_file, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"checkpoint-6: the weight transformer.ln_f.bias holds inf or NaN"):
        make(run, contender).train(resume_from_checkpoint=str(checkpoint))
    (run / "checkpoint-4" / MANIFEST_NAME).unlink()
    state = torch.load(run / "checkpoint-4" / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"][0] = torch.inf
    torch.save(state, run / "checkpoint-4" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-4: the optimizer's exp_avg of .* holds inf or NaN"):
        make(run, contender).train(resume_from_checkpoint=str(run / "checkpoint-4"))


@pytest.mark.parametrize("step", ["006", "٦"])
def test_a_folder_that_only_resembles_a_checkpoint_is_none(run: Path, contender: str, step: str) -> None:
    shutil.rmtree(run / "checkpoint-6")
    shutil.copytree(run / "checkpoint-4", run / f"checkpoint-{step}")
    trainer = make(run, contender)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.begun.step == 4 and trainer.state.global_step == 6
    assert (run / f"checkpoint-{step}").is_dir()


# Names


def test_no_checkpoint_at_all_and_none_that_is_whole(tmp_path: Path, contender: str) -> None:
    with pytest.raises(NoCheckpointError, match=r"No valid checkpoint found in output directory \(.*none yet"):
        make(tmp_path / "new", contender).train(resume_from_checkpoint=True)
    with pytest.raises(TypeError, match=r"not '?int"):
        make(tmp_path / "new", contender).train(resume_from_checkpoint=1)
    make(tmp_path, contender, max_steps=2).train()
    (tmp_path / "checkpoint-2" / MANIFEST_NAME).write_text("{}")
    with pytest.raises(
        CheckpointError, match=rf"checkpoint-2: {MANIFEST_NAME}: its own checksum does not match"
    ) as found:
        make(tmp_path, contender).train(resume_from_checkpoint=True)
    assert not isinstance(found.value, NoCheckpointError)


def test_a_path_that_was_never_there_is_refused_with_the_newest_whole_one(run: Path, contender: str) -> None:
    message = r"^Can't find a valid checkpoint at .*checkpoint-9: .*whole checkpoint in .* is checkpoint-6\)"
    with pytest.raises(CheckpointError, match=message):
        make(run, contender).train(resume_from_checkpoint=str(run / "checkpoint-9"))


def test_an_empty_folder_that_is_no_checkpoint_stays(run: Path, tmp_path: Path, contender: str) -> None:
    (run / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: trainer_state.json is missing"):
        make(run, contender).train(resume_from_checkpoint=str(run / "empty"))
    assert (run / "empty").is_dir()
