"""``MixedPrecisionCallback``: mixed precision for any Trainer that exists, through its callbacks alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

# A callback can neither replace the Trainer's optimizer nor end its training in a checkpoint.
_OPTIONS = {option.name for option in fields(PrecisionOptions)} - {
    "precision",
    "loss_scale",
    "free_gradients",
    "offload",
    "handle_preemption",
}


class MixedPrecisionCallback(SessionProperties, TrainerCallback):
    """Mixed precision, ``"fp16"`` by default, for any Trainer: the stock one, your subclass, or another library's.

    The Trainer's code does not change: ``Trainer(..., callbacks=[MixedPrecisionCallback("fp16")])`` trains as
    :class:`MixedPrecisionTrainer` does, bit for bit. The model is attached when the Trainer is made, before its
    optimizer; a reference model in the Trainer's ``ref_model`` (TRL) is attached when training begins. Each checkpoint
    has the state of the loss scale in ``mixed_precision.json``; training logs have ``loss_scale``, ``skipped_steps``
    and ``headroom``. When training ends, the models are ordinary FP32 models. After an error, or to take the callback
    off a Trainer, call :meth:`detach`.

    SIGTERM and SIGUSR1 end the run without a checkpoint; :class:`MixedPrecisionTrainer` saves one.

    Args:
        precision: ``"fp16"``, ``"bf16"``, ``"fp32"`` (which changes nothing), a spelled-out policy or a
            :class:`PrecisionPolicy`; default: the precision of the arguments (:class:`MixedPrecisionArguments`), else
            ``"fp16"`` on every machine.
        tables, rules: as for :class:`hf_mp.autocast`; default ``"compact"`` and none.
        keep_attached: leave the model attached after ``train()``, so that evaluation and ``generate`` run under
            autocast; default False.
        options: these options of :class:`MixedPrecisionArguments`, which do not change how the Trainer steps:
            ``loss_scaler_settings``, ``fp32_head``, ``exact_generation``, ``on_overflow``, ``save_failure``,
            ``explain_overflows``, ``check_gradients``, ``histogram_steps``, ``precision_report``,
            ``precision_contract``, ``save_dtype``. Default, or None: what the Trainer's arguments say, else the default
            there.

    Raises:
        ValueError, TypeError: when made, for an unknown precision, a lean preset and unknown options. When the Trainer
            is made, for settings that the loss scaler does not have, a second mixed precision, and models that hide
            their forward.
        CheckpointError: from ``train``, before anything is loaded, for a checkpoint that is missing, damaged or unsafe;
            before the first step, for one with values that would ruin the run, or that another run removed meanwhile.
        ScaleLeakError: from the first backward, if gradients change with the loss scale.
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
        self._trains_with: TrainingArguments | None = None
        self._resumption = Resumption()
        check_not_lean(SessionSettings.of(None, self._given).policy)

    def _session_for(self, args: TrainingArguments) -> TrainerSession:
        settings = SessionSettings.of(args, self._given)
        check_not_lean(settings.policy)
        if self.session is None or self.session.args is not args or self.session.settings != settings:
            self.detach()
            self.session = TrainerSession(settings, args)
        return self.session

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Attach the model, before the Trainer makes its optimizer."""
        # Before anything is attached: a second callback, or our own Trainer, is refused there.
        self._come_first(find_calling_trainer(self))
        session = self._session_for(args)
        check_no_other_precision(args, session.settings.policy)
        if session.runtime is not None:
            check_regional_compile(find_calling_trainer(self))
        if model is not None:
            if session.runtime is not None:
                check_model(model)
            session.begin(model)

    # accelerate marks a model as prepared in an evaluation, and then leaves it out of DDP.
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have a later training wrap the model again; after predict() too."""
        clear_prepared_mark(find_calling_trainer(self))

    on_predict: Any = on_evaluate

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Guard the optimizer, attach a model that ``model_init`` made, and load the state of a checkpoint."""
        trainer, session = find_calling_trainer(self), self._session_for(args)
        self._trains_with = args
        # Added after the Trainer was made, and called first when the checkpoint has been loaded.
        is_late = trainer is not None and "_load_from_checkpoint" not in vars(trainer)
        self._come_first(trainer)
        checkpoint = resumed_checkpoint(trainer)
        if trainer is not None and checkpoint is not None and is_late and not trainer.is_deepspeed_enabled:
            trainer._load_from_checkpoint(str(checkpoint), trainer.model_wrapped if trainer.is_fsdp_enabled else None)
        if session.runtime is None:
            session.watch_contract(model)
            if checkpoint is not None:
                session.load(checkpoint)
            return
        # The Trainer has made its optimizer and loaded a checkpoint by now.
        check_model_and_optimizer(model, optimizer, trainer)
        if checkpoint is not None:
            self._check_loaded(checkpoint, args, model, optimizer)
            state.best_model_checkpoint = find_best_checkpoint(checkpoint, state.best_model_checkpoint)
        check_regional_compile(trainer)
        if session.runtime.model is not model:
            check_no_other_precision(args, session.settings.policy)
            check_model(model)
            check_dtype_of_late_model(model, args, resumed=state.global_step > 0)
        # The optimizer is guarded in place, because the Trainer and accelerate keep the one that they have.
        session.begin(model)
        session.attach_optimizer(optimizer)
        session.watch_contract(model)
        if trainer is not None:
            session.attach_reference_model(getattr(trainer, "ref_model", None))
            session.begin_run(trainer)
        if checkpoint is not None:
            session.load(checkpoint)
        session.on_train_begin(args, state, control)

    def _check_loaded(self, checkpoint: Path, args: TrainingArguments, model: nn.Module, optimizer: Any) -> None:
        examined = self._resumption.examined
        # One that a library's train() named, or before this callback was added, is read already: it is not trained on.
        if examined is None or checkpoint != examined.checkpoint:
            self._resumption.examined = examined = inspection.examine_named(checkpoint)
            loaded_state.check_optimizer(checkpoint, optimizer)
        if args.should_save:
            inspection.warn_of_missing_state(examined, args.world_size)
        loaded_state.check_parameters(checkpoint, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise if training began before this callback was added: it would have no effect."""
        if self._trains_with is not args and self._session_for(args).runtime is not None:
            raise ValueError(
                f"MixedPrecisionCallback was added after step {state.global_step} of a training that had begun without "
                "it: give it to the Trainer before train(), as in Trainer(..., callbacks=[MixedPrecisionCallback()])"
            )
        self._resumption.on_step_begin(args, state, control)
        if self.session is not None:
            self.session.on_step_begin(args, state, control, **kwargs)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the precision contract after the first step."""
        if self.session is not None:
            self.session.on_optimizer_step(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the loss scale and its statistics to a training log, also in the history and for later callbacks."""
        if self.session is None or logs is None:
            return
        # Trainer.log has copied `logs` to the history already, and hands this very dict to the callbacks that follow.
        logs.update(entries := self.session.log_entries(logs))
        latest = state.log_history[-1] if state.log_history else {}
        if "loss" in latest and latest.get("step") == state.global_step:
            latest.update(entries)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the run's report, if asked; leave an ordinary FP32 model, unless ``keep_attached``."""
        if self.session is not None:
            self.session.on_train_end(args, state, control)
            self.session.end(keep_attached=self.keep_attached)
        self._trains_with = None

    def detach(self) -> None:
        """Leave the model as an ordinary FP32 model; a later ``train()`` attaches it again."""
        if self.session is not None:
            self.session.detach()

    def _come_first(self, trainer: Trainer | None) -> None:
        """Move to the front of the Trainer's callbacks and extend its train and save; a ValueError for a second one."""
        if isinstance(trainer, SessionProperties):
            raise ValueError(
                "MixedPrecisionCallback is for other Trainers: MixedPrecisionTrainer is in mixed precision already, "
                "remove the callback"
            )
        if trainer is not None:
            callbacks = trainer.callback_handler.callbacks
            if sum(isinstance(other, MixedPrecisionCallback) for other in callbacks) > 1:
                raise ValueError(
                    "this Trainer has more than one MixedPrecisionCallback, and a loss can be scaled only once: leave "
                    "one"
                )
            # To the front, so that those which report see what this one adds to the logs.
            callbacks.remove(self)
            callbacks.insert(0, self)
            extend_method(trainer, "train", functools.partial(_train, trainer))
            extend_method(trainer, "_load_from_checkpoint", functools.partial(load_from_checkpoint, trainer))
            extend_save(trainer, lambda: _session_of(trainer))
            # With FP32, saves and loads are left to the Trainer alone.
            CheckpointSaver(trainer, lambda: _session_of(trainer, in_fp32=False))
            CheckpointLoader(trainer, lambda: _session_of(trainer, in_fp32=False))


def _train(trainer: Trainer, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have ``own``, the ``train`` of ``trainer``, resume from a checkpoint that is whole."""
    callback = _callback_of(trainer)
    if callback is None or callback.mixed_precision is None:
        return own(*args, **kwargs)
    wanted, *others = args or (kwargs.pop("resume_from_checkpoint", None),)
    examined = choose_checkpoint(trainer.args, wanted, remove_unfinished)
    chosen = None if examined is None else str(examined.checkpoint)
    # A library's own train() may take no argument at all.
    given = () if chosen is None and not others else (chosen, *others)
    with callback._resumption.loading(examined):
        return own(*given, **kwargs)


def _session_of(trainer: Trainer, *, in_fp32: bool = True) -> TrainerSession | None:
    """That of the callback that ``trainer`` has now; None without one."""
    callback = _callback_of(trainer)
    if callback is None or (callback.mixed_precision is None and not in_fp32):
        return None
    return callback.session


def _callback_of(trainer: Trainer) -> MixedPrecisionCallback | None:
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, MixedPrecisionCallback)), None)
