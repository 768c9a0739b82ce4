"""What a training that begins finds in its directory: what a kill left, and the checkpoint to resume from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from hf_mp.trainer.checkpoints import in_place, inspection
from hf_mp.trainer.checkpoints.lock import lock_directory
from hf_mp.trainer.checkpoints.manifest import CheckpointError
from hf_mp.trainer.checkpoints.shards import gathered, refused_together

logger = logging.get_logger(__name__)

Wanted = str | os.PathLike[str] | bool | None  # of train(resume_from_checkpoint=...)


def choose_checkpoint(args: TrainingArguments, wanted: Wanted, clear_up: Callable[[Path], None]) -> Path | None:
    """The checkpoint that a training resumes from, None to start anew; examined, and the same in all processes.

    A collective call.

    Args:
        args: of the Trainer.
        wanted: True for the newest that is whole. An unfinished one, such as ``get_last_checkpoint`` gives after a kill
            in a save, is replaced by the newest whole one next to it.
        clear_up: clears the directory of the run of what a kill left, in the processes that save.

    Raises:
        CheckpointError: in all processes, for one that is missing, damaged or could do harm.
    """
    with refused_together():
        mine = [_choose(Path(str(args.output_dir)), wanted, clear_up)] if args.should_save else []
    chosen = [checkpoint for each in gathered(mine) for checkpoint in each]
    # With save_on_each_node each node has a directory of its own: the lowest step is the one that all of them have.
    return min(chosen, key=lambda checkpoint: -1 if checkpoint is None else inspection.step_of(checkpoint) or 0)


def _choose(run_directory: Path, wanted: Wanted, clear_up: Callable[[Path], None]) -> Path | None:
    """The checkpoint to resume from, after ``clear_up``; a CheckpointError if there is none or it is not whole."""
    given = None if wanted is None or isinstance(wanted, bool) else Path(wanted)
    # Once it is removed, nothing tells it from a name that was never there.
    was_unfinished = given is not None and inspection.step_of(given) is not None and in_place.is_unfinished(given)
    clear_up(run_directory)
    if wanted is True:
        # In the words of the stock Trainer, which programs look for.
        return _newest_whole(f"output directory ({run_directory})", inspection.list_checkpoints(run_directory))
    if given is None:
        return None
    # Where that save was to replace an older checkpoint, the older one is there again.
    if was_unfinished and (not given.exists() or in_place.is_unfinished(given)):
        return _instead_of(given, run_directory)
    if not given.is_dir():
        raise CheckpointError(
            f"Can't find a valid checkpoint at {given}: there is no such directory. Name another one "
            f"({inspection.newest_whole_of(given.parent)}), or train from the start"
        )
    inspection.refuse_problems(given)
    return given


def _newest_whole(place: Path | str, checkpoints: Sequence[Path]) -> Path:
    chosen, warning = inspection.choose_newest_whole(place, checkpoints)
    if warning:
        logger.warning(warning)
    return chosen


def _instead_of(unfinished: Path, run_directory: Path) -> Path | None:
    """The newest whole checkpoint next to an unfinished one; None where it was the first of the run that begins."""
    others = [path for path in inspection.list_checkpoints(unfinished.parent) if path != unfinished]
    # To start anew in the place of another run's checkpoint would train other weights than those that were named.
    if not others and unfinished.parent.resolve() == run_directory.resolve():
        logger.warning(f"{unfinished} was never finished, and there is no earlier one: training starts anew")
        return None
    chosen = _newest_whole(unfinished.parent, others)
    logger.warning(f"{unfinished} was never finished: training goes on from {chosen.name}, the newest whole one there")
    return chosen


def best_beside(resumed: Path, said: str | None) -> str | None:
    """The best checkpoint of a run: in the folder of the one it resumed from, wherever that one says that it lies."""
    if said is None:
        return None
    beside = resumed.parent / Path(said).name
    if inspection.step_of(beside) is not None and beside.is_dir():
        return str(beside)
    logger.warning(f"{said!r}, the best checkpoint, is not next to {resumed}: the search for the best starts anew")
    return None


def clear_up(run_directory: Path, lock: Callable[[Path], AbstractContextManager[Any]] = lock_directory) -> None:
    """Remove what a killed run left half-written; with a warning, leave it where another run or the disk keeps it.

    Args:
        run_directory: of the run that begins.
        lock: of that directory; one that the caller holds is a ``nullcontext``.
    """
    if in_place.is_clear(run_directory):
        return
    try:
        # A run that is alive holds the lock while it saves: what it has half-written stays.
        with lock(run_directory):
            in_place.clear_up(run_directory)
    except (OSError, CheckpointError) as error:
        logger.warning(f"half-written checkpoints in {run_directory} are left as they are ({error})")
