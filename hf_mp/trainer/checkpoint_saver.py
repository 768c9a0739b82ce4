"""``CheckpointSaver``: wraps the save methods of a Trainer so that failed saves are removed."""

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
    """Wraps the save methods of ``trainer``, so that a checkpoint is either complete or removed.

    Older checkpoints are deleted, and the new one is pushed to the Hub, after its manifest is written. If a save fails
    on any rank, it is removed and an error is logged, or training ends (``save_failure="stop"``). A run that is
    resumed after its last step takes no further step. A damaged best model is not loaded.

    Args:
        trainer: any Trainer.
        session: returns the session of the run, or None to leave a save to the Trainer.
        lock: returns the lock of a directory, which is held during each save.

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
        self._errors: list[BaseException] | None = None  # failed writes of the current save on this rank
        # Transformers has no callback before a save, and none before older checkpoints are removed.
        extend_method(trainer, "_save_checkpoint", self._save)
        extend_method(trainer, "save_model", self._save_model)
        extend_method(trainer, "_push_from_checkpoint", self._push)
        extend_method(trainer, "_run_epoch", self._run_epoch)
        extend_method(trainer, "_load_best_model", self._load_best_model)
        extend_method(trainer, "_finalize_training", self._finalize_training)

    def _save(self, own: Callable[..., None], model: Any, trial: Any, *more: Any) -> None:
        """Replace ``own``, the original ``_save_checkpoint``. A collective call."""
        session = self._session()
        if session is None:
            own(model, trial, *more)
            return
        state, args = self._trainer.state, self._trainer.args
        checkpoint = Path(self._trainer._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        limit, best_before = args.save_total_limit, state.best_model_checkpoint
        errors: list[BaseException] = []
        self.has_failed, self._errors = True, errors
        try:
            with ExitStack() as at_end:
                # Each part runs only if no earlier one failed on any rank.
                self.has_failed = not (
                    self._run_part(lambda: self._begin(checkpoint, at_end), args.should_save)
                    and self._run_part(lambda: own(model, trial, *more))
                    and self._run_part(lambda: self._complete(checkpoint, session), args.should_save)
                )
                # `own` removed no checkpoints: _save_model() has set the limit to None.
                if args.should_save and not self.has_failed:
                    unfinished_marker.rotate(checkpoint.parent, limit, state.best_model_checkpoint)
        finally:
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
        """Run ``part`` if ``is_mine``; return whether no part of this save failed on any rank. A collective call."""
        if is_mine:
            with self._recording_failures():
                part()
        return not max_over_ranks(len(self._errors or ()), self._trainer)

    @contextmanager
    def _recording_failures(self) -> Iterator[None]:
        """Append failed writes to ``_errors`` instead of raising them."""
        assert self._errors is not None
        try:
            yield
        except BaseException as error:
            # After a failed write, any exception is probably its consequence.
            is_consequence = bool(self._errors) and isinstance(error, Exception)
            if not (is_write_failure(error) or is_consequence):
                raise
            self._errors.append(error)

    def _save_model(self, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Replace ``Trainer.save_model``; failed writes of a checkpoint are recorded."""
        is_part = self._errors is not None and kwargs.get("_internal_call", False)
        # A rank that raises would not reach the barrier after this.
        with self._recording_failures() if is_part else nullcontext():
            own(*args, **kwargs)
        if is_part:
            # Do not remove older checkpoints before the manifest is written. training_args.bin, which contains the
            # limit, is saved by now.
            self._trainer.args.save_total_limit = None

    def _push(self, own: Callable[..., None], checkpoint_folder: str) -> None:
        if self._errors is None:  # otherwise _save() pushes the complete checkpoint
            own(checkpoint_folder)

    def _run_epoch(self, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        state = self._trainer.state
        # The Trainer checks max_steps only after a step.
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
                # The stock Trainer only warns, and keeps the last weights.
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
        """Replace ``own``, so that checkpoints are marked as unfinished before their removal."""
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
            except CheckpointError as error:  # another run holds the lock
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
    """Return the maximum of ``number`` over all ranks. A collective call."""
    if not is_distributed():
        return number
    # NCCL does not support CPU tensors.
    tensor = torch.tensor([number], device=trainer.args.device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor.item())


def is_write_failure(error: BaseException) -> bool:
    """Return whether Python, safetensors, torch.save or torch.distributed.checkpoint failed to write a file."""
    if isinstance(error, RuntimeError):
        texts_of_torch_save = ("inline_container", "PytorchStreamWriter", "iostream", "Parent directory")
        return any(text in str(error) for text in texts_of_torch_save)
    failures: Any = getattr(error, "failures", None)  # of torch.distributed.checkpoint, by rank
    if isinstance(failures, dict):
        return any(is_write_failure(failure[0]) for failure in failures.values())
    return isinstance(error, (OSError, SafetensorError))
