"""The checkpoints of a run: which to resume from, and the newest that is whole and cannot do harm."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
_Judge = Callable[[Path, Mapping[str, FileEntry] | None], list[str]]


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint; None where it has another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(run_directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    # A directory of another program is no checkpoint, even where Transformers would take it for one.
    found = [path for path in run_directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def _judge(checkpoint: Path, files: Mapping[str, FileEntry] | None) -> list[str]:
    if files is not None:
        return find_damage(checkpoint, files) or find_hazards(checkpoint)
    if marks := [name for name in _MARKS if (checkpoint / name).exists()]:
        return [f"{marks[0]} is there: it was never finished"]
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return [f"{TRAINER_STATE_NAME} is missing, which is written last"]
    return find_hazards(checkpoint)


def find_problems(checkpoint: Path, judge: _Judge = _judge) -> list[str]:
    """Why not to load a checkpoint: damage, then hazards; one line a file, empty where there is none.

    With a manifest every file is read and compared. Without one (the stock Trainer's) each file is checked for what its
    format can tell, such as a missing end.

    Args:
        checkpoint: whole or not.
        judge: tells what is wrong with it, from what its manifest lists; default: with a Trainer's.
    """
    # Before a file is read: a pipe would have the check of its sum wait for ever.
    if out_of_place := find_out_of_place(checkpoint):
        return out_of_place
    try:
        return judge(checkpoint, read_manifest(checkpoint))
    except (CheckpointError, OSError) as error:
        return [str(error)]


def refuse_problems(checkpoint: Path) -> None:
    """Raise a CheckpointError where a checkpoint is damaged or could do harm; the newest that is whole is named."""
    if checkpoint.is_dir() and (problems := find_problems(checkpoint)):
        has_manifest = (checkpoint / MANIFEST_NAME).is_file()
        raise CheckpointError(
            f"{checkpoint.name}: {'; '.join(problems)}\n{checkpoint} is not trained on: resume from another checkpoint "
            f"({newest_whole_of(checkpoint.parent)})"
            + (f". If you changed a file yourself, remove {MANIFEST_NAME}" if has_manifest else "")
        )


def warn_of_missing_state(checkpoint: Path, world_size: int) -> None:
    """Warn of state that a resumed run starts from scratch, because its file is missing."""
    ranks = [""] if world_size == 1 else [f"_{rank}" for rank in range(world_size)]
    # The stock Trainer takes the first two only together, and says nothing where it takes neither.
    anew = "the optimizer's state and the learning rate's schedule"
    sought = {"optimizer.pt": anew, "scheduler.pt": anew} | {f"rng_state{rank}.pth": "random numbers" for rank in ranks}
    # Sharded optimizers are in folders, and FSDP's whole ones in optimizer.bin.
    patterns = {"optimizer.pt": "optimizer*"}
    if missing := [name for name in sought if not any(checkpoint.glob(patterns.get(name, name)))]:
        lost = " and ".join(dict.fromkeys(sought[name] for name in missing))
        logger.warning(f"{checkpoint} has no {', '.join(missing)}: {lost} start anew")


def choose_newest_whole(
    place: Path | str, checkpoints: Sequence[Path], look: Callable[[Path], list[str]] = find_problems
) -> tuple[Path, str]:
    """The last of the ``checkpoints`` without a problem; ``place`` tells a reader where they are.

    Returns:
        It, and a warning of those that were passed over for it, with the reasons; empty where none was.

    Raises:
        NoCheckpointError: if there are none.
        CheckpointError: if each has a problem; they are named.
    """
    passed_over = ""
    for checkpoint in reversed(checkpoints):
        if not (problems := look(checkpoint)):
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


def newest_whole_of(run_directory: Path) -> str:
    """The newest whole checkpoint of a run, for a message."""
    try:
        newest, _ = choose_newest_whole(run_directory, list_checkpoints(run_directory))
    except CheckpointError:
        return f"there is no whole checkpoint in {run_directory} yet"
    except OSError as error:
        return f"which checkpoint in {run_directory} is whole is not known ({error})"
    return f"the newest whole checkpoint in {run_directory} is {newest.name}"
