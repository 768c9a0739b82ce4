"""The checkpoints of a run: which to resume from, and the newest that is whole and cannot do harm."""

from __future__ import annotations

import os
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
    find_damage,
    read_manifest,
)
from hf_mp.trainer.checkpoints.untrusted import find_hazards, find_out_of_place

logger = logging.get_logger(__name__)

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]{{0,17}})")  # \d has the digits of every script
# The second is there while Transformers' JITCheckpointCallback saves.
_MARKS = (UNFINISHED_NAME, "checkpoint-is-incomplete.txt")
_Check = Callable[[Path, Mapping[str, FileEntry] | None], list[str]]


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint; None where it has another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(run_directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    # A directory of another program is no checkpoint, even where Transformers would take it for one.
    found = [path for path in run_directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def _check_checkpoint(checkpoint: Path, files: Mapping[str, FileEntry] | None) -> list[str]:
    if files is not None:
        return find_damage(checkpoint, files) or find_hazards(checkpoint)
    if marks := [name for name in _MARKS if (checkpoint / name).exists()]:
        return [f"{marks[0]} is there: it was never finished"]
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return [f"{TRAINER_STATE_NAME} is missing, which is written last"]
    return find_hazards(checkpoint)


@dataclass(frozen=True)
class Examination:
    """A checkpoint, why not to load it, and the files that were there when that was found out.

    Attributes:
        checkpoint: whole or not.
        problems: damage, then hazards; one line a file, empty if there is none.
        manifest: the files that its manifest lists; None without a manifest, as of the stock Trainer.
        sizes_bytes: of each file that it had, by path inside the checkpoint; empty in a process that has not looked.
    """

    checkpoint: Path
    problems: Sequence[str]
    manifest: Mapping[str, FileEntry] | None = None
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)

    def missing_state(self, world_size: int) -> dict[str, str]:
        """The files of a resumed run's state that are missing, and the state that begins again without each."""
        ranks = [""] if world_size == 1 else [f"_{rank}" for rank in range(world_size)]
        # The stock Trainer takes the first two only together, and says nothing where it takes neither.
        anew = "the optimizer's state and the learning rate's schedule"
        sought = {"optimizer.pt": anew, "scheduler.pt": anew}
        sought |= {f"rng_state{rank}.pth": "random numbers" for rank in ranks}
        # Sharded optimizers are in folders, and FSDP's whole ones in optimizer.bin.
        patterns = {"optimizer.pt": "optimizer*"}
        return {name: state for name, state in sought.items() if not self._has(patterns.get(name, name))}

    @property
    def incomplete(self) -> list[str]:
        """Why this may be the rest of a checkpoint that was being removed: no manifest, and no state of a training."""
        if self.manifest is not None:
            return []
        # The number of processes of the run that saved it is not known.
        sought = {"optimizer.pt": "optimizer*", "scheduler.pt": "scheduler.pt", "rng_state.pth": "rng_state*.pth"}
        missing = [name for name, pattern in sought.items() if not self._has(pattern)]
        return [f"it has neither a manifest nor {' and '.join(missing)}"] if missing else []

    def _has(self, pattern: str) -> bool:
        return any(fnmatchcase(name.partition("/")[0], pattern) for name in self.sizes_bytes)

    def check_again(self) -> None:
        """Raise a CheckpointError if a file was removed or replaced since: another run was at work."""
        if changed := self._find_changed():
            raise CheckpointError(
                f"{self.checkpoint} was removed or replaced while it was loaded ({changed} is not what it was), and is "
                "not trained on: end the other run that saves there, or give this one another output_dir, and start "
                f"again ({name_newest_complete(self.checkpoint.parent)})"
            )

    def _find_changed(self) -> str | None:
        """The first file that has been removed or replaced; None if there is none."""
        if not self.sizes_bytes:  # of a process that has not looked
            return None
        listed = {name: entry.size_bytes for name, entry in (self.manifest or {}).items()}
        try:
            manifest, sizes = read_manifest(self.checkpoint), _sizes_bytes(self.checkpoint)
        except (CheckpointError, OSError):  # in the middle of a removal
            return "one of its files"
        if manifest != self.manifest:
            return MANIFEST_NAME
        return next((name for name, size in (listed or self.sizes_bytes).items() if sizes.get(name) != size), None)


def examine(checkpoint: Path, check: _Check = _check_checkpoint) -> Examination:
    """Find out why not to load a checkpoint: damage, then hazards.

    With a manifest every file is read and compared. Without one (the stock Trainer's) each file is checked for what its
    format can tell, such as a missing end.

    Args:
        checkpoint: whole or not.
        judge: tells what is wrong with it, from what its manifest lists; default: with a Trainer's.
    """
    # Before a file is read: a pipe would have the check of its sum wait for ever.
    if out_of_place := find_out_of_place(checkpoint):
        return Examination(checkpoint, out_of_place)
    try:
        # Before the files are read: check_again() misses what goes from now on.
        sizes, manifest = _sizes_bytes(checkpoint), read_manifest(checkpoint)
        return Examination(checkpoint, check(checkpoint, manifest), manifest, sizes)
    except (CheckpointError, OSError) as error:
        return Examination(checkpoint, [str(error)])


def _sizes_bytes(checkpoint: Path) -> dict[str, int]:
    paths = [Path(folder, name) for folder, _, names in os.walk(checkpoint) for name in names]
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in paths}


def find_problems(checkpoint: Path, check: _Check = _check_checkpoint) -> list[str]:
    """The problems of a checkpoint, as :func:`examine` finds them."""
    return list(examine(checkpoint, check).problems)


def examine_named(checkpoint: Path) -> Examination:
    """Examine a checkpoint that a run names.

    Raises:
        CheckpointError: if it is not there, is damaged or could do harm; or if it may be the rest of a checkpoint that
            was being removed, and a whole one is next to it.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"Can't find a valid checkpoint at {checkpoint}: there is no such directory. Name another one "
            f"({name_newest_complete(checkpoint.parent)}), or train from the start"
        )
    examined = examine_or_raise(checkpoint)
    if examined.incomplete and (beside := _other_complete_checkpoint(checkpoint)):
        raise CheckpointError(
            f"{checkpoint.name}: {examined.incomplete[0]}, and {beside.name} next to it is whole. {checkpoint} is not "
            f"trained on: resume from {beside.name}, or, to begin with a new optimizer on purpose, move "
            f"{checkpoint.name} to a directory of its own"
        )
    return examined


def _other_complete_checkpoint(checkpoint: Path) -> Path | None:
    """The newest other checkpoint of the run that is whole, with all state of a training; None if there is none."""
    try:
        found, _ = choose_newest(
            checkpoint.parent, [path for path in list_checkpoints(checkpoint.parent) if path != checkpoint]
        )
    except CheckpointError:
        return None
    return None if found.incomplete else found.checkpoint


def examine_or_raise(checkpoint: Path) -> Examination:
    """Raise a CheckpointError if a checkpoint is damaged or could do harm; the newest that is whole is named."""
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
    """Warn of state that a resumed run starts from scratch, because its file is missing."""
    if missing := examined.missing_state(world_size):
        lost = " and ".join(dict.fromkeys(missing.values()))
        logger.warning(f"{examined.checkpoint} has no {', '.join(missing)}: {lost} start anew")


def choose_newest_whole(
    place: Path | str, checkpoints: Sequence[Path], check: Callable[[Path], Sequence[str]]
) -> tuple[Path, str]:
    """The last of the ``checkpoints`` in which ``check`` finds no problem; ``place`` is their directory, for messages.

    Returns:
        It, and a warning of those that were passed over for it, with the reasons; empty where none was.

    Raises:
        NoCheckpointError: if there are none.
        CheckpointError: if each has a problem; they are named.
    """
    passed_over = ""
    for checkpoint in reversed(checkpoints):
        if not (problems := check(checkpoint)):
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
    """The newest whole checkpoint of a Trainer, as :func:`choose_newest_whole`; an incomplete one only without another.

    Raises:
        NoCheckpointError, CheckpointError: as :func:`choose_newest_whole`.
    """
    examined: dict[Path, Examination] = {}

    def check(checkpoint: Path) -> Sequence[str]:
        one = examined[checkpoint] = examine(checkpoint)
        return one.problems or one.incomplete

    try:
        chosen, warning = choose_newest_whole(place, checkpoints, check)
    except CheckpointError:
        if all(one.problems for one in examined.values()):
            raise
        chosen, warning = choose_newest_whole(place, checkpoints, lambda checkpoint: examined[checkpoint].problems)
    return examined[chosen], warning


def name_newest_complete(run_directory: Path) -> str:
    """The newest whole checkpoint of a run, for a message."""
    try:
        newest, _ = choose_newest(run_directory, list_checkpoints(run_directory))
    except CheckpointError:
        return f"there is no whole checkpoint in {run_directory} yet"
    except OSError as error:
        return f"which checkpoint in {run_directory} is whole is not known ({error})"
    return f"the newest whole checkpoint in {run_directory} is {newest.checkpoint.name}"
