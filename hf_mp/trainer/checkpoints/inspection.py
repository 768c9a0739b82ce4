"""Examine checkpoints, and find the newest one that is complete and safe to load."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    CheckpointError,
    FileEntry,
    NoCheckpointError,
    files_by_name,
    find_damage,
    read_manifest,
)
from hf_mp.trainer.checkpoints.untrusted import find_hazards, find_out_of_place

logger = logging.get_logger(__name__)

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]{{0,17}})")  # \d would match non-ASCII digits
_MARKERS = (UNFINISHED_NAME, "checkpoint-is-incomplete.txt")  # the second is of Transformers' JITCheckpointCallback
# Patterns of the files of training state. With FSDP, the first is a folder or optimizer.bin.
_STATE_FILES = {"optimizer.pt": "optimizer*", "scheduler.pt": "scheduler.pt", "rng_state.pth": "rng_state*.pth"}
_Check = Callable[[Path, Mapping[str, FileEntry] | None], list[str]]


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint, or None."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(run_directory: Path) -> list[Path]:
    """Return the checkpoints of a run by ascending step."""
    found = [path for path in run_directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def _check_checkpoint(checkpoint: Path, files: Mapping[str, FileEntry] | None) -> list[str]:
    if files is not None:
        return find_damage(checkpoint, files) or find_hazards(checkpoint)
    if markers := [name for name in _MARKERS if (checkpoint / name).exists()]:
        return [f"{markers[0]} is there: it was never finished"]
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return [f"{TRAINER_STATE_NAME} is missing, which is written last"]
    return find_hazards(checkpoint)


@dataclass(frozen=True)
class Examination:
    """Result of :func:`examine`.

    Attributes:
        problems: damage or hazards, one line a file; empty if the checkpoint may be loaded.
        manifest: its entries; None for a checkpoint of the stock Trainer.
        sizes_bytes: by POSIX path in the checkpoint; empty if another process examined it.
    """

    checkpoint: Path
    problems: Sequence[str]
    manifest: Mapping[str, FileEntry] | None = None
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)

    def missing_state(self, world_size: int) -> dict[str, str]:
        """Return the missing files of the training state, and their contents."""
        ranks = [""] if world_size == 1 else [f"_{rank}" for rank in range(world_size)]
        missing = {f"rng_state{rank}.pth": "random numbers" for rank in ranks if not self._has(f"rng_state{rank}.pth")}
        # The stock Trainer loads these two only if both are there, without a warning.
        both = "the optimizer's state and the learning rate's schedule"
        missing_pair = {name: both for name in ("optimizer.pt", "scheduler.pt") if not self._has(_STATE_FILES[name])}
        return missing_pair | missing

    @property
    def incomplete(self) -> list[str]:
        """Reason why this may be partly removed: no manifest, and missing training state."""
        missing = [name for name, pattern in _STATE_FILES.items() if not self._has(pattern)]
        if self.manifest is not None or not missing:
            return []
        return [f"it has neither a manifest nor {' and '.join(missing)}"]

    def _has(self, pattern: str) -> bool:
        return any(fnmatchcase(name.partition("/")[0], pattern) for name in self.sizes_bytes)

    def check_again(self) -> None:
        """Raise a CheckpointError if a file was removed or replaced."""
        if changed := self._find_changed():
            raise CheckpointError(
                f"{self.checkpoint} was removed or replaced while it was loaded ({changed} is not what it was), and is "
                "not trained on: end the other run that saves there, or give this one another output_dir, and start "
                f"again ({name_newest_complete(self.checkpoint.parent)})"
            )

    def _find_changed(self) -> str | None:
        if not self.sizes_bytes:
            return None
        try:
            manifest, sizes = read_manifest(self.checkpoint), _sizes_bytes(self.checkpoint)
        except (CheckpointError, OSError):  # it is being removed
            return "one of its files"
        if manifest != self.manifest:
            return MANIFEST_NAME
        expected = {name: entry.size_bytes for name, entry in manifest.items()} if manifest else self.sizes_bytes
        return next((name for name, size in expected.items() if sizes.get(name) != size), None)


def examine(checkpoint: Path, check: _Check = _check_checkpoint) -> Examination:
    """Examine a checkpoint for damage and hazards; an OSError becomes a problem."""
    # Reading a pipe would not end.
    if out_of_place := find_out_of_place(checkpoint):
        return Examination(checkpoint, out_of_place)
    try:
        # First, so that check_again() finds a removal during the check.
        sizes, manifest = _sizes_bytes(checkpoint), read_manifest(checkpoint)
        return Examination(checkpoint, check(checkpoint, manifest), manifest, sizes)
    except (CheckpointError, OSError) as error:
        return Examination(checkpoint, [str(error)])


def _sizes_bytes(checkpoint: Path) -> dict[str, int]:
    return {name: path.stat().st_size for name, path in files_by_name(checkpoint).items()}


def find_problems(checkpoint: Path, check: _Check = _check_checkpoint) -> list[str]:
    return list(examine(checkpoint, check).problems)


def examine_named(checkpoint: Path) -> Examination:
    """Examine a checkpoint that must neither have problems, nor be partly removed next to a complete one."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"Can't find a valid checkpoint at {checkpoint}: there is no such directory. Name another one "
            f"({name_newest_complete(checkpoint.parent)}), or train from the start"
        )
    examined = examine_or_raise(checkpoint)
    other = _other_complete_checkpoint(checkpoint) if examined.incomplete else None
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.name}: {examined.incomplete[0]}, and {other.name} next to it is whole. {checkpoint} is not "
            f"trained on: resume from {other.name}, or, to begin with a new optimizer on purpose, move "
            f"{checkpoint.name} to a directory of its own"
        )
    return examined


def _other_complete_checkpoint(checkpoint: Path) -> Path | None:
    try:
        found, _ = choose_newest(
            checkpoint.parent, [path for path in list_checkpoints(checkpoint.parent) if path != checkpoint]
        )
    except CheckpointError:
        return None
    return None if found.incomplete else found.checkpoint


def examine_or_raise(checkpoint: Path) -> Examination:
    examined = examine(checkpoint)
    if problems := examined.problems:
        has_manifest = (checkpoint / MANIFEST_NAME).is_file()
        raise CheckpointError(
            f"{checkpoint.name}: {'; '.join(problems)}\n{checkpoint} is not trained on: resume from another checkpoint "
            f"({name_newest_complete(checkpoint.parent)})"
            + (f". If you changed a file yourself, remove {MANIFEST_NAME}" if has_manifest else "")
        )
    return examined


def warn_of_missing_state(examined: Examination, world_size: int) -> None:
    if missing := examined.missing_state(world_size):
        lost = " and ".join(dict.fromkeys(missing.values()))
        logger.warning(f"{examined.checkpoint} has no {', '.join(missing)}: {lost} start anew")


def choose_newest_whole(
    place: Path | str, checkpoints: Sequence[Path], check: Callable[[Path], Sequence[str]]
) -> tuple[Path, str]:
    """Return the last checkpoint for which ``check`` returns no problems, and a warning about newer ones or "".

    ``place`` describes their directory. Raises a NoCheckpointError if there is none, a CheckpointError if all have
    problems.
    """
    passed_over = ""
    for checkpoint in reversed(checkpoints):
        problems = check(checkpoint)
        if not problems:
            warning = f"resuming from {checkpoint}; newer ones were passed over:{passed_over}"
            return checkpoint, warning if passed_over else ""
        passed_over += f"\n  {checkpoint.name}: {'; '.join(problems)}"
    if not passed_over:
        raise NoCheckpointError(
            f"No valid checkpoint found in {place}: there is none yet. Train from the start, or name another place"
        )
    raise CheckpointError(
        f"No valid checkpoint found in {place}:{passed_over}\nNothing is loaded, and none of them was changed. "
        "Resume from another one, copy a whole one there, or train from the start"
    )


def choose_newest(place: Path | str, checkpoints: Sequence[Path]) -> tuple[Examination, str]:
    """Apply :func:`choose_newest_whole`; an incomplete checkpoint is chosen only if there is no other."""
    examine_once = functools.cache(examine)
    try:
        chosen, warning = choose_newest_whole(
            place, checkpoints, lambda path: examine_once(path).problems or examine_once(path).incomplete
        )
    except CheckpointError:
        if all(examine_once(path).problems for path in checkpoints):
            raise
        chosen, warning = choose_newest_whole(place, checkpoints, lambda path: examine_once(path).problems)
    return examine_once(chosen), warning


def name_newest_complete(run_directory: Path) -> str:
    try:
        newest, _ = choose_newest(run_directory, list_checkpoints(run_directory))
    except CheckpointError:
        return f"there is no whole checkpoint in {run_directory} yet"
    except OSError as error:
        return f"which checkpoint in {run_directory} is whole is not known ({error})"
    return f"the newest whole checkpoint in {run_directory} is {newest.checkpoint.name}"
