"""Which checkpoint a training resumes from, after a kill, a flipped bit or a wrong name; both adapters alike."""

from __future__ import annotations

import functools
import json
import re
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
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import get_last_checkpoint

import hf_mp.trainer.checkpoints.unfinished_marker as unfinished_marker
from hf_mp import CheckpointError, NoCheckpointError
from hf_mp.trainer.checkpoints import inspection, loaded_state, lock, resuming
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


class Loading(Trainer):
    """Notes from which checkpoint it loads the model."""

    loaded: Path | None = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        self.loaded = Path(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)


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
    for module in (unfinished_marker, inspection, resuming):
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
    unfinished_marker.begin(checkpoint)
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


# Removed by another run


def removing(run: Path, method: str, remove: Callable[[Path], Any]) -> type[Trainer]:
    """A Trainer during whose loading, before ``method``, another run removes checkpoint-6."""

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super(Removing, self).training_step(*args, **kwargs)

    def load(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if (run / "checkpoint-6").is_dir():
            remove(run / "checkpoint-6")
        return getattr(super(Removing, self), method)(*args, **kwargs)

    members = {"steps": 0, "training_step": training_step, method: load}
    Removing = type("Removing", (Trainer,), members)
    return Removing


def saved_again(checkpoint: Path) -> None:
    """As another run leaves it that has saved a checkpoint of this step, too."""
    unfinished_marker.remove(checkpoint)
    shutil.copytree(checkpoint.with_name("checkpoint-4"), checkpoint)


def without_state(checkpoint: Path) -> None:
    """As an earlier version of hf_mp, or the stock Trainer, left it when it was killed in a rotation."""
    for name in (MANIFEST_NAME, "optimizer.pt", "scheduler.pt"):
        (checkpoint / name).unlink()


REMOVALS = [unfinished_marker.remove, shutil.rmtree, saved_again, without_state]


@pytest.mark.parametrize("remove", REMOVALS, ids=lambda remove: remove.__name__)
@pytest.mark.parametrize("method", ["_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state"])
def test_one_that_is_removed_while_it_is_loaded_is_not_trained_on(
    run: Path, contender: str, method: str, remove: Callable[[Path], Any]
) -> None:
    trainer = make(run, contender, removing(run, method, remove), max_steps=8)
    message = r"checkpoint-6 was removed or replaced while it was loaded .* is checkpoint-[46]\)$"
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.steps == 0


def test_one_that_is_removed_after_the_first_step_began_is_no_error(run: Path, contender: str) -> None:
    class Late(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            shutil.rmtree(run / "checkpoint-6", ignore_errors=True)
            return super().training_step(*args, **kwargs)

    trainer = make(run, contender, Late, max_steps=7)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 7


@pytest.fixture
def removed_while_examined(monkeypatch: pytest.MonkeyPatch, run: Path) -> list[str]:
    """Another run removes checkpoint-6 when its files are compared, and has saved checkpoint-8 before."""
    find_damage, compared = inspection.find_damage, list[str]()

    def find(checkpoint: Path, files: Any) -> list[str]:
        compared.append(checkpoint.name)
        if compared == ["checkpoint-6"]:
            shutil.copytree(checkpoint, run / "checkpoint-8")
            unfinished_marker.remove(checkpoint)
        return find_damage(checkpoint, files)

    monkeypatch.setattr(inspection, "find_damage", find)
    return compared


@pytest.mark.usefixtures("removed_while_examined")
def test_where_it_is_removed_while_it_is_examined_the_newer_one_is_taken(
    run: Path, told: list[str], contender: str
) -> None:
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    trainer = make(run, contender, Loading)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.loaded == run / "checkpoint-8" and told == []


@pytest.mark.usefixtures("removed_while_examined")
def test_where_a_named_one_is_removed_while_it_is_examined_the_newer_one_is_taken(
    run: Path, told: list[str], contender: str
) -> None:
    trainer = make(run, contender, Loading)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert trainer.loaded == run / "checkpoint-8"
    assert told == [
        f"{run / 'checkpoint-6'} was removed by another run: training goes on from checkpoint-8, the newest whole one "
        "there"
    ]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_the_rest_of_one_that_was_removed_is_passed_over_for_a_whole_one(
    run: Path, told: list[str], contender: str, name: str, trained: Trained
) -> None:
    for file in (MANIFEST_NAME, name):
        (run / "checkpoint-6" / file).unlink()
    why = f"checkpoint-6: it has neither a manifest nor {name}"
    with pytest.raises(CheckpointError, match=rf"{why}, and checkpoint-4 next to it is whole.*on purpose, move"):
        make(run, contender).train(resume_from_checkpoint=str(run / "checkpoint-6"))
    trainer = make(run, contender)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.begun.step == 4 and same(trained(contender)[0], weights(trainer.model))
    assert len(told) == 1 and why in told[0]


def test_without_a_whole_one_beside_it_one_without_state_is_resumed_with_a_warning(
    run: Path, told: list[str], contender: str
) -> None:
    for step in (4, 6):
        without_state(run / f"checkpoint-{step}")
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    for wanted in (True, str(run / "checkpoint-6")):
        trainer = make(run, contender, save_strategy="no", max_steps=7)
        trainer.train(resume_from_checkpoint=wanted)
        assert trainer.begun.step == 6
    lost = "the optimizer's state and the learning rate's schedule start anew"
    assert told == [f"{run / 'checkpoint-6'} has no optimizer.pt, scheduler.pt: {lost}"] * 2


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
    with pytest.raises(CheckpointError, match=r"checkpoint-6: the weight"):
        make(run, contender).train(resume_from_checkpoint=str(checkpoint))
    (run / "checkpoint-4" / MANIFEST_NAME).unlink()
    state = torch.load(run / "checkpoint-4" / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"][0] = torch.inf
    torch.save(state, run / "checkpoint-4" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"checkpoint-4: the optimizer's exp_avg of .* holds inf or NaN"):
        make(run, contender).train(resume_from_checkpoint=str(run / "checkpoint-4"))


def in_groups(**settings: Any) -> Callable[[Any], Any]:
    return lambda state: [group.update(settings) for group in state["param_groups"]]


def in_entry(**entries: Any) -> Callable[[Any], Any]:
    return lambda state: state["state"][0].update(entries)


def of_moment(name: str, change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    return lambda state: state["state"][0].update({name: change(state["state"][0][name])})


OPTIMIZER, SCHEDULER, RANDOM, TRAINER = "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"
# File, what is changed in it, and what the error says.
RUINOUS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "eps NaN": (OPTIMIZER, in_groups(eps=torch.nan), "the optimizer's eps is nan"),
    "weight decay NaN": (OPTIMIZER, in_groups(weight_decay=torch.nan), "the optimizer's weight_decay is nan"),
    "weight decay below 0": (OPTIMIZER, in_groups(weight_decay=-0.1), "weight_decay is -0.1, and must not be neg"),
    "rate inf": (OPTIMIZER, in_groups(lr=torch.inf), "the optimizer's lr is inf"),
    "rate a word": (OPTIMIZER, in_groups(lr="fast"), "the optimizer's lr is 'fast', not a number"),
    "rate None": (OPTIMIZER, in_groups(lr=None), "the optimizer's lr is None, not a number"),
    "initial rate NaN": (OPTIMIZER, in_groups(initial_lr=torch.nan), "the optimizer's initial_lr is nan"),
    "betas of 1": (OPTIMIZER, in_groups(betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\), and must be below 1"),
    "one beta": (OPTIMIZER, in_groups(betas=(0.9,)), "the optimizer's betas has 1 numbers, not 2"),
    "betas a number": (OPTIMIZER, in_groups(betas=0.9), "the optimizer's betas is 0.9, not numbers"),
    "amsgrad a word": (OPTIMIZER, in_groups(amsgrad="no"), "amsgrad is 'no', neither True nor False"),
    "no eps": (OPTIMIZER, lambda state: state["param_groups"][0].pop("eps"), "the optimizer's eps is missing"),
    "no groups": (OPTIMIZER, lambda state: state.pop("param_groups"), "the optimizer or the scheduler .* not fit"),
    "groups of another": (OPTIMIZER, lambda state: state["param_groups"].pop(), "does not fit this run: .*group"),
    "state a list": (OPTIMIZER, lambda state: state.update(state=[1]), "the optimizer or the scheduler .* not fit"),
    "negative squares": (OPTIMIZER, of_moment("exp_avg_sq", lambda t: t - 1), "exp_avg_sq of .* is negative"),
    "integer moments": (OPTIMIZER, of_moment("exp_avg", Tensor.int), "exp_avg holds torch.int32"),
    "moments a list": (OPTIMIZER, of_moment("exp_avg", Tensor.tolist), "the optimizer's exp_avg is .*, not a tensor"),
    "a moment less": (OPTIMIZER, lambda state: state["state"][0].pop("exp_avg_sq"), "has no exp_avg_sq in the opt"),
    "step -1": (OPTIMIZER, in_entry(step=torch.tensor(-1.0)), "the optimizer's step of .* is negative"),
    "step inf": (OPTIMIZER, in_entry(step=torch.tensor(torch.inf)), "the optimizer's step of .* holds inf or NaN"),
    "step a word": (OPTIMIZER, in_entry(step="first"), "the optimizer's step is 'first', not a number"),
    "steps": (OPTIMIZER, in_entry(step=torch.ones(2)), "the optimizer's step is tensor.*, not a number"),
    "base rate inf": (SCHEDULER, lambda state: state.update(base_lrs=[torch.inf, 1.0]), "the scheduler's base_lrs is"),
    "base rate a word": (SCHEDULER, lambda state: state.update(base_lrs=["a", "b"]), "base_lrs is .*, not numbers"),
    "no base rates": (SCHEDULER, lambda state: state.update(base_lrs=[]), "base_lrs has 0 numbers, not 2"),
    "base rates a number": (SCHEDULER, lambda state: state.update(base_lrs=1e-2), "base_lrs is 0.01, not numbers"),
    "epoch below 0": (SCHEDULER, lambda state: state.update(last_epoch=-1), "last_epoch is -1, and must not be neg"),
    "epoch a word": (SCHEDULER, lambda state: state.update(last_epoch="1"), "last_epoch is '1', not a number"),
    "another schedule": (SCHEDULER, lambda state: state.pop("lr_lambdas"), "the optimizer or the scheduler .* not fit"),
    "no generator": (RANDOM, lambda state: state.pop("python"), "the state of the random numbers of .* not fit"),
    "generator a list": (RANDOM, lambda state: state.update(cpu=[1]), "the state of the random numbers of .* not fit"),
    "global step below 0": (TRAINER, lambda state: state.update(global_step=-1), "has -1 as global_step, not a num"),
    "global step a word": (TRAINER, lambda state: state.update(global_step="6"), "has '6' as global_step, not a"),
    "no global step": (TRAINER, lambda state: state.pop("global_step"), "has None as global_step, not a number"),
    "no list of entries": (TRAINER, lambda state: state.update(log_history=[1]), r"has \[1\] as log_history, not a l"),
    "best a number": (
        TRAINER,
        lambda state: state.update(best_model_checkpoint=6),
        "best_model_checkpoint, not a path",
    ),
    "flos NaN": (TRAINER, lambda state: state.update(total_flos=torch.nan), "total_flos, not a finite number"),
    "an entry more": (TRAINER, lambda state: state.update(more=1), "has entries that this version .* not know: more"),
    "callbacks a list": (TRAINER, lambda state: state.update(stateful_callbacks=[1]), "not the state of each callback"),
    "callback of another": (
        TRAINER,
        lambda state: state.update(stateful_callbacks={"TrainerControl": {"args": {"x": 1}, "attributes": {}}}),
        "the state of the callbacks of .* does not fit this run: .*unexpected keyword",
    ),
}


def change(path: Path, how: Callable[[Any], Any]) -> None:
    """Change a file of a checkpoint, which then is the stock Trainer's: without a manifest."""
    (path.parent / MANIFEST_NAME).unlink()
    if path.suffix == ".json":
        state = json.loads(path.read_text())
        how(state)
        path.write_text(json.dumps(state))
        return
    with safe_globals():
        state = torch.load(path, weights_only=True)
    how(state)
    torch.save(state, path)


@pytest.mark.parametrize("what", RUINOUS)
def test_values_that_would_ruin_the_run_are_refused_in_one_sentence(run: Path, contender: str, what: str) -> None:
    file, how, message = RUINOUS[what]
    change(run / "checkpoint-6" / file, how)
    settings = {"restore_callback_states_from_checkpoint": True} if "callback" in what else {}
    trainer = make(run, contender, max_steps=8, **settings)
    with pytest.raises(CheckpointError, match=message) as found:
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert "checkpoint-6" in str(found.value) and len(str(found.value)) < 700


def test_a_parameter_without_any_state_is_told(run: Path, contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a model that had no gradient yet has none: to refuse it would be to refuse our own checkpoints."""
    messages: list[str] = []
    monkeypatch.setattr(loaded_state.logger, "warning", messages.append)
    change(run / "checkpoint-6" / OPTIMIZER, lambda state: state["state"].pop(0))
    make(run, contender, max_steps=7).train(resume_from_checkpoint=str(run / "checkpoint-6"))
    (message,) = messages
    assert re.search(r"checkpoint-6 has no state of the optimizer for 1 of \d+ parameters, one of shape \(", message)


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
