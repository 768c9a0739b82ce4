"""Checkpoints of a Trainer that has our callback: how it writes them, and which one it has read when it resumes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.trainer.calling_trainer import extend_method
from hf_mp.trainer.checkpoints import atomic, in_place, inspection
from hf_mp.trainer.checkpoints.lock import DirectoryLock
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, CheckpointError, find_damage, read_manifest
from hf_mp.trainer.session import TrainerSession

logger = logging.get_logger(__name__)

_WAIT_SECONDS = 60.0

# Saving


def extend_saves(trainer: Trainer, session_of: Callable[[Trainer], TrainerSession | None]) -> None:
    """Have the checkpoints that ``trainer`` writes from now on marked until they have the state of ours and a manifest.

    Args:
        trainer: stock, or of another library.
        session_of: its session; None for a save that is left to the Trainer.
    """

    def _save_checkpoint(own: Callable[..., None], model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        if (session := session_of(trainer)) is None:
            own(model, trial, *args, **kwargs)
            return
        step, world_size = trainer.state.global_step, trainer.args.world_size
        checkpoint = Path(trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")
        with _marked(checkpoint, trainer.args):
            own(model, trial, *args, **kwargs)
            if world_size > 1:
                torch.distributed.barrier()  # the others may still be writing their random numbers
            if trainer.args.should_save:
                if not trainer.args.save_only_model:
                    session.save(checkpoint)
                precision = str(session.settings.policy)
                in_place.complete(checkpoint, step=step, world_size=world_size, precision=precision)

    extend_method(trainer, "_save_checkpoint", _save_checkpoint)


@contextmanager
def _marked(checkpoint: Path, args: TrainingArguments) -> Iterator[None]:
    with ExitStack() as at_end:
        if args.should_save:
            try:
                at_end.enter_context(DirectoryLock(checkpoint.parent, wait_seconds=1.0))
                in_place.begin(checkpoint, args.world_size)
                # The stock Trainer has removed older ones, and pushes to the hub, before this save has ended.
                at_end.push(lambda kind, *_: in_place.take_back(checkpoint, keeps_whole=True) if kind else None)
            except (OSError, CheckpointError) as error:
                logger.warning(f"{checkpoint} is written without a mark ({error}): a kill may leave half of it")
        yield


# At the next start


def clear_up(args: TrainingArguments) -> None:
    """Finish or remove what a killed run left half-written: in the process that saves; the others wait for it."""
    directory = Path(str(args.output_dir))
    if not _has_leftovers(directory):
        return
    if not args.should_save:
        end = time.monotonic() + _WAIT_SECONDS
        while _has_leftovers(directory) and time.monotonic() < end:
            time.sleep(0.1)
        return
    try:
        with DirectoryLock(directory):
            in_place.clear_up(directory)
            logger.warning(inspection.newest_whole_of(directory))
    except (OSError, CheckpointError) as error:
        logger.warning(f"half-written checkpoints in {directory} are left as they are ({error})")


def _has_leftovers(directory: Path) -> bool:
    return atomic.staging_folder(directory).is_dir() or bool(inspection.marked_in(directory))


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
            f"({inspection.newest_whole_of(checkpoint.parent)}); if you changed a file yourself, remove {MANIFEST_NAME}"
        )
    if args.should_save:
        inspection.warn_of_missing_state(checkpoint, args.world_size)
