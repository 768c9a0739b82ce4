"""``MixedPrecisionCallback``: mixed precision for an existing Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.policy import PrecisionPolicy
from hf_mp.trainer.checkpoint_loader import CheckpointLoader
from hf_mp.trainer.checkpoint_saver import CheckpointSaver
from hf_mp.trainer.checkpoints import inspection, loaded_state
from hf_mp.trainer.checkpoints.resuming import Resumption, choose_checkpoint, find_best_checkpoint, remove_unfinished
from hf_mp.trainer.checks import (
    check_dtype_of_late_model,
    check_model,
    check_model_and_optimizer,
    check_no_other_precision,
    check_not_lean,
)
from hf_mp.trainer.find_trainer import (
    check_regional_compile,
    clear_prepared_mark,
    extend_method,
    find_calling_trainer,
    resumed_checkpoint,
)
from hf_mp.trainer.model_loading import load_from_checkpoint
from hf_mp.trainer.save_dtype import extend_save
from hf_mp.trainer.session import SessionProperties, TrainerSession
from hf_mp.trainer.settings import DEFAULT_PRECISION, PrecisionOptions, SessionSettings

# The excluded options need another optimizer, or a Trainer that handles signals.
_OPTIONS = {option.name for option in fields(PrecisionOptions)} - {
    "precision",
    "loss_scale",
    "free_gradients",
    "offload",
    "handle_preemption",
}


class MixedPrecisionCallback(SessionProperties, TrainerCallback):
    """Mixed precision, ``"fp16"`` by default, for any Trainer: the stock one, your subclass, or another library's.

    ``Trainer(..., callbacks=[MixedPrecisionCallback("fp16")])`` trains as :class:`MixedPrecisionTrainer` does, bit for
    bit, but SIGTERM and SIGUSR1 end the run without a checkpoint. The model is attached when the Trainer is created, a
    reference model in ``ref_model`` (TRL) when training begins. Checkpoints contain the loss scale in
    ``mixed_precision.json``; training logs contain ``loss_scale``, ``skipped_steps`` and ``headroom``. After training,
    the models are ordinary FP32 models; after an error, call :meth:`detach`.

    Args:
        precision: ``"fp16"``, ``"bf16"``, ``"fp32"`` (no change), a spelled-out policy or a :class:`PrecisionPolicy`;
            default: that of :class:`MixedPrecisionArguments`, else ``"fp16"``.
        tables, rules: as for :class:`hf_mp.autocast`; default ``"compact"`` and none.
        keep_attached: run evaluation and ``generate`` in autocast after ``train()``, too; default False.
        options: of :class:`MixedPrecisionArguments`: ``loss_scaler_settings``, ``fp32_head``, ``exact_generation``,
            ``on_overflow``, ``save_failure``, ``explain_overflows``, ``check_gradients``, ``histogram_steps``,
            ``precision_report``, ``precision_contract``, ``save_dtype``. Default, or None: the value there.

    Raises:
        ValueError, TypeError: for an unknown precision, a lean preset and unknown options; from the constructor of the
            Trainer, for unknown loss scaler settings, a second mixed precision, and models that hide their forward.
        CheckpointError: from ``train``, for a checkpoint that is missing, damaged or unsafe, contains invalid values,
            or was removed by another run.
        ScaleLeakError: from the first backward, if gradients depend on the loss scale.
    """

    def __init__(
        self,
        precision: str | torch.dtype | PrecisionPolicy = DEFAULT_PRECISION,
        *,
        tables: TableName = "compact",
        rules: Rules | None = None,
        keep_attached: bool = False,
        **options: Any,
    ) -> None:
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(
                f"{min(unknown)} is no option of MixedPrecisionCallback, which has {', '.join(sorted(_OPTIONS))}; "
                "MixedPrecisionTrainer has more"
            )
        self._given = {"precision": precision, "tables": tables, "rules": rules, **options}
        self.keep_attached = keep_attached
        self._begun_with: TrainingArguments | None = None  # of the training that on_train_begin prepared
        self._resumption = Resumption()
        check_not_lean(SessionSettings.of(None, self._given).policy)

    def _session_for(self, args: TrainingArguments) -> TrainerSession:
        settings = SessionSettings.of(args, self._given)
        check_not_lean(settings.policy)
        if self.session is not None and self.session.args is args and self.session.settings == settings:
            return self.session
        self.detach()
        self.session = TrainerSession(settings, args)
        return self.session

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Attach the model, before the Trainer creates its optimizer."""
        trainer = find_calling_trainer(self)
        self._extend(trainer)
        session = self._session_for(args)
        check_no_other_precision(args, session.settings.policy)
        if session.runtime is not None:
            check_regional_compile(trainer)
            if model is not None:
                check_model(model)
        if model is not None:
            session.begin(model)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make a later training wrap the model in DDP."""
        clear_prepared_mark(find_calling_trainer(self))

    on_predict: Any = on_evaluate

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach model and optimizer, and load the loss scale of a checkpoint."""
        trainer, session = find_calling_trainer(self), self._session_for(args)
        self._begun_with = args
        checkpoint = resumed_checkpoint(trainer)
        if trainer is not None:
            self._extend_and_reload(trainer, checkpoint)
        if session.runtime is not None:
            check_model_and_optimizer(model, optimizer, trainer)
            if checkpoint is not None:
                self._check_loaded(checkpoint, args, model, optimizer)
                state.best_model_checkpoint = find_best_checkpoint(checkpoint, state.best_model_checkpoint)
            check_regional_compile(trainer)
            if session.runtime.model is not model:
                check_no_other_precision(args, session.settings.policy)
                check_model(model)
                check_dtype_of_late_model(model, args, resumed=state.global_step > 0)
            session.begin(model)
            session.attach_optimizer(optimizer)
        session.record_contract(model)
        if trainer is not None:
            session.attach_reference_model(getattr(trainer, "ref_model", None))
            session.begin_run(trainer)
        if checkpoint is not None:
            session.load(checkpoint)
        session.on_train_begin(args, state, control)

    def _extend_and_reload(self, trainer: Trainer, checkpoint: Path | None) -> None:
        """Extend ``trainer``; if it was not extended before, load ``checkpoint`` again to check it."""
        was_extended = "_load_from_checkpoint" in vars(trainer)  # extend_method() sets it
        self._extend(trainer)
        if not was_extended and checkpoint is not None and not trainer.is_deepspeed_enabled:
            trainer._load_from_checkpoint(str(checkpoint), trainer.model_wrapped if trainer.is_fsdp_enabled else None)

    def _check_loaded(self, checkpoint: Path, args: TrainingArguments, model: nn.Module, optimizer: Any) -> None:
        examined = self._resumption.examined
        # train() of another library may have chosen the checkpoint, or this callback was added late.
        if examined is None or examined.checkpoint != checkpoint:
            examined = inspection.examine_named(checkpoint)
            self._resumption.examined = examined
            loaded_state.check_optimizer(checkpoint, optimizer)
        if args.should_save:
            inspection.warn_of_missing_state(examined, args.world_size)
        loaded_state.check_parameters(checkpoint, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise a ValueError if training began before this callback was added."""
        if self._begun_with is not args and self._session_for(args).runtime is not None:
            raise ValueError(
                f"MixedPrecisionCallback was added after step {state.global_step} of a training that had begun without "
                "it: give it to the Trainer before train(), as in Trainer(..., callbacks=[MixedPrecisionCallback()])"
            )
        self._resumption.on_step_begin(args, state, control)
        if self.session is not None:
            self.session.on_step_begin(args, state, control, **kwargs)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session is not None:
            self.session.on_optimizer_step(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the loss scale and its statistics to a training log and its copy in the history."""
        if self.session is None or logs is None:
            return
        entries = self.session.log_entries(logs)
        logs.update(entries)
        latest = state.log_history[-1] if state.log_history else {}
        if "loss" in latest and latest.get("step") == state.global_step:
            latest.update(entries)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session is not None:
            self.session.on_train_end(args, state, control)
            self.session.end(keep_attached=self.keep_attached)
        self._begun_with = None

    def detach(self) -> None:
        """Make the model an ordinary FP32 model; a later ``train()`` attaches it again."""
        if self.session is not None:
            self.session.detach()

    def _extend(self, trainer: Trainer | None) -> None:
        if trainer is None:
            return
        callbacks = trainer.callback_handler.callbacks
        _check_only_session(trainer, callbacks)
        # Before reporting callbacks, which get the entries that this one adds to the logs.
        callbacks.remove(self)
        callbacks.insert(0, self)
        extend_method(trainer, "train", functools.partial(_train, trainer))
        extend_method(trainer, "_load_from_checkpoint", functools.partial(load_from_checkpoint, trainer))
        extend_save(trainer, lambda: _session_of(trainer))
        CheckpointSaver(trainer, lambda: _mixed_session_of(trainer))
        CheckpointLoader(trainer, lambda: _mixed_session_of(trainer))


def _check_only_session(trainer: Trainer, callbacks: Sequence[TrainerCallback]) -> None:
    if isinstance(trainer, SessionProperties):
        raise ValueError(
            "MixedPrecisionCallback is for other Trainers: MixedPrecisionTrainer is in mixed precision already, "
            "remove the callback"
        )
    if sum(isinstance(callback, MixedPrecisionCallback) for callback in callbacks) > 1:
        raise ValueError(
            "this Trainer has more than one MixedPrecisionCallback, and a loss can be scaled only once: leave one"
        )


def _train(trainer: Trainer, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``own`` is the original ``train``."""
    callback = _callback_of(trainer)
    if callback is None or callback.mixed_precision is None:
        return own(*args, **kwargs)
    if not args:
        args = (kwargs.pop("resume_from_checkpoint", None),)
    wanted, *others = args
    examined = choose_checkpoint(trainer.args, wanted, remove_unfinished)
    chosen = None if examined is None else str(examined.checkpoint)
    # train() of another library may have no parameters.
    arguments = () if chosen is None and not others else (chosen, *others)
    with callback._resumption.loading(examined):
        return own(*arguments, **kwargs)


def _session_of(trainer: Trainer) -> TrainerSession | None:
    callback = _callback_of(trainer)
    return None if callback is None else callback.session


def _mixed_session_of(trainer: Trainer) -> TrainerSession | None:
    session = _session_of(trainer)
    return None if session is None or session.runtime is None else session


def _callback_of(trainer: Trainer) -> MixedPrecisionCallback | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, MixedPrecisionCallback)), None)
