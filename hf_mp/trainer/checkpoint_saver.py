"""``CheckpointSaver``: removes failed saves of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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

    ``session`` returns the session of the run, or None to leave a save to the Trainer; ``lock`` the lock of a
    directory. ``has_failed`` is whether the last save failed.
    """

    def __init__(
        self,
        trainer: Trainer,
        session: Callable[[], TrainerSession | None],
        lock: Callable[[Path], AbstractContextManager[Any]] = lock_directory,
    ) -> None:
        self.has_failed = False
        self._trainer, self._session, self._lock = trainer, session, lock
        self._errors: list[BaseException] | None = None  # failed writes on this rank; None outside of a save
        # Transformers has no callback before a save, and none before older checkpoints are removed. Each replacement is
        # called with the original method.
        replacements: dict[str, Callable[..., Any]] = {
            "_save_checkpoint": self._save,
            "save_model": self._save_model,
            "_push_from_checkpoint": self._push,
            "_run_epoch": self._run_epoch,
            "_load_best_model": self._load_best_model,
            "_finalize_training": self._finalize_training,
        }
        for method, replacement in replacements.items():
            extend_method(trainer, method, replacement)

    def _save(self, own: Callable[..., None], model: Any, trial: Any, *more: Any) -> None:
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
            self._run_parts(checkpoint, session, limit, lambda: own(model, trial, *more))
        finally:
            self._errors, args.save_total_limit = None, limit
        if self.has_failed:
            state.best_model_checkpoint = best_before
            self._report_failure(checkpoint, session, errors)
            return
        if args.push_to_hub:
            self._trainer._push_from_checkpoint(str(checkpoint))

    def _run_parts(
        self, checkpoint: Path, session: TrainerSession, limit: int | None, write_files: Callable[[], None]
    ) -> None:
        """Run the parts of a save until one fails on any rank; set ``has_failed``."""
        saves = self._trainer.args.should_save
        with ExitStack() as at_end:
            self.has_failed = not (
                self._run_part(lambda: self._begin(checkpoint, at_end), saves)
                and self._run_part(write_files)
                and self._run_part(lambda: self._complete(checkpoint, session), saves)
            )
            # write_files() removed no checkpoints: _save_model() has set the limit to None.
            if saves and not self.has_failed:
                unfinished_marker.rotate(checkpoint.parent, limit, self._trainer.state.best_model_checkpoint)

    def _begin(self, checkpoint: Path, at_end: ExitStack) -> None:
        at_end.enter_context(self._lock(checkpoint.parent))
        at_end.callback(lambda: unfinished_marker.abort_save(checkpoint) if self.has_failed else None)
        unfinished_marker.begin(checkpoint)

    def _complete(self, checkpoint: Path, session: TrainerSession) -> None:
        args = self._trainer.args
        if not args.save_only_model:
            session.save(checkpoint)
        unfinished_marker.complete(
            checkpoint,
            step=self._trainer.state.global_step,
            world_size=args.world_size,
            precision=str(session.settings.policy),
        )

    def _run_part(self, part: Callable[[], None], is_mine: bool = True) -> bool:
        """Return whether no part of this save failed on any rank. A collective call."""
        if is_mine:
            with self._recording_failures():
                part()
        return not max_over_ranks(int(bool(self._errors)), self._trainer)

    @contextmanager
    def _recording_failures(self) -> Iterator[None]:
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
        is_part_of_checkpoint = self._errors is not None and kwargs.get("_internal_call", False)
        if not is_part_of_checkpoint:
            own(*args, **kwargs)
            return
        # Failed writes are recorded: a rank that raises would not reach the next barrier.
        with self._recording_failures():
            own(*args, **kwargs)
        # Keep older checkpoints until the manifest is written. training_args.bin, with the limit, is saved by now.
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
        examined: inspection.Examination | None = None
        with raise_on_all_ranks():
            if self._trainer.args.should_save:
                examined = _examine_best(Path(str(self._trainer.state.best_model_checkpoint)))
        load_best_model(self._trainer, own)
        with raise_on_all_ranks():
            if examined is not None:
                examined.check_again()

    def _finalize_training(self, own: Callable[..., Any], trial: Any, *more: Any) -> Any:
        """Mark checkpoints as unfinished before their removal."""
        args = self._trainer.args
        if self._session() is None or not args.should_save or args.save_total_limit != 1:
            return own(trial, *more)
        args.save_total_limit = None
        try:
            output = own(trial, *more)
        finally:
            args.save_total_limit = 1
        best = self._trainer.state.best_model_checkpoint
        if best is not None:
            self._keep_only(Path(best), Path(self._trainer._get_output_dir(trial)))
        return output

    def _keep_only(self, best: Path, run_directory: Path) -> None:
        try:
            with self._lock(run_directory):
                unfinished_marker.keep_only(best, run_directory)
        except CheckpointError as error:  # another run holds the lock
            logger.warning(f"checkpoints other than the best one stay in {run_directory} ({error})")

    def _report_failure(self, checkpoint: Path, session: TrainerSession, errors: list[BaseException]) -> None:
        first = errors[0] if errors else None
        message = f"{checkpoint} could not be saved: {first or 'the process that saves said why'}"
        if self._trainer.args.should_save:
            message += f"; {inspection.name_newest_complete(checkpoint.parent)}"
        if session.settings.save_failure == "stop":
            raise CheckpointError(f"{message}. The run ends here (save_failure='stop')") from first
        logger.error(f"{message}. Training goes on and tries again at the next save (save_failure='stop' would end it)")


def _examine_best(checkpoint: Path) -> inspection.Examination:
    # The stock Trainer only warns, and keeps the last weights.
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint}, the best checkpoint, is not there any more: the best model cannot be loaded "
            f"({inspection.name_newest_complete(checkpoint.parent)})"
        )
    return inspection.examine_or_raise(checkpoint)


def max_over_ranks(number: int, trainer: Trainer) -> int:
    """A collective call."""
    if not is_distributed():
        return number
    # NCCL does not support CPU tensors.
    tensor = torch.tensor([number], device=trainer.args.device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor.item())


def is_write_failure(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        texts_of_torch_save = ("inline_container", "PytorchStreamWriter", "iostream", "Parent directory")
        return any(text in str(error) for text in texts_of_torch_save)
    failures: Any = getattr(error, "failures", None)  # by rank, of torch.distributed.checkpoint
    if isinstance(failures, dict):
        return any(is_write_failure(failure[0]) for failure in failures.values())
    return isinstance(error, (OSError, SafetensorError))
