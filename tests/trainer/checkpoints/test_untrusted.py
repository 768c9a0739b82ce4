"""Checkpoints from a stranger: named and refused, and nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trainer_runs import arguments, make_trainer, tiny_gpt2, token_rows

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.inspection import find_problems
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, finish
from hf_mp.trainer.checkpoints.untrusted import find_hazards


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def trainer(folder: Path, contender: str = "subclass", **settings: Any) -> Any:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch", **settings}
    return make_trainer(contender, "fp16", tiny_gpt2(), arguments(folder, **settings), train_dataset=token_rows())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer(folder).train()
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run with checkpoint-2 and checkpoint-4."""
    import shutil

    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def pickled_by_torch(path: Path, touched: Path) -> None:
    torch.save({"state": Touch(touched)}, path)


def pickled(path: Path, touched: Path) -> None:
    path.write_bytes(pickle.dumps(Touch(touched)))


RUNS_CODE, NO_FILE = "holds pickled objects that may run code", "is no whole file of torch.save"
LINK = "is a link that leads out of the checkpoint"


def test_without_a_manifest_nothing_runs_either(run: Path, tmp_path: Path) -> None:
    checkpoint, touched = run / "checkpoint-4", tmp_path / "touched"
    (checkpoint / MANIFEST_NAME).unlink()
    pickled_by_torch(checkpoint / "optimizer.pt", touched)
    pickled(checkpoint / "rng_state.pth", touched)
    first, second = find_problems(checkpoint)
    assert f"optimizer.pt {RUNS_CODE}" in first and second.startswith(f"rng_state.pth {NO_FILE} (Expected input")
    (checkpoint / "rng_state.pth").unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint-4: optimizer.pt {RUNS_CODE}"):
        trainer(tmp_path / "again").train(resume_from_checkpoint=str(checkpoint))
    finish(checkpoint)  # and with one, an automatic resume passes it over
    resumed = trainer(run, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert Path(str(resumed._resumed_from)).name == "checkpoint-2" and not touched.exists()


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_another_models_shapes_are_refused_in_one_sentence(run: Path, tmp_path: Path, contender: str) -> None:
    args = arguments(tmp_path / "again")
    other = make_trainer(contender, "fp16", tiny_gpt2(n_embd=64), args, train_dataset=token_rows())
    message = (
        r"^the model of .*checkpoint-4 does not fit this run: .*size mismatch for \S+: .*, and \d+ more\. Resume with"
    )
    with pytest.raises(CheckpointError, match=message) as found:
        other.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert "\n" not in str(found.value) and str(found.value).count("size mismatch") == 1
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("contender", ["subclass", "callback"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "elsewhere"])
def test_the_best_checkpoint_is_one_beside(run: Path, tmp_path: Path, beside: bool, contender: str) -> None:
    path = run / "checkpoint-4" / "trainer_state.json"
    said = tmp_path / "elsewhere" / ("checkpoint-2" if beside else "checkpoint-99")
    said.mkdir(parents=True)
    path.write_text(json.dumps({**json.loads(path.read_text()), "best_model_checkpoint": str(said)}))
    finish(path.parent)
    resumed = trainer(tmp_path / "again", contender, max_steps=5)
    resumed.train(resume_from_checkpoint=str(path.parent))
    assert resumed.state.best_model_checkpoint == (str(run / "checkpoint-2") if beside else None)


# The sharded state of FSDP


def test_a_shard_outside_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint" / "optimizer_0"
    state = {"weight": torch.ones(4), "lr": 0.1, "betas": (0.9, 0.999)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert find_hazards(folder.parent) == []
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../x"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (problem,) = find_hazards(folder.parent)
    assert "names a shard outside of the checkpoint: '../../x'" in problem


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made by a pickle",)


def test_metadata_of_shards_that_runs_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"planner_data": RunsCode()}))
    (problem,) = find_hazards(tmp_path)
    assert RUNS_CODE in problem and f"{os.name}.mkdir" in problem and not Path("made by a pickle").exists()


def test_a_link_that_leads_to_itself_is_found(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    (problem,) = find_problems(tmp_path)
    assert problem.startswith("model.safetensors cannot be read (")


# The stock Trainer's, without a manifest


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_cut_file_is_found_without_a_manifest(run: Path, name: str) -> None:
    checkpoint = run / "checkpoint-4"
    (checkpoint / MANIFEST_NAME).unlink()
    assert find_problems(checkpoint) == []
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[: len(content) // 2])
    (problem,) = find_problems(checkpoint)
    assert problem.startswith((f"{name} is no whole file", f"{name} is not JSON"))


@pytest.mark.parametrize("unfinished", ["no state", "sentinel"])
def test_an_unfinished_checkpoint_of_transformers_is_passed_over(run: Path, unfinished: str) -> None:
    checkpoint = run / "checkpoint-4"
    (checkpoint / MANIFEST_NAME).unlink()
    if unfinished == "sentinel":
        (checkpoint / "checkpoint-is-incomplete.txt").write_text("Checkpoint started")
    else:
        (checkpoint / "trainer_state.json").unlink()
    assert any(word in find_problems(checkpoint)[0] for word in ("never finished", "written last"))
