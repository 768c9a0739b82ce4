"""The manifest: what it finds, and what it refuses to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    _with_checksum,
    entry_of,
    find_damage,
    finish,
    is_inside,
    read_manifest,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(range(200)))
    (tmp_path / "adapter" / "weights.bin").write_bytes(b"inner")
    (tmp_path / "empty").write_bytes(b"")
    finish(tmp_path, step=7, world_size=2, precision="fp16")
    return tmp_path


def damage(checkpoint: Path) -> list[str]:
    files = read_manifest(checkpoint)
    assert files is not None
    return find_damage(checkpoint, files)


def test_what_is_written_is_read_again(checkpoint: Path) -> None:
    names = ["adapter/weights.bin", "empty", "weights.bin"]
    assert read_manifest(checkpoint) == {name: entry_of(checkpoint / name) for name in names}
    said = json.loads((checkpoint / MANIFEST_NAME).read_text())
    assert (said["step"], said["world_size"], said["precision"]) == (7, 2, "fp16") and "torch" in said["versions"]
    (checkpoint / "notes.txt").write_text("added by a callback, which is no damage")
    assert damage(checkpoint) == []


@pytest.mark.parametrize("name", ["weights.bin", "adapter/weights.bin"])
def test_every_flipped_byte_is_found(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert damage(checkpoint) == [f"{name} is not what was written (its SHA-256 differs)"]


def test_cut_longer_and_missing_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "weights.bin").write_bytes(b"x" * 10)
    (checkpoint / "empty").write_bytes(b"x")
    (checkpoint / "adapter" / "weights.bin").unlink()
    assert damage(checkpoint) == [
        "adapter/weights.bin is missing",
        "empty has 1 bytes, 0 were written",
        "weights.bin has 10 bytes, 200 were written",
    ]


def test_every_byte_of_the_manifest_that_changes_is_found(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_NAME
    content = path.read_bytes()
    flipped = [
        content[:place] + bytes([byte ^ (1, 2, 32, 128)[place % 4]]) + content[place + 1 :]
        for place, byte in enumerate(content)
    ]
    for changed in (*flipped, *(content[:end] for end in range(0, len(content), 5))):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=MANIFEST_NAME):
            read_manifest(checkpoint)


def sign(checkpoint: Path, **changes: Any) -> None:
    """A manifest that somebody changed and gave the right checksum."""
    content = {**json.loads((checkpoint / MANIFEST_NAME).read_text()), **changes}
    del content["manifest_sha256"]
    (checkpoint / MANIFEST_NAME).write_text(_with_checksum(content))


ENTRY = {"size_bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"../outside": ENTRY}}, "'../outside' is not a path inside the checkpoint"),
        ({"files": {"/etc/passwd": ENTRY}}, "'/etc/passwd' is not a path inside"),
        ({"files": {"C:\\x": ENTRY}}, "is not a path inside"),
        ({"files": {"x": {**ENTRY, "more": 1}}}, "it is no manifest .*unexpected keyword argument 'more'"),
        ({"files": {"x": None}}, "it is no manifest"),
        ({"files": ["x"]}, "it is no manifest"),
        ({"format": 2}, "format 2, this version of hf_mp reads format 1"),
    ],
    ids=str,
)
def test_a_manifest_that_somebody_made_up_is_refused(checkpoint: Path, changes: Any, message: str) -> None:
    sign(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(checkpoint)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "", "{}", '"x"'], ids=lambda text: text[:4] or "empty")
def test_what_is_no_manifest_at_all_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        read_manifest(checkpoint)


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None  # there is none
    with (tmp_path / MANIFEST_NAME).open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(CheckpointError, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        read_manifest(tmp_path)


@given(st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_a_path_that_counts_as_inside_stays_inside(name: str) -> None:
    if is_inside(name):
        assert (Path("/base") / name).resolve().is_relative_to("/base") and name not in ("", ".")
