"""What a Trainer with our callback finds when it starts: half-written checkpoints, and the one that it has read."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments
from transformers.utils import logging

from hf_mp.trainer.checkpoints import in_place, inspection
from hf_mp.trainer.checkpoints.lock import lock_directory
from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)


def clear_up(args: TrainingArguments) -> None:
    """Remove what a killed run left half-written: in the process that saves; the others wait for it."""
    directory = Path(str(args.output_dir))
    # The others would look checkpoints up while these are removed.
    with args.main_process_first(local=args.save_on_each_node, desc="clearing up checkpoints"):
        if not args.should_save or in_place.is_clear(directory):
            return
        # A run that is alive holds the lock while it saves: what it has half-written stays.
        try:
            with lock_directory(directory):
                in_place.clear_up(directory)
                logger.warning(inspection.newest_whole_of(directory))
        except (OSError, CheckpointError) as error:
            logger.warning(f"half-written checkpoints in {directory} are left as they are ({error})")


def check_resumed(checkpoint: Path, args: TrainingArguments) -> None:
    """Raise where the checkpoint that a stock Trainer has read is damaged; warn of state that it lacks."""
    inspection.refuse_problems(checkpoint)
    if args.should_save:
        inspection.warn_of_missing_state(checkpoint, args.world_size)
