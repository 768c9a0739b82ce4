"""``CrashSafe``: a Trainer that resumes from whole checkpoints only, and whose runs survive signals."""

from __future__ import annotations

import signal
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

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
    """Keeps the checkpoints of a Trainer, or of the base class that it is mixed into, as ``docs/checkpoints.md`` says.

    Raises:
        CheckpointError: from ``train``, where another run holds the output directory, no checkpoint can be resumed
            from (:class:`NoCheckpointError`: there is none yet), it holds values that would ruin the run, another run
            removed it while it was loaded, or one was not saved and ``save_failure="stop"``.
        Preempted: from ``train``, after a signal and a checkpoint; a ``SystemExit``.
    """

    session: TrainerSession
    _resumed_from: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Without a lock of its own: train() holds that of the directory, and nobody else gets it.
        self._saves = CheckpointSaver(self, lambda: self.session, lock=nullcontext)
        CheckpointLoader(self, lambda: self.session)
        self._preemption = PreemptionCallback(partial(max_over_ranks, trainer=self))
        self._resumption = resuming.Resumption()
        self.add_callback(self._preemption)
        self.add_callback(self._resumption)

    def train(self, resume_from_checkpoint: resuming.Wanted = None, *args: Any, **kwargs: Any) -> Any:
        """As the stock Trainer's, with the output directory locked and signals watched.

        ``resume_from_checkpoint=True`` takes the newest checkpoint that is whole, and a warning says which ones were
        passed over and why. So does the path of one that a kill left unfinished. A path is refused where that
        checkpoint is damaged or could run code.
        """
        watch = self._preemption
        with ExitStack() as at_end:
            try:
                # The lock before the signals: nothing is there to save yet while another run is waited for.
                examined = self._begin(at_end, resume_from_checkpoint)
                at_end.enter_context(self._resumption.loading(examined))
                checkpoint = None if self._resumed_from is None else str(self._resumed_from)
                if self.session.settings.handle_preemption:
                    at_end.enter_context(watch.handling_signals())
                output = super().train(checkpoint, *args, **kwargs)
                if not watch.requested and max_over_ranks(int(watch.received is not None), self):
                    # A signal after the last step: saved as it is, unless the best weights have replaced the last ones.
                    watch.requested = bool(self._last_checkpoint(save=not self.args.load_best_model_at_end))
            except LossScaleError as error:  # which leaves weights and optimizer as after the last good step
                self._keep_last_state(error)
                raise
        if watch.requested:
            self._end_preempted()
        # It came when the state of the last step was gone: it does what it would have done without us.
        if watch.received is not None:
            signal.raise_signal(getattr(signal, watch.received))
        return output

    def _begin(self, at_end: ExitStack, wanted: resuming.Wanted) -> inspection.Examination | None:
        """Lock, clear up after a killed run, and find the checkpoint to resume from."""

        def lock_and_clear_up(run_directory: Path) -> None:
            at_end.enter_context(lock_directory(run_directory))
            resuming.remove_unfinished(run_directory, lock=nullcontext)

        examined = resuming.choose_checkpoint(self.args, wanted, lock_and_clear_up)
        self._resumed_from = None if examined is None else examined.checkpoint
        if examined is not None and self.args.should_save and not self.is_deepspeed_enabled:
            inspection.warn_of_missing_state(examined, self.args.world_size)
        return examined

    def _last_checkpoint(self, *, save: bool) -> Path | None:
        """That of the last step; where it is not there, it is saved or None."""
        step = Path(str(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        is_missing = max_over_ranks(int(not (step / MANIFEST_NAME).is_file()), self)
        if is_missing and save:
            assert self.model is not None
            self._save_checkpoint(self.model, None)
        return None if is_missing and not save else step

    def _keep_last_state(self, error: LossScaleError) -> None:
        """Save a checkpoint of the last good step, which ``error`` left in place; a note of it says where."""
        if self.state.global_step:
            try:
                step = self._last_checkpoint(save=True)
                if not self._saves.has_failed:
                    error.add_note(f"The weights and the optimizer's state of the last good step are in {step}.")
            except CheckpointError as failure:
                error.add_note(str(failure))

    def _end_preempted(self) -> None:
        """Raise ``Preempted`` after its checkpoint was saved; a CheckpointError if that failed."""
        step = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        name = self._preemption.received or "a signal to another process"
        if self._saves.has_failed:
            raise CheckpointError(f"{name} ended the run, and {step} could not be saved: the messages above say why")
        preempted = Preempted(name, str(Path(str(self.args.output_dir), step)))
        if self.args.should_save:
            logger.warning(
                f"{preempted}: exit code {preempted.code}, and train(resume_from_checkpoint=True) goes on from there"
            )
        raise preempted

    # Loading

    # Transformers loads with strict=False and warnings: what does not fit is refused here, by name.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        loaded = self.model if model is None else model
        assert loaded is not None
        load_from_checkpoint(self, super()._load_from_checkpoint, resume_from_checkpoint, model)
        loaded_state.check_parameters(resume_from_checkpoint, loaded)

    def _load_best_model(self) -> None:
        load_best_model(self, super()._load_best_model)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        if self._resumed_from is not None:
            best = resuming.find_best_checkpoint(self._resumed_from, self.state.best_model_checkpoint)
            self.state.best_model_checkpoint = best
