"""The checkpoints of a run: which to resume from, and the newest that is whole and cannot do harm."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, CheckpointError, find_damage, read_manifest
from hf_mp.trainer.checkpoints.untrusted import find_flipped_bits, find_hazards, find_out_of_place

logger = logging.get_logger(__name__)

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]{{0,17}})")  # \d has the digits of every script
_MARK = ".unfinished"
_JIT_MARK = "checkpoint-is-incomplete.txt"  # there while Transformers' JITCheckpointCallback saves


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint; None where it has another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def mark_of(checkpoint: Path) -> Path:
    """The file that is there while a Trainer of ours writes ``checkpoint``.

    It lies next to the checkpoint, which may be pushed to the hub meanwhile; its own name is among those that the
    Trainer does not push.
    """
    return checkpoint.with_name(checkpoint.name + _MARK)


def marked_in(run_directory: Path) -> list[Path]:
    """The checkpoints of a run that have a mark; they need not be there."""
    found = (mark.with_suffix("") for mark in run_directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*{_MARK}"))
    return sorted(checkpoint for checkpoint in found if step_of(checkpoint) is not None)


def list_checkpoints(run_directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    # A directory of another program is no checkpoint, even where Transformers would take it for one.
    found = [path for path in run_directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def find_problems(checkpoint: Path) -> list[str]:
    """Why not to load a checkpoint: damage, then hazards; one line a file, empty where there is none.

    With a manifest every file is read and compared. Without one (the stock Trainer's) each file is checked for what its
    format can tell: a missing end, and in files of torch.save a flipped bit.
    """
    try:
        # Before a file is read: a pipe would have the check of its sum wait for ever.
        if out_of_place := find_out_of_place(checkpoint):
            return out_of_place
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    if manifest is not None:
        return find_damage(checkpoint, manifest) or find_hazards(checkpoint)
    mark = next((path for path in (mark_of(checkpoint), checkpoint / _JIT_MARK) if path.exists()), None)
    if mark is not None:
        return [f"{mark.name} is there: it was never finished"]
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return [f"{TRAINER_STATE_NAME} is missing, which is written last"]
    return find_hazards(checkpoint) or find_flipped_bits(checkpoint)


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
    """Warn of state that a resumed run starts from scratch, because its file is missing.

    The stock Trainer takes the state of optimizer and scheduler only together, and says nothing where it takes neither.
    """
    ranks = [""] if world_size == 1 else [f"_{rank}" for rank in range(world_size)]
    # Sharded optimizers are in folders, and FSDP's whole ones in optimizer.bin.
    sought = {"optimizer.pt": "optimizer*", "scheduler.pt": "scheduler.pt"}
    sought.update({f"rng_state{rank}.pth": f"rng_state{rank}.pth" for rank in ranks})
    if missing := [name for name, pattern in sought.items() if not any(checkpoint.glob(pattern))]:
        logger.warning(
            f"{checkpoint} has no {', '.join(missing)}: what they hold starts anew (without one of the first two, both "
            "the optimizer's state and the learning rate's schedule do)"
        )


def find_newest_whole(
    checkpoints: Sequence[Path], look: Callable[[Path], list[str]] = find_problems
) -> tuple[Path | None, str]:
    """The last of ``checkpoints`` without a problem; and which were passed over for it and why, one line each."""
    passed_over: list[str] = []
    for checkpoint in reversed(checkpoints):
        if not (problems := look(checkpoint)):
            return checkpoint, "\n".join(passed_over)
        passed_over.append(f"  {checkpoint.name}: {'; '.join(problems)}")
    return None, "\n".join(passed_over)


def newest_whole_of(run_directory: Path) -> str:
    """The newest whole checkpoint of a run, for a message."""
    try:
        newest, _ = find_newest_whole(list_checkpoints(run_directory))
    except OSError as error:
        return f"which checkpoint in {run_directory} is whole is not known ({error})"
    if newest is None:
        return f"there is no whole checkpoint in {run_directory} yet"
    return f"the newest whole checkpoint in {run_directory} is {newest.name}"


def is_finished(checkpoint: Path) -> bool:
    """Whether a checkpoint has a manifest and matches it; what is unsafe to load in it is refused there."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError:
        return False
    return manifest is not None and not find_damage(checkpoint, manifest)
