"""The saves of one Trainer: in place, marked until they have a manifest, taken back where they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.ranks.parallelism import is_distributed
from hf_mp.trainer.checkpoints import inspection, unfinished_marker
from hf_mp.trainer.checkpoints.lock import lock_directory
from hf_mp.trainer.checkpoints.manifest import CheckpointError
from hf_mp.trainer.checkpoints.shards import raise_on_all_ranks
from hf_mp.trainer.find_trainer import extend_method
from hf_mp.trainer.model_loading import load_best_model
from hf_mp.trainer.session import TrainerSession

logger = logging.get_logger(__name__)


class CheckpointSaver:
    """Stands around the saves of ``trainer`` from now on.

    Older checkpoints are removed, and anything is pushed to the hub, once the new one has its manifest. A save that
    fails is taken back in all processes, and logged; with ``save_failure="stop"`` it ends the training. A run that is
    resumed at its end takes no step. The best model is not loaded where it is damaged.

    Args:
        trainer: a stock Trainer, one of another library, or hf_mp's.
        session: gives the session of the run; None for saves that are left to the Trainer alone.
        lock: of a run's directory, held during each save.

    Attributes:
        has_failed: whether the last save failed.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: Callable[[], TrainerSession | None],
        lock: Callable[[Path], AbstractContextManager[Any]] = lock_directory,
    ) -> None:
        self.has_failed = False
        self._trainer, self._session, self._lock = trainer, session, lock
        self._errors: list[BaseException] | None = None  # of the save in progress, in this process
        # Transformers has no hook before a save, nor between its last file and the removal of older ones.
        extend_method(trainer, "_save_checkpoint", self._save)
        extend_method(trainer, "save_model", self._save_model)
        extend_method(trainer, "_push_from_checkpoint", self._push)
        extend_method(trainer, "_run_epoch", self._run_epoch)
        extend_method(trainer, "_load_best_model", self._load_best_model)
        extend_method(trainer, "_finalize_training", self._finalize_training)

    def _save(self, own: Callable[..., None], model: Any, trial: Any, *more: Any) -> None:
        """Save a checkpoint, whole or not at all, in the place of the Trainer's ``own`` function; removes old ones."""
        if (session := self._session()) is None:
            own(model, trial, *more)
            return
        state, args = self._trainer.state, self._trainer.args
        checkpoint = Path(self._trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        limit, best_before = args.save_total_limit, state.best_model_checkpoint
        errors: list[BaseException] = []
        self.has_failed, self._errors = True, errors
        try:
            with ExitStack() as at_end:
                # Each part is begun when the one before it went well in every process.
                self.has_failed = not (
                    self._run_part(lambda: self._begin(checkpoint, at_end), args.should_save)
                    and self._run_part(lambda: own(model, trial, *more))
                    and self._run_part(lambda: self._complete(checkpoint, session), args.should_save)
                )
                # Under the lock: a run that clears the directory up would meet what is being removed. The stock save
                # could remove none, with no limit while it ran.
                if args.should_save and not self.has_failed:
                    unfinished_marker.rotate(checkpoint.parent, limit, state.best_model_checkpoint)
        finally:
            # The limit comes back also where a save raises, such as on Ctrl-C.
            self._errors, args.save_total_limit = None, limit
        if self.has_failed:
            state.best_model_checkpoint = best_before
            self._report_failure(checkpoint, session, errors)
            return
        if args.push_to_hub:
            self._trainer._push_from_checkpoint(str(checkpoint))

    def _begin(self, checkpoint: Path, at_end: ExitStack) -> None:
        at_end.enter_context(self._lock(checkpoint.parent))
        at_end.callback(lambda: unfinished_marker.abort_save(checkpoint) if self.has_failed else None)
        unfinished_marker.begin(checkpoint)

    def _complete(self, checkpoint: Path, session: TrainerSession) -> None:
        args = self._trainer.args
        if not args.save_only_model:
            session.save(checkpoint)
        about = {"world_size": args.world_size, "precision": str(session.settings.policy)}
        unfinished_marker.complete(checkpoint, step=self._trainer.state.global_step, **about)

    def _run_part(self, part: Callable[[], None], is_mine: bool = True) -> bool:
        """Do a part of a save, if it is this process's; whether all parts so far went well in every process."""
        if is_mine:
            with self._recording_failures():
                part()
        return not max_over_ranks(len(self._errors or ()), self._trainer)

    @contextmanager
    def _recording_failures(self) -> Iterator[None]:
        """A context that notes failed writes in ``_errors``, and lets other errors through."""
        assert self._errors is not None
        try:
            yield
        except BaseException as error:
            # After a first failure another one of any kind is taken for its consequence.
            if not (is_write_failure(error) or (self._errors and isinstance(error, Exception))):
                raise
            self._errors.append(error)

    def _save_model(self, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save the model by the Trainer's ``own`` function; as part of a checkpoint, note failures and raise none."""
        is_part = self._errors is not None and kwargs.get("_internal_call", False)
        # After it, the stock save waits for all processes at a barrier: one that left here would hang the others.
        with self._recording_failures() if is_part else nullcontext():
            own(*args, **kwargs)
        if is_part:
            # The Trainer would remove older ones before this one has its manifest. Not sooner than here:
            # training_args.bin, which is written along with the model, has to hold the limit that the user set.
            self._trainer.args.save_total_limit = None

    def _push(self, own: Callable[..., None], checkpoint_folder: str) -> None:
        if self._errors is None:  # else _save() pushes it once it is whole
            own(checkpoint_folder)

    def _run_epoch(self, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        state = self._trainer.state
        # The stock loop asks only after a step whether it is at its end: resumed there, it would take one step more.
        if self._session() is not None and 0 < state.max_steps <= state.global_step:
            self._trainer.control.should_training_stop = True
        else:
            own(*args, **kwargs)

    def _load_best_model(self, own: Callable[[], None]) -> None:
        if self._session() is None:
            load_best_model(self._trainer, own)
            return
        checkpoint = Path(str(self._trainer.state.best_model_checkpoint))
        examined: inspection.Examination | None = None
        with raise_on_all_ranks():
            if self._trainer.args.should_save:
                # The stock Trainer would go on with the last weights, and a warning.
                if not checkpoint.is_dir():
                    raise CheckpointError(
                        f"{checkpoint}, the best checkpoint, is not there any more: the best model cannot be loaded "
                        f"({inspection.name_newest_complete(checkpoint.parent)})"
                    )
                examined = inspection.examine_or_raise(checkpoint)
        load_best_model(self._trainer, own)
        with raise_on_all_ranks():
            if examined is not None:
                examined.check_again()

    def _finalize_training(self, own: Callable[..., Any], trial: Any, *more: Any) -> Any:
        """End a training by the Trainer's ``own`` function; what that would remove is marked as unfinished first."""
        args, state = self._trainer.args, self._trainer.state
        if self._session() is None or not args.should_save or args.save_total_limit != 1:
            return own(trial, *more)
        args.save_total_limit = None
        try:
            output = own(trial, *more)
        finally:
            args.save_total_limit = 1
        if state.best_model_checkpoint is not None:
            run_directory = Path(self._trainer._get_output_dir(trial))
            try:
                with self._lock(run_directory):
                    unfinished_marker.keep_only(Path(state.best_model_checkpoint), run_directory)
            except CheckpointError as error:  # another run is saving there
                logger.warning(f"checkpoints other than the best one stay in {run_directory} ({error})")
        return output

    def _report_failure(self, checkpoint: Path, session: TrainerSession, errors: list[BaseException]) -> None:
        first = errors[0] if errors else None
        message = f"{checkpoint} could not be saved: {first or 'the process that saves said why'}"
        if self._trainer.args.should_save:
            message += f"; {inspection.name_newest_complete(checkpoint.parent)}"
        if session.settings.save_failure == "stop":
            raise CheckpointError(f"{message}. The run ends here (save_failure='stop')") from first
        logger.error(f"{message}. Training goes on and tries again at the next save (save_failure='stop' would end it)")


def max_over_ranks(number: int, trainer: Trainer) -> int:
    """The largest of ``number`` over all processes."""
    if not is_distributed():
        return number
    # On the device of the process group: NCCL takes no CPU tensors.
    tensor = torch.tensor([number], device=trainer.args.device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor.item())


def is_write_failure(error: BaseException) -> bool:
    """Whether ``error`` comes from the disk, in the words of Python, safetensors, torch.save or its sharded form."""
    if isinstance(error, RuntimeError):
        said = ("inline_container", "PytorchStreamWriter", "iostream", "Parent directory")  # by torch.save
        return any(part in str(error) for part in said)
    shards: Any = getattr(error, "failures", None)  # of torch.distributed.checkpoint, by rank
    if isinstance(shards, dict):
        return any(is_write_failure(failure[0]) for failure in shards.values())
    return isinstance(error, (OSError, SafetensorError))
