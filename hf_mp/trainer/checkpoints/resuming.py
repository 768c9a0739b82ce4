"""Choose the checkpoint that a training resumes from."""

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

Wanted = str | os.PathLike[str] | bool | None  # type of train(resume_from_checkpoint=...)


class Resumption(TrainerCallback):
    """Checks before the first step that the resumed checkpoint was not changed while it was loaded.

    Some programs and file systems ignore the lock of the directory. ``examined`` is the checkpoint until the first step
    begins.
    """

    def __init__(self) -> None:
        self.examined: inspection.Examination | None = None

    @contextmanager
    def loading(self, examined: inspection.Examination | None) -> Iterator[None]:
        """Convert an error before the first step to a CheckpointError if the checkpoint was removed."""
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
        examined, self.examined = self.examined, None
        if examined is not None:
            with raise_on_all_ranks():
                examined.check_again()


def choose_checkpoint(
    args: TrainingArguments, wanted: Wanted, clean_up: Callable[[Path], None]
) -> inspection.Examination | None:
    """Return the checkpoint to resume from, the same on all ranks; None to start from scratch. A collective call.

    Args:
        wanted: a path, or True for the newest complete checkpoint, which also replaces a path that is unfinished or
            removed by another run.
        clean_up: called with the directory of the run on ranks that save; others examine no checkpoints.
    """
    own: inspection.Examination | None = None
    with raise_on_all_ranks():
        if args.should_save:
            own = _choose(Path(str(args.output_dir)), wanted, clean_up)
    own_path = None if own is None else own.checkpoint
    paths = [path for saves, path in gather_from_ranks((args.should_save, own_path)) if saves]
    # With save_on_each_node, only the lowest step is on all nodes.
    chosen = min(paths, key=lambda path: -1 if path is None else inspection.step_of(path) or 0)
    if chosen is None:
        return None
    return own if chosen == own_path else inspection.Examination(chosen, ())


def _choose(run_directory: Path, wanted: Wanted, clean_up: Callable[[Path], None]) -> inspection.Examination | None:
    if wanted is None or isinstance(wanted, bool):
        clean_up(run_directory)
        # "output directory (...)" is in the message of the stock Trainer.
        return _newest_complete(f"output directory ({run_directory})", run_directory) if wanted else None
    path = Path(wanted)
    # Before clean_up(), which may remove it.
    was_checkpoint = inspection.step_of(path) is not None and path.is_dir()
    was_unfinished = was_checkpoint and unfinished_marker.is_unfinished(path)
    clean_up(run_directory)
    try:
        return inspection.examine_named(path)
    except CheckpointError:
        is_gone = not path.exists() or unfinished_marker.is_unfinished(path)
        if not (was_checkpoint and is_gone):
            raise
    return _choose_replacement(path, run_directory, was_unfinished=was_unfinished)


def _newest_complete(place: Path | str, run_directory: Path, without: Path | None = None) -> inspection.Examination:
    """Return the newest complete checkpoint except ``without``; log a warning about newer ones."""
    while True:
        before = _modification_times(run_directory)
        try:
            chosen, warning = inspection.choose_newest(place, [path for path in before if path != without])
        except CheckpointError:
            # Retry if another run has saved or removed a checkpoint since.
            if _modification_times(run_directory) == before:
                raise
        else:
            if warning:
                logger.warning(warning)
            return chosen


def _modification_times(run_directory: Path) -> dict[Path, int]:
    """Return the times in ns, by ascending step."""
    times = {}
    for path in inspection.list_checkpoints(run_directory):
        with suppress(FileNotFoundError):  # removed since it was listed
            times[path] = path.stat().st_mtime_ns
    return times


def _choose_replacement(gone: Path, run_directory: Path, *, was_unfinished: bool) -> inspection.Examination | None:
    """Return the newest complete checkpoint next to ``gone``.

    None, to start from scratch, if ``gone`` was unfinished and the only checkpoint of ``run_directory``.
    """
    others = [path for path in inspection.list_checkpoints(gone.parent) if path != gone]
    if was_unfinished and not others and gone.parent.resolve() == run_directory.resolve():
        logger.warning(f"{gone} was never finished, and there is no earlier one: training starts anew")
        return None
    chosen = _newest_complete(gone.parent, gone.parent, without=gone)
    why = "was never finished" if was_unfinished else "was removed by another run"
    logger.warning(f"{gone} {why}: training goes on from {chosen.checkpoint.name}, the newest whole one there")
    return chosen


def find_best_checkpoint(resumed: Path, recorded: str | None) -> str | None:
    """Return the path of the best checkpoint next to ``resumed``, or None with a warning.

    The directory of the ``recorded`` path is ignored: the run may have been moved.
    """
    if recorded is None:
        return None
    best = resumed.parent / Path(recorded).name
    if inspection.step_of(best) is not None and best.is_dir():
        return str(best)
    logger.warning(f"{recorded!r}, the best checkpoint, is not next to {resumed}: the search for the best starts anew")
    return None


def remove_unfinished(
    run_directory: Path, lock: Callable[[Path], AbstractContextManager[Any]] = lock_directory
) -> None:
    """Remove the unfinished checkpoints of a run; warn if another run holds the lock, or the disk fails.

    The caller passes ``nullcontext`` if it holds the lock.
    """
    if unfinished_marker.has_no_unfinished(run_directory):
        return
    try:
        with lock(run_directory):
            unfinished_marker.remove_unfinished(run_directory)
    except (OSError, CheckpointError) as error:
        logger.warning(f"half-written checkpoints in {run_directory} are left as they are ({error})")
