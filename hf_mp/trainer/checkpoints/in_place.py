"""Checkpoints that a stock Trainer writes in place: marked while they are half-written, cleared up at the next start.

``MixedPrecisionCallback`` cannot have the Trainer write elsewhere and rename, as :class:`CrashSafe` does. It can
say beforehand that a checkpoint is about to be written::

    run/checkpoint-20/hf_mp_unfinished.json    from before the first file of a save to after its manifest
    run/.saving/replaced-checkpoint-20         the older one of that name meanwhile

A kill at any moment leaves a whole checkpoint, or one with that mark, which the next Trainer finishes or removes when
it is made: before ``train(resume_from_checkpoint=True)`` looks for the newest directory.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import logging

from hf_mp.trainer.checkpoints import atomic, inspection
from hf_mp.trainer.checkpoints.lock import DirectoryLock
from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    CheckpointError,
    find_damage,
    read_manifest,
)

logger = logging.get_logger(__name__)

_WAIT_SECONDS = 60.0


# By output directory, the checkpoint of a save that was announced, and the lock that keeps others from clearing it up:
# those that an exception ended hold their lock until the next Trainer of this process.
_announced: dict[Path, tuple[Path, DirectoryLock]] = {}


class InPlaceSaves(TrainerCallback):
    """Marks the checkpoints of its Trainer while they are written; the last of its callbacks.

    What the others decide about saving is known then. A save that only the Trainer itself decides on is not announced.
    """

    def come_last(self, callbacks: list[TrainerCallback]) -> None:
        """Move to the end of a Trainer's callbacks."""
        if self in callbacks:
            callbacks.remove(self)
        callbacks.append(self)

    def leave(self, args: TrainingArguments, callbacks: list[TrainerCallback]) -> None:
        """Training has ended."""
        _withdraw(args)
        if self in callbacks:
            callbacks.remove(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _announce(args, state, control.should_save)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # With save_strategy="best" the Trainer decides after this.
        _announce(args, state, control.should_save or args.save_strategy == SaveStrategy.BEST)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last callback of a save, when the checkpoint is whole; also before a step, when none was written."""
        _withdraw(args)

    on_step_begin = on_save

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Have the step that the stock loop takes when it is resumed at its end change no weight."""
        if 0 < state.max_steps <= state.global_step and optimizer is not None:
            logger.warning(f"training is at its end, step {state.max_steps}: a further step changes no weight")
            optimizer.zero_grad()


def _key(args: TrainingArguments) -> Path:
    return Path(str(args.output_dir)).absolute()


def _announce(args: TrainingArguments, state: TrainerState, is_due: bool) -> None:
    if not (is_due and args.should_save) or state.is_hyper_param_search:
        return
    checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    if checkpoint.is_symlink() or _announced.get(_key(args), (None,))[0] == checkpoint:
        return
    _withdraw(args)
    try:
        _announced[_key(args)] = checkpoint, _begin(checkpoint, args.world_size)
    except (OSError, CheckpointError) as error:
        logger.warning(f"{checkpoint} is written without a mark ({error}): a kill may leave half of it")


def _begin(checkpoint: Path, world_size: int) -> DirectoryLock:
    """Put a marked, empty directory in the place of a checkpoint, in one step."""
    lock = DirectoryLock(checkpoint.parent).__enter__()
    try:
        staged = atomic.make_staging_folder(checkpoint.parent) / checkpoint.name
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        (staged / UNFINISHED_NAME).write_text(json.dumps({"world_size": world_size}))
        if checkpoint.exists():
            atomic.set_aside(checkpoint)
        os.rename(staged, checkpoint)
    except OSError:
        lock.__exit__()
        raise
    return lock


def _withdraw(args: TrainingArguments) -> None:
    """Take the mark off a checkpoint that was written; of one that was not, bring back what was there before."""
    if (announced := _announced.pop(_key(args), None)) is None:
        return
    checkpoint, lock = announced
    replaced = atomic.staging_folder(checkpoint.parent) / (atomic.REPLACED + checkpoint.name)
    try:
        if (checkpoint / TRAINER_STATE_NAME).is_file():
            (checkpoint / UNFINISHED_NAME).unlink(missing_ok=True)
            atomic.discard(replaced)
        elif [path.name for path in checkpoint.iterdir()] == [UNFINISHED_NAME]:
            atomic.remove(checkpoint)
            if replaced.exists():
                os.rename(replaced, checkpoint)
                atomic.discard(replaced)
    except OSError as error:
        logger.warning(f"{checkpoint} cannot be cleared of its mark ({error}): the next start looks at it")
    finally:
        lock.__exit__()


# At the next start


def clear_up(args: TrainingArguments) -> None:
    """Finish or remove what a killed run of a Trainer with ``MixedPrecisionCallback`` left half-written, and say so.

    In the process that saves; the others wait for it.
    """
    directory = Path(str(args.output_dir))
    if (announced := _announced.pop(_key(args), None)) is not None:  # an exception ended that run
        announced[1].__exit__()
    if not _has_leftovers(directory):
        return
    if not args.should_save:
        end = time.monotonic() + _WAIT_SECONDS
        while _has_leftovers(directory) and time.monotonic() < end:
            time.sleep(0.1)
        return
    try:
        with DirectoryLock(directory):
            _clear_up(directory)
    except (OSError, CheckpointError) as error:
        logger.warning(f"half-written checkpoints in {directory} are left as they are ({error})")


def _has_leftovers(directory: Path) -> bool:
    return directory.is_dir() and (atomic.staging_folder(directory).is_dir() or bool(_marked(directory)))


def _marked(directory: Path) -> list[Path]:
    return [path for path in inspection.list_checkpoints(directory) if (path / UNFINISHED_NAME).is_file()]


def _clear_up(directory: Path) -> None:
    for checkpoint in _marked(directory):
        if problems := [*inspection.find_problems(checkpoint, marked=True), *_missing_random_numbers(checkpoint)]:
            logger.warning(f"{checkpoint} is half-written by a run that was killed ({problems[0]}): it is removed")
            atomic.remove(checkpoint)
        else:
            (checkpoint / UNFINISHED_NAME).unlink()
            logger.warning(f"{checkpoint} was written to its end by a run that was killed before it could say so")
    for checkpoint in atomic.recover(directory, lambda path: not inspection.find_problems(path)):
        logger.warning(f"{checkpoint} is put back: a run that was killed was about to write over it")
    logger.warning(_newest_whole(directory))


def _missing_random_numbers(checkpoint: Path) -> list[str]:
    """Each process writes its own, the last of them perhaps after the state of the Trainer."""
    try:
        expected = int(json.loads((checkpoint / UNFINISHED_NAME).read_text())["world_size"])
    except (OSError, ValueError, TypeError, KeyError):
        expected = 1
    found = len(list(checkpoint.glob("rng_state*.pth")))
    return [f"it has {found} of {expected} rng_state files"] if 0 < found < expected else []


def _newest_whole(directory: Path) -> str:
    newest, _ = inspection.find_newest_whole(directory)
    if newest is None:
        return f"there is no whole checkpoint in {directory}"
    return f"the newest whole checkpoint in {directory} is {newest.name}"


# What a stock Trainer has read when training begins: it hands on its state, not the directory that it came from.


def checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The checkpoint that holds ``state``: the one that ``args`` name, or the one of its step in their directory."""
    own = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    for checkpoint in (Path(str(args.resume_from_checkpoint or own)), own):
        path = checkpoint / TRAINER_STATE_NAME
        if path.is_file() and _run_so_far(json.loads(path.read_text(encoding="utf-8"))) == _run_so_far(vars(state)):
            return checkpoint
    return None


def _run_so_far(state: Mapping[str, Any]) -> str:
    history = state.get("log_history") or []
    # As text, where NaN equals itself.
    return json.dumps([state.get("global_step"), len(history), history[-1:]], sort_keys=True)


def refuse_damaged(args: TrainingArguments, state: TrainerState) -> None:
    """Raise where the checkpoint that a stock Trainer has read is not what its manifest says it was."""
    if (checkpoint := checkpoint_of(args, state)) is None:
        return
    manifest = read_manifest(checkpoint)
    if manifest is not None and (damage := find_damage(checkpoint, manifest)):
        raise CheckpointError(
            f"{checkpoint} is damaged, and is not trained on: {'; '.join(damage)}. Resume from another checkpoint "
            f"({_newest_whole(checkpoint.parent)}); if you changed a file yourself, remove {MANIFEST_NAME}"
        )
    if args.should_save:
        inspection.warn_of_missing_state(checkpoint, args.world_size)
