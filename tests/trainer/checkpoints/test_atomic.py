"""Directories that are there whole or not at all, whatever moment a kill chooses."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from kills import Killed, kill_at

from hf_mp.trainer.checkpoints.atomic import publish, recover, staging_folder, sync_tree


def directory(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_text(content)
    return path


def is_whole(path: Path) -> bool:
    return (path / "file").is_file()


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaces"])
@pytest.mark.parametrize("killed_at", range(1, 18))
def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(tmp_path: Path, replaces: bool, killed_at: int) -> None:
    target = tmp_path / "checkpoint-2"
    if replaces:
        directory(target, "old")
    staged = directory(staging_folder(tmp_path) / target.name, "new")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, killed_at)
        with suppress(Killed):
            sync_tree(staged)
            publish(staged, target)
    recover(tmp_path, is_whole)
    assert (target / "file").read_text() in (["old", "new"] if replaces else ["new"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [target.name]


@pytest.mark.parametrize("is_finished", [False, True])
def test_what_was_finished_comes_into_place_and_the_rest_is_cleared(tmp_path: Path, is_finished: bool) -> None:
    staged = staging_folder(tmp_path) / "checkpoint-4"
    directory(staged, "new") if is_finished else staged.mkdir(parents=True)
    expected = [tmp_path / "checkpoint-4"] if is_finished else []
    assert recover(tmp_path, is_whole) == list(tmp_path.iterdir()) == expected
    assert recover(tmp_path / "none", is_whole) == []


@pytest.mark.parametrize("what", ["folder", "entry", "replaced"])
def test_a_link_in_the_place_of_ours_leaves_the_other_directory_alone(tmp_path: Path, what: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    for step in (2, 4):
        directory(other / f"checkpoint-{step}", "theirs")
    folder = staging_folder(run)
    if what == "folder":
        folder.symlink_to(other)
    else:
        folder.mkdir()
        prefix = "replaced-" if what == "replaced" else ""
        (folder / f"{prefix}checkpoint-4").symlink_to(other / "checkpoint-4")
    assert recover(run, is_whole) == []
    assert list(run.iterdir()) == []
    assert sorted(path.name for path in other.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert (other / "checkpoint-4" / "file").read_text() == "theirs"


def test_a_linked_checkpoint_is_unlinked_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    run, other = tmp_path / "run", directory(tmp_path / "other", "theirs")
    run.mkdir()
    (run / "checkpoint-4").symlink_to(other)
    publish(directory(staging_folder(run) / "checkpoint-4", "new"), run / "checkpoint-4")
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]
    assert (run / "checkpoint-4" / "file").read_text() == "new" and (other / "file").read_text() == "theirs"
