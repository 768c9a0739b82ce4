"""``CrashSafe``: a mixin for a Trainer that resumes from whole checkpoints only, and whose runs survive signals."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from hf_mp.trainer.checkpoints import in_place, inspection, loaded_state
from hf_mp.trainer.checkpoints.lock import DirectoryLock
from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    NoCheckpointError,
    read_manifest,
)
from hf_mp.trainer.checkpoints.preemption import Preempted, PreemptionCallback, SignalWatch
from hf_mp.weights.ranks.placement import is_running, is_sharded

logger = logging.get_logger(__name__)

_OTHER_PROCESS = "the process that saves said why"


class _Saving(NamedTuple):
    """A save in progress, and what went wrong in this process."""

    checkpoint: Path
    errors: list[BaseException]
    best_before: str | None
    is_stuck: bool


# A sibling of a Trainer, not its subclass: `class Ours(CrashSafe, SomeTrainer)`.
_Base: Any = Trainer if TYPE_CHECKING else object


class CrashSafe(_Base):
    """Keeps the checkpoints of the Trainer that follows it among the bases, as ``docs/faults.md`` promises.

    Attributes:
        save_failure, handle_preemption, save_in_background: as in :class:`hf_mp.MixedPrecisionArguments`.
        precision_policy: for the manifest.

    Raises:
        CheckpointError: from ``train``, where another run holds the output directory, no checkpoint can be resumed
            from (:class:`NoCheckpointError`: there is none yet), or one was not saved and ``save_failure="stop"``.
        Preempted: from ``train``, after a signal and a checkpoint; a ``SystemExit``.
    """

    save_failure = "continue"
    handle_preemption = True
    save_in_background = False
    precision_policy: Any = "fp32"

    # What ends a training that cannot go on and leaves weights and optimizer as after the last good step.
    stuck_errors: ClassVar[tuple[type[Exception], ...]] = ()

    _saving: _Saving | None = None
    _written: tuple[_Saving, Future[None] | None] | None = None  # of which a thread may not have finished the last part
    _before_trouble: Path | None = None  # the last checkpoint that was saved while steps were not being skipped
    _last_save_failed = False
    _resumed_from: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._preemption = PreemptionCallback(SignalWatch(), self._largest)
        self.add_callback(self._preemption)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the stock Trainer's, with the output directory locked and signals watched.

        ``resume_from_checkpoint=True`` takes the newest checkpoint that is whole, and a warning says which ones were
        passed over and why. A path is refused where that checkpoint is damaged or could run code.
        """
        watch, lock = self._preemption.watch, DirectoryLock(Path(str(self.args.output_dir)))
        try:
            checkpoint = self._begin(lock, resume_from_checkpoint)
            if self.handle_preemption:
                watch.start()
            output = super().train(checkpoint, *args, **kwargs)
            self._settle()
            if not self._preemption.requested and self._largest(int(watch.received is not None)):
                # After the last step, as during its save; the best weights may be in the place of the last.
                self._preemption.requested = bool(self._last_checkpoint(save=not self.args.load_best_model_at_end))
        except self.stuck_errors as error:
            self._keep_last_state(error)
            raise
        finally:
            watch.stop()
            self._leave_thread()
            lock.__exit__()
        if self._preemption.requested:
            self._end_preempted()
        if watch.received is not None:  # after the last step, whose state is no longer there: as without us
            signal.raise_signal(getattr(signal, watch.received))
        return output

    def _begin(self, lock: DirectoryLock, wanted: str | bool | None) -> str | bool | None:
        """Lock, clear up after a killed run, and find the checkpoint to resume from."""
        run_directory = Path(str(self.args.output_dir))

        def begin() -> int:
            lock.__enter__()
            try:
                in_place.clear_up(run_directory)
            except OSError as error:
                logger.warning(f"{run_directory} cannot be cleared of what a killed run left ({error})")
            if wanted is True:
                return _choose(run_directory)
            if isinstance(wanted, (str, os.PathLike)):
                _refuse_problems(Path(wanted))
            return 0

        # The lowest, where each node has a directory of its own.
        step = self._for_all(begin)
        checkpoint = str(run_directory / f"{PREFIX_CHECKPOINT_DIR}-{step}") if wanted is True else wanted
        self._resumed_from = Path(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else None
        self._before_trouble = self._resumed_from
        if self._resumed_from is not None and self._resumed_from.is_dir():
            _warn_of_other_world_size(self._resumed_from, self.args.world_size)
            if self.args.should_save and not self.is_deepspeed_enabled:
                inspection.warn_of_missing_state(self._resumed_from, self.args.world_size)
        return checkpoint

    def _last_checkpoint(self, *, save: bool) -> Path | None:
        """That of the last step; where it is not there, it is saved or None."""
        self._settle()
        step = Path(str(self.args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        is_missing = bool(self._largest(int(not step.is_dir() or inspection.is_damaged(step))))
        if is_missing and save:
            assert self.model is not None
            self._save_checkpoint(self.model, None)
            self._settle()
        return None if is_missing and not save else step

    @property
    def is_stuck(self) -> bool:
        """Whether the last steps did not go through, so that the state saved now may be one that cannot go on."""
        return False

    def _keep_last_state(self, error: Exception) -> None:
        """Save what the last good step left, next to the previous checkpoint; ``error`` tells where both are."""
        before, step = self._before_trouble, None
        try:
            self._settle()
            before = self._before_trouble
            step = self._last_checkpoint(save=True) if self.state.global_step else None
        except CheckpointError as failure:
            error.add_note(str(failure))
        if step is not None and not self._last_save_failed:
            error.add_note(f"The weights and the optimizer's state as the last good step left them are in {step}.")
        if before is not None and before.is_dir() and before != step:
            error.add_note(f"{before} is the last checkpoint from before steps were skipped.")

    def _end_preempted(self) -> None:
        step = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        name = self._preemption.watch.received or "a signal to another process"
        if self._last_save_failed:
            raise CheckpointError(f"{name} ended the run, and {step} could not be saved: the messages above say why")
        preempted = Preempted(name, str(Path(str(self.args.output_dir), step)))
        if self.args.should_save:
            logger.warning(
                f"{preempted}: exit code {preempted.code}, and train(resume_from_checkpoint=True) goes on from there"
            )
        raise preempted

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The stock loop looks whether it is at its end after a step only: resumed there, it would train one step more.
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self._settle()

    # Several processes

    def _largest(self, number: int) -> int:
        """The largest of ``number`` over all processes."""
        if not is_running():
            return number
        tensor = torch.tensor([number], device=self.args.device)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return int(tensor.item())

    def _for_all(self, action: Callable[[], int | None]) -> int:
        """What ``action`` gives in the process that saves (the lowest, if several do); its failure is that of all."""
        least, error = -(2**62), None
        if self.args.should_save:
            try:
                least = -(action() or 0)
            except CheckpointError as failure:
                error = failure
        kinds = (CheckpointError, NoCheckpointError)
        failed = self._largest(0 if error is None else 1 + kinds.index(type(error)))
        if error is not None or failed:
            raise error or kinds[failed - 1](_OTHER_PROCESS)
        return -self._largest(least)

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the stock Trainer's."""
        # During a save, a process that left here would leave the others at the barrier that follows.
        with self._noting_failures() if _internal_call and self._saving is not None else nullcontext():
            super().save_model(output_dir, _internal_call=_internal_call)
        if _internal_call and self._saving is not None:
            # From here on, when training_args.bin has it: the Trainer would remove older ones before this one is whole.
            self.args.save_total_limit = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._saving is None:  # else once it is whole
            super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        assert self._saving is not None
        try:
            yield
        except BaseException as error:
            if not (_is_write_failure(error) or (self._saving.errors and isinstance(error, Exception))):
                raise
            self._saving.errors.append(error)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._settle()
        checkpoint = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        limit, save, world_size = self.args.save_total_limit, super()._save_checkpoint, self.args.world_size
        self._saving = saving = _Saving(checkpoint, [], self.state.best_model_checkpoint, self.is_stuck)
        # It reads nothing that training changes.
        about = {"step": self.state.global_step, "world_size": world_size, "precision": str(self.precision_policy)}
        complete = functools.partial(in_place.complete, checkpoint, **about)
        try:
            is_begun = self._went_well(lambda: in_place.begin(checkpoint, world_size), self.args.should_save)
            is_written = is_begun and self._went_well(lambda: save(model, trial))
            if is_written and not self.save_in_background:
                self._went_well(complete, self.args.should_save)
        finally:
            self._saving, self.args.save_total_limit = None, limit
        thread = None
        if is_written and self.save_in_background and self.args.should_save:
            pool = ThreadPoolExecutor(1, thread_name_prefix="hf_mp checkpoint")
            thread = pool.submit(complete)
            pool.shutdown(wait=False)
        self._written = saving, thread
        # A preempted run forgets its best checkpoint when the epoch ends: rotated after that, it would be removed.
        if not (is_written and self.save_in_background) or self._preemption.requested:
            self._settle()

    def _settle(self) -> None:
        """Wait for the thread of the last save, and take in how that went: a collective call."""
        if self._written is None:
            return
        (saving, thread), self._written = self._written, None
        error = None if thread is None else thread.exception()
        if error is not None and not _is_write_failure(error):
            raise error
        saving.errors.extend([] if error is None else [error])
        self._last_save_failed = bool(self._largest(int(bool(saving.errors))))
        if self._last_save_failed:
            self.state.best_model_checkpoint = saving.best_before
            self._report_failure(saving)
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(saving.checkpoint))
        if not saving.is_stuck:
            self._before_trouble = saving.checkpoint
        if self.args.should_save:
            self._rotate(saving.checkpoint)

    def _leave_thread(self) -> None:
        """Wait for a save's thread when an error ends training, and the other processes are not there to agree."""
        written, self._written = self._written, None
        if written is not None and written[1] is not None and (error := written[1].exception()) is not None:
            logger.error(f"{written[0].checkpoint} could not be saved: {error}")

    def _went_well(self, part: Callable[[], None], is_mine: bool = True) -> bool:
        """Do a part of a save, if it is this process's; whether all parts so far went well in every process."""
        assert self._saving is not None
        if is_mine:
            with self._noting_failures():
                part()
        return not self._largest(int(bool(self._saving.errors)))

    def _report_failure(self, saving: _Saving) -> None:
        first = next(iter(saving.errors), None)
        message = f"{saving.checkpoint} could not be saved: {first or _OTHER_PROCESS}"
        if self.args.should_save:
            in_place.take_back(saving.checkpoint)
            message += f"; {inspection.newest_whole_of(saving.checkpoint.parent)}"
        if self.save_failure == "stop":
            raise CheckpointError(f"{message}. The run ends here (save_failure='stop')") from first
        logger.error(f"{message}. Training goes on and tries again at the next save (save_failure='stop' would end it)")

    def _rotate(self, written: Path) -> None:
        best = self.state.best_model_checkpoint
        keep = [Path(path) for path in (best, self._before_trouble) if path]
        try:
            inspection.rotate(written.parent, self.args.save_total_limit, written=written, keep=keep)
        except OSError as error:
            logger.warning(f"older checkpoints in {written.parent} could not be removed ({error})")

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint, loaded = Path(resume_from_checkpoint), self.model if model is None else model
        assert loaded is not None
        with loaded_state.naming(checkpoint, "the model"):
            if (weights := checkpoint / SAFE_WEIGHTS_NAME).is_file() and not is_sharded(loaded):
                loaded_state.check_weights_file(weights, loaded)
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        loaded_state.check_parameters(checkpoint, loaded)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        known = set(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else set()
        with loaded_state.naming(checkpoint, "the state of the optimizer or the scheduler"):
            super()._load_optimizer_and_scheduler(checkpoint)
        if self.optimizer is not None:
            loaded_state.check_optimizer(checkpoint, self.optimizer)
        if self.lr_scheduler is not None:
            loaded_state.check_scheduler(checkpoint, self.lr_scheduler, known)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with loaded_state.naming(str(checkpoint), "the state of the random numbers"):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        self._settle()
        best = Path(str(self.state.best_model_checkpoint))
        self._for_all(lambda: _refuse_problems(best))
        super()._load_best_model()

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        # The best model is the one in the folder of the resumed checkpoint, wherever that one says that it lies.
        resumed, said = self._resumed_from, self.state.best_model_checkpoint
        if resumed is None or said is None:
            return
        beside = resumed.parent / Path(said).name
        if beside.resolve() == Path(said).resolve():
            return
        is_there = inspection.step_of(beside) is not None and beside.is_dir()
        self.state.best_model_checkpoint = str(beside) if is_there else None
        what = f"{beside} is taken" if is_there else "the best is sought anew; copy that checkpoint here to keep it"
        logger.warning(f"{resumed} names {said!r} as the best checkpoint, which is not in its folder: {what}")


def _choose(run_directory: Path) -> int:
    chosen, passed_over = inspection.find_newest_whole(run_directory)
    message = f"No valid checkpoint found in output directory ({run_directory})"
    if chosen is None and not passed_over:
        raise NoCheckpointError(f"{message}: there is none yet. Train without resume_from_checkpoint to begin anew")
    if chosen is None:
        raise CheckpointError(
            f"{message}:\n{passed_over}\nNone of them was changed. Copy a whole one there, or train without "
            "resume_from_checkpoint to begin anew"
        )
    if passed_over:
        logger.warning(f"resuming from {chosen}; newer ones were passed over:\n{passed_over}")
    return inspection.step_of(chosen) or 0


def _refuse_problems(checkpoint: Path) -> None:
    if checkpoint.is_dir() and (problems := inspection.find_problems(checkpoint)):
        has_manifest = (checkpoint / MANIFEST_NAME).is_file()
        raise CheckpointError(
            f"{checkpoint.name}: {'; '.join(problems)}\n{checkpoint} is not loaded: take another checkpoint "
            "(resume_from_checkpoint=True finds the newest whole one)"
            + (f". If you changed a file yourself, remove {MANIFEST_NAME}" if has_manifest else "")
        )


def _warn_of_other_world_size(checkpoint: Path, world_size: int) -> None:
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError:
        return  # of another node: the process that saves has checked it
    if manifest is not None and manifest.world_size != world_size:
        logger.warning(
            f"{checkpoint} was saved by {manifest.world_size} processes and this run has {world_size}: it goes on, but "
            "not bit for bit as the other would have"
        )


def _is_write_failure(error: BaseException) -> bool:
    """Whether ``error`` comes from the disk, in the words of Python, safetensors, torch.save or its sharded form."""
    if isinstance(error, RuntimeError):
        text = str(error)
        return any(part in text for part in ("inline_container", "PytorchStreamWriter", "iostream", "Parent directory"))
    shards: Any = getattr(error.__cause__ or error, "failures", None)  # of torch.distributed.checkpoint, by rank
    if isinstance(shards, dict):
        return any(_is_write_failure(failure[0]) for failure in shards.values())
    return isinstance(error, (OSError, SafetensorError))
