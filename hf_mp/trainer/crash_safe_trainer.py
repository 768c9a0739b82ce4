"""``CrashSafe``: a Trainer that resumes from complete checkpoints only, and saves one on a signal."""

from __future__ import annotations

import signal
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.scaling.scalers import LossScaleError
from hf_mp.trainer.checkpoint_loader import CheckpointLoader
from hf_mp.trainer.checkpoint_saver import CheckpointSaver, max_over_ranks
from hf_mp.trainer.checkpoints import inspection, loaded_state, resuming
from hf_mp.trainer.checkpoints.lock import lock_directory
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, CheckpointError
from hf_mp.trainer.checkpoints.preemption import Preempted, PreemptionCallback
from hf_mp.trainer.model_loading import load_best_model, load_from_checkpoint
from hf_mp.trainer.session import TrainerSession

logger = logging.get_logger(__name__)


class CrashSafe(Trainer):
    """Saves and loads checkpoints of a Trainer as described in ``docs/checkpoints.md``. May be used as a mixin.

    Raises:
        CheckpointError: from ``train``, if another run uses the output directory, no checkpoint can be loaded
            (:class:`NoCheckpointError`: there is none), or a save failed with ``save_failure="stop"``.
        Preempted: from ``train``, after a signal and a checkpoint; a ``SystemExit``.
    """

    session: TrainerSession
    _resumed_from: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # No lock for single saves: train() holds it.
        self._saves = CheckpointSaver(self, lambda: self.session, lock=nullcontext)
        CheckpointLoader(self, lambda: self.session)
        self._preemption = PreemptionCallback(partial(max_over_ranks, trainer=self))
        self._resumption = resuming.Resumption()
        self.add_callback(self._preemption)
        self.add_callback(self._resumption)

    def train(self, resume_from_checkpoint: resuming.Wanted = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the stock Trainer, with a lock of the output directory and with signal handlers.

        ``resume_from_checkpoint=True``, or the path of an unfinished checkpoint, loads the newest complete one; a
        warning names newer ones and their problems.
        """
        preemption = self._preemption
        with ExitStack() as at_end:
            try:
                examined = self._begin(at_end, resume_from_checkpoint)
                at_end.enter_context(self._resumption.loading(examined))
                checkpoint = None if self._resumed_from is None else str(self._resumed_from)
                if self.session.settings.handle_preemption:
                    at_end.enter_context(preemption.handling_signals())
                output = super().train(checkpoint, *args, **kwargs)
                if not preemption.requested:
                    preemption.requested = self._save_after_late_signal()
            except LossScaleError as error:  # weights and optimizer are those of the last taken step
                self._keep_last_state(error)
                raise
        if preemption.requested:
            self._end_preempted()
        if preemption.received is not None:  # without a checkpoint, the signal has its default effect
            signal.raise_signal(getattr(signal, preemption.received))
        return output

    def _begin(self, at_end: ExitStack, wanted: resuming.Wanted) -> inspection.Examination | None:
        """Lock the directory, remove unfinished checkpoints, and return the one to resume from."""

        def lock_and_clean(run_directory: Path) -> None:
            at_end.enter_context(lock_directory(run_directory))
            resuming.remove_unfinished(run_directory, lock=nullcontext)

        examined = resuming.choose_checkpoint(self.args, wanted, lock_and_clean)
        self._resumed_from = None if examined is None else examined.checkpoint
        if examined is not None and self.args.should_save and not self.is_deepspeed_enabled:
            inspection.warn_of_missing_state(examined, self.args.world_size)
        return examined

    @property
    def _last_checkpoint(self) -> Path:
        return Path(str(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _save_after_late_signal(self) -> bool:
        """Save the last step if a process received a signal after it; return whether it has a checkpoint."""
        if not max_over_ranks(int(self._preemption.received is not None), self):
            return False
        # The best weights may have replaced the last ones.
        return self._ensure_last_checkpoint(may_save=not self.args.load_best_model_at_end)

    def _ensure_last_checkpoint(self, *, may_save: bool) -> bool:
        """Save the checkpoint of the last step if it is missing and ``may_save``; return whether there is one."""
        is_missing = max_over_ranks(int(not (self._last_checkpoint / MANIFEST_NAME).is_file()), self)
        if is_missing and may_save:
            self._save_checkpoint(cast(nn.Module, self.model), None)
        return may_save or not is_missing

    def _keep_last_state(self, error: LossScaleError) -> None:
        if not self.state.global_step:
            return
        try:
            self._ensure_last_checkpoint(may_save=True)
            if not self._saves.has_failed:
                error.add_note(
                    f"The weights and the optimizer's state of the last good step are in {self._last_checkpoint}."
                )
        except CheckpointError as failure:
            error.add_note(str(failure))

    def _end_preempted(self) -> None:
        checkpoint = self._last_checkpoint
        name = self._preemption.received or "a signal to another process"
        if self._saves.has_failed:
            raise CheckpointError(
                f"{name} ended the run, and {checkpoint.name} could not be saved: the messages above say why"
            )
        preempted = Preempted(name, str(checkpoint))
        if self.args.should_save:
            logger.warning(
                f"{preempted}: exit code {preempted.code}, and train(resume_from_checkpoint=True) goes on from there"
            )
        raise preempted

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_from_checkpoint(self, super()._load_from_checkpoint, resume_from_checkpoint, model)
        loaded_state.check_parameters(resume_from_checkpoint, cast(nn.Module, self.model if model is None else model))

    def _load_best_model(self) -> None:
        load_best_model(self, super()._load_best_model)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        if self._resumed_from is not None:
            self.state.best_model_checkpoint = resuming.find_best_checkpoint(
                self._resumed_from, self.state.best_model_checkpoint
            )
