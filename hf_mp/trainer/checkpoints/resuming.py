"""What a training that begins finds in its directory: what a kill left, and the checkpoint to resume from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from hf_mp.trainer.checkpoints import inspection, unfinished_marker
from hf_mp.trainer.checkpoints.lock import lock_directory
from hf_mp.trainer.checkpoints.manifest import CheckpointError
from hf_mp.trainer.checkpoints.shards import gather_from_ranks, raise_on_all_ranks

logger = logging.get_logger(__name__)

Wanted = str | os.PathLike[str] | bool | None  # of train(resume_from_checkpoint=...)


class Resumption(TrainerCallback):
    """The checkpoint that a training resumes from, from its choice to its first step.

    As a callback, it examines the checkpoint again before the first step, by which all of its state is loaded. A
    directory lock is not enough: other programs, and file systems without locks, do not respect it.

    Attributes:
        examined: the checkpoint as it was when it was chosen; None without one, and from the first step on.
    """

    def __init__(self) -> None:
        self.examined: inspection.Examination | None = None

    @contextmanager
    def loading(self, examined: inspection.Examination | None) -> Iterator[None]:
        """Context of a training that resumes from a checkpoint.

        An error in it, before the first step, becomes a CheckpointError if the checkpoint was removed meanwhile.
        """
        self.examined = examined
        try:
            yield
        except Exception:
            if self.examined is not None:
                self.examined.check_again()
            raise
        finally:
            self.examined = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise a CheckpointError in all processes if the checkpoint was removed or replaced while it was loaded."""
        examined, self.examined = self.examined, None
        if examined is not None:
            with raise_on_all_ranks():
                examined.check_again()


def choose_checkpoint(
    args: TrainingArguments, wanted: Wanted, remove_unfinished: Callable[[Path], None]
) -> inspection.Examination | None:
    """The checkpoint that a training resumes from, None to start anew; examined, and the same in all processes.

    A collective call. In processes that do not save, the result has the path alone.

    Args:
        args: of the Trainer.
        wanted: True for the newest that is whole. An unfinished one, such as ``get_last_checkpoint`` gives after a kill
            in a save, is replaced by the newest whole one next to it. So is one that another run removes meanwhile.
        remove_unfinished: clears the directory of the run of what a kill left, in the processes that save.

    Raises:
        CheckpointError: in all processes, for one that is missing, damaged or could do harm.
    """
    with raise_on_all_ranks():
        mine = [_choose(Path(str(args.output_dir)), wanted, remove_unfinished)] if args.should_save else []
    paths = [None if each is None else each.checkpoint for each in mine]
    found = [checkpoint for each in gather_from_ranks(paths) for checkpoint in each]
    # With save_on_each_node each node has a directory of its own: the lowest step is the one that all of them have.
    chosen = min(found, key=lambda checkpoint: -1 if checkpoint is None else inspection.step_of(checkpoint) or 0)
    if chosen is None:
        return None
    return mine[0] if paths == [chosen] else inspection.Examination(chosen, ())


def _choose(
    run_directory: Path, wanted: Wanted, remove_unfinished: Callable[[Path], None]
) -> inspection.Examination | None:
    """Return the checkpoint to resume from, after ``remove_unfinished``; a CheckpointError if it is not complete."""
    given = None if wanted is None or isinstance(wanted, bool) else Path(wanted)
    # Once it is removed, nothing tells it from a name that was never there.
    was_there = given is not None and inspection.step_of(given) is not None and given.is_dir()
    was_unfinished = given is not None and was_there and unfinished_marker.is_unfinished(given)
    remove_unfinished(run_directory)
    if wanted is True:
        # In the words of the stock Trainer, which programs look for.
        return _newest_whole(f"output directory ({run_directory})", run_directory)
    if given is None:
        return None
    error: CheckpointError | None = None
    try:
        examined = inspection.examine_named(given)
    except CheckpointError as refused:
        error = refused
    # Where that save was to replace an older checkpoint, the older one is there again.
    if error is not None and was_there and (not given.exists() or unfinished_marker.is_unfinished(given)):
        return _instead_of(given, run_directory, may_start_anew=was_unfinished)
    if error is not None:
        raise error
    return examined


def _newest_whole(place: Path | str, run_directory: Path, without: Path | None = None) -> inspection.Examination:
    """The newest whole checkpoint of a run; a warning names those that were passed over."""
    while True:
        before = _times_of_checkpoints(run_directory)
        try:
            chosen, warning = inspection.choose_newest(place, [path for path in before if path != without])
        except CheckpointError:
            # Another run may have saved one, and removed those that were looked at.
            if _times_of_checkpoints(run_directory) == before:
                raise
        else:
            if warning:
                logger.warning(warning)
            return chosen


def _times_of_checkpoints(run_directory: Path) -> dict[Path, int]:
    """When each checkpoint of a run last gained or lost a file, in nanoseconds, oldest step first."""
    times = {}
    for path in inspection.list_checkpoints(run_directory):
        with suppress(FileNotFoundError):  # removed since it was listed
            times[path] = path.stat().st_mtime_ns
    return times


def _instead_of(gone: Path, run_directory: Path, *, may_start_anew: bool) -> inspection.Examination | None:
    """The newest whole checkpoint next to one that is not whole any more; None to start anew.

    Args:
        gone: unfinished, or removed by another run.
        run_directory: of the run that begins.
        may_start_anew: whether the run may start anew if ``gone`` was its first one.
    """
    others = [path for path in inspection.list_checkpoints(gone.parent) if path != gone]
    # To start anew in the place of another run's checkpoint would train other weights than those that were named.
    if may_start_anew and not others and gone.parent.resolve() == run_directory.resolve():
        logger.warning(f"{gone} was never finished, and there is no earlier one: training starts anew")
        return None
    chosen = _newest_whole(gone.parent, gone.parent, without=gone)
    why = "was never finished" if may_start_anew else "was removed by another run"
    logger.warning(f"{gone} {why}: training goes on from {chosen.checkpoint.name}, the newest whole one there")
    return chosen


def find_best_checkpoint(resumed: Path, said: str | None) -> str | None:
    """The best checkpoint of a run: in the folder of the one it resumed from, wherever that one says that it lies."""
    if said is None:
        return None
    beside = resumed.parent / Path(said).name
    if inspection.step_of(beside) is not None and beside.is_dir():
        return str(beside)
    logger.warning(f"{said!r}, the best checkpoint, is not next to {resumed}: the search for the best starts anew")
    return None


def remove_unfinished(
    run_directory: Path, lock: Callable[[Path], AbstractContextManager[Any]] = lock_directory
) -> None:
    """Remove what a killed run left half-written; with a warning, leave it where another run or the disk keeps it.

    Args:
        run_directory: of the run that begins.
        lock: of that directory; one that the caller holds is a ``nullcontext``.
    """
    if unfinished_marker.has_no_unfinished(run_directory):
        return
    try:
        # A run that is alive holds the lock while it saves: what it has half-written stays.
        with lock(run_directory):
            unfinished_marker.remove_unfinished(run_directory)
    except (OSError, CheckpointError) as error:
        logger.warning(f"half-written checkpoints in {run_directory} are left as they are ({error})")
