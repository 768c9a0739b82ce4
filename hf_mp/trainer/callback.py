"""``MixedPrecisionCallback``: mixed precision for any Trainer that exists, through its callbacks alone."""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.diagnostics.overflow import explain_overflows
from hf_mp.diagnostics.overflow_report import OverflowReport
from hf_mp.policy import LOWER_PRECISION_DTYPES, PrecisionPolicy
from hf_mp.scaling.scalers import make_loss_scaler
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.checkpoints.finishing import finish
from hf_mp.trainer.checkpoints.in_place import InPlaceSaves, clear_up, refuse_damaged
from hf_mp.trainer.checkpoints.inspection import warn_of_missing_state
from hf_mp.trainer.reporting import ReportSettings, TrainerReporting
from hf_mp.trainer.session import (
    STATE_NAME,
    asks_for_explanation,
    load_runtime_state,
    overflow_directory,
    policy_of,
    refuse_other_precision,
    tell_accelerate,
    unwrap_optimizer,
)

logger = logging.get_logger(__name__)

# The runtimes that callbacks made: the callback of a newer Trainer takes their models over.
_runtimes: weakref.WeakSet[MixedPrecision] = weakref.WeakSet()


class MixedPrecisionCallback(TrainerCallback, ExportableState):
    """Mixed precision for a Trainer that is stock, subclassed, or of another library: its code stays as it is.

    ``Trainer(..., callbacks=[MixedPrecisionCallback("fp16")])`` trains as :class:`MixedPrecisionTrainer` does, bit for
    bit. The model is attached when the Trainer is made (one that was loaded in FP16/BF16 is given FP32 masters before
    the optimizer exists), the optimizer is guarded when training begins, and the state of the loss scale is in each
    checkpoint's ``trainer_state.json``. Training logs carry ``loss_scale``, ``skipped_steps`` and ``headroom``. When
    training ends, the model is an ordinary FP32 model.

    To take it off a Trainer, :meth:`detach` it before ``trainer.remove_callback``.

    A second model of the Trainer (the reference model of DPO) is not attached: it runs in the dtype it was loaded in.

    Args:
        precision: a preset (``"fp16"``, ``"bf16"``, ``"fp32"``, which changes nothing), a spelled-out policy or a
            :class:`PrecisionPolicy`; default: what the Trainer's arguments say if they are
            :class:`MixedPrecisionArguments`, else ``"fp16"``.
        loss_scaler_settings: keyword arguments for the loss scaler that the policy names, as in
            ``{"init_scale": 4096, "headroom": 4}``; default: those of ``MixedPrecisionArguments``, else none.
        tables: whose op lists autocast applies, as for :class:`hf_mp.MixedPrecision`; default ``"compact"``.
        rules: own rules of autocast by op and by module name, as for :class:`hf_mp.autocast`; default none.
        explain_overflows: have skipped steps explained (:func:`hf_mp.explain_overflows`); default: what
            ``MixedPrecisionArguments`` say, else True.
        keep_overflow_batches: keep failing batches and their reports in ``OUTPUT_DIR/overflows``; default: what
            ``MixedPrecisionArguments`` say, else False.
        histogram_steps, histogram_layers, precision_report: as in :class:`MixedPrecisionArguments`; default: what they
            say, else nothing is recorded.
        keep_attached: leave the model attached after ``train()``, so that evaluation and ``generate`` run under
            autocast; default False.

    Attributes:
        mixed_precision: the :class:`MixedPrecision` runtime of the current model, with its ``stats``; None before the
            Trainer is made, and with ``precision="fp32"``.
        overflow_reports: an :class:`OverflowReport` for each skipped step of the current model that was explained.

    Raises:
        ValueError: when made, for an unknown precision, a lean preset (there the Trainer would have to leave the
            optimizer to us) and settings that the loss scaler does not have. When the Trainer is made, for another
            mixed precision beside ours (``fp16=True``, a second callback, :class:`MixedPrecisionTrainer`) and for
            models that hide their forward or have nothing to train.
        CheckpointError: when training begins, for a checkpoint that is not what its manifest says.
        TypeError: for settings that JSON cannot hold.
    """

    # What the Trainer sets on a callback that it restores; on_train_begin reads the same from the Trainer's state.
    saved_state: Mapping[str, Any] | None = None

    def __init__(
        self,
        precision: str | PrecisionPolicy | None = None,
        *,
        loss_scaler_settings: Mapping[str, Any] | None = None,
        tables: TableName = "compact",
        rules: Rules | None = None,
        explain_overflows: bool | None = None,
        keep_overflow_batches: bool | None = None,
        histogram_steps: int | None = None,
        histogram_layers: Sequence[str] | None = None,
        precision_report: bool | None = None,
        keep_attached: bool = False,
    ) -> None:
        self.precision = precision
        self.explain_overflows = explain_overflows
        self.keep_overflow_batches = keep_overflow_batches
        self.loss_scaler_settings = None if loss_scaler_settings is None else dict(loss_scaler_settings)
        self.tables: TableName = tables
        self.rules = rules
        self.keep_attached = keep_attached
        self.report_settings: dict[str, Any] = {
            "histogram_steps": histogram_steps,
            "histogram_layers": histogram_layers,
            "precision_report": precision_report,
        }
        self.reporting = TrainerReporting()
        ReportSettings(**_given(self.report_settings))  # refuse wrong settings now
        self.mixed_precision: MixedPrecision | None = None
        self.overflow_reports: list[OverflowReport] = []
        self._model: weakref.ref[nn.Module] | None = None  # that mixed_precision was made for
        self._callbacks: list[TrainerCallback] = []  # of the Trainer, while it trains
        self._saves = InPlaceSaves()
        self._warned_of_order = False
        json.dumps(self.loss_scaler_settings)  # the Trainer writes them into its checkpoints
        if precision is not None:  # refuse wrong settings now
            self._make_runtime(PrecisionPolicy.parse(precision), loss_scaler_settings or {})

    def _make_runtime(self, policy: PrecisionPolicy, settings: Mapping[str, Any]) -> MixedPrecision:
        if policy.is_lean:
            usual = str(policy).removesuffix("-lean")
            raise ValueError(
                f"precision={str(policy)!r} keeps the FP32 masters in the optimizer, which a callback cannot replace: "
                f"the Trainer owns it. Use MixedPrecisionCallback({usual!r}), or MixedPrecisionTrainer with "
                f"precision={str(policy)!r}"
            )
        scaler = make_loss_scaler(policy.loss_scale, **settings)
        return MixedPrecision(policy, loss_scaler=scaler, tables=self.tables, rules=self.rules)

    # The Trainer's events

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Attach the model, before the Trainer makes its optimizer."""
        self._come_first()
        policy = policy_of(args, self.precision)
        refuse_other_precision(args, policy)
        if policy.is_mixed:
            clear_up(args)
        if model is not None and policy.is_mixed:
            self._attach(model, args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Guard the optimizer, attach a model that ``model_init`` made, and take over the state of a checkpoint."""
        self._come_first()
        policy = policy_of(args, self.precision)
        # The Trainer expects an entry here for each callback, also in the state of a checkpoint that has none.
        entry = _callback_states(state).setdefault(type(self).__name__, {})
        if not policy.is_mixed:
            return
        if model is None or optimizer is None:
            raise ValueError(
                "this Trainer does not hand its model and its optimizer to on_train_begin, so a step that overflows "
                "could not be skipped: use hf_mp.prepare(model, optimizer) where it makes them"
            )
        if state.global_step > 0:
            _refuse_damaged(args, state)
        self._adopt_restored(model)
        if self.mixed_precision is None or self.mixed_precision.model is not model:
            refuse_other_precision(args, policy)
            _refuse_late_masters(model, args, resumed=state.global_step > 0)
        runtime = self._attach(model, args)
        runtime.wrap_forwards()  # libraries set a forward of their own after the Trainer is made: Liger, TRL
        runtime.attach_optimizer(unwrap_optimizer(optimizer))
        self._saves.come_last(self._callbacks)
        if state.global_step > 0:
            self._resume(runtime, args, state, entry)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Tell accelerate of a skipped step, and show how the loss scale is."""
        tell_accelerate(optimizer, self.mixed_precision)
        if self.mixed_precision is not None:
            self.reporting.after_step(self.mixed_precision.stats, self._callbacks, state.global_step + 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add to a training log, in the history and for the callbacks that come after this one."""
        if self.mixed_precision is None or logs is None or "loss" not in logs:
            return
        entries = {**self.mixed_precision.stats.log_entries(), **self.reporting.log_entries()}
        logs.update(entries)
        latest = state.log_history[-1] if state.log_history else {}
        if "loss" in latest and latest.get("step") == state.global_step:
            latest.update(entries)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the file that :class:`MixedPrecisionTrainer` resumes from, and the manifest of the checkpoint."""
        if self.mixed_precision is None or args.save_only_model:
            return
        if args.world_size > 1:
            torch.distributed.barrier()  # the others may still be writing their random numbers
        if not args.should_save or (checkpoint := _checkpoint_of(args, state)) is None:
            return
        text = json.dumps(self.mixed_precision.state_dict(), indent=2)
        Path(checkpoint, STATE_NAME).write_text(text + "\n", encoding="utf-8")
        precision = str(self.mixed_precision.policy)
        finish(checkpoint, step=state.global_step, world_size=args.world_size, precision=precision)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the run's report, if asked; leave an ordinary FP32 model, unless it is to stay attached."""
        self.reporting.end(args)
        self._saves.leave(args, self._callbacks)
        self._callbacks = []
        if not self.keep_attached:
            self.detach()

    def detach(self) -> None:
        """Leave the model as an ordinary FP32 model; a later ``train()`` attaches it again."""
        if self.mixed_precision is not None:
            self.mixed_precision.detach()

    # State in the checkpoint

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into ``trainer_state.json`` for this callback."""
        runtime = self.mixed_precision
        return {
            "args": {
                "precision": None if self.precision is None else str(self.precision),
                "loss_scaler_settings": self.loss_scaler_settings,
                "tables": self.tables,
                "explain_overflows": self.explain_overflows,
                "keep_overflow_batches": self.keep_overflow_batches,
                **self.report_settings,
                "keep_attached": self.keep_attached,
            },
            "attributes": {} if runtime is None else {"saved_state": runtime.state_dict()},
        }

    def _resume(
        self, runtime: MixedPrecision, args: TrainingArguments, state: TrainerState, entry: Mapping[str, Any]
    ) -> None:
        saved = entry.get("attributes", {}).get("saved_state")
        if saved is not None:
            try:
                runtime.load_state_dict(saved)
            except ValueError as error:
                raise ValueError(f"cannot resume the loss scale from trainer_state.json: {error}") from error
            return
        # Not a callback's checkpoint: one of MixedPrecisionTrainer has a file of its own.
        for directory in (args.resume_from_checkpoint, None):
            if (checkpoint := _checkpoint_of(args, state, directory)) is not None:
                return load_runtime_state(runtime, checkpoint)
        logger.warning(
            f"the checkpoint of step {state.global_step} has no state of a MixedPrecisionCallback, and it is not in "
            f"{args.output_dir}, where one of MixedPrecisionTrainer would be found: the loss scale starts anew. Name "
            "the checkpoint in TrainingArguments(resume_from_checkpoint=...) too, to have it found"
        )

    # Attaching

    def _attach(self, model: nn.Module, args: TrainingArguments) -> MixedPrecision:
        runtime = self.mixed_precision
        if runtime is None or self._model is None or self._model() is not model:
            _refuse_model(model)
            self.detach()
            settings = self.loss_scaler_settings
            if settings is None:
                settings = getattr(args, "loss_scaler_settings", {})
            runtime = self._make_runtime(policy_of(args, self.precision), settings)
        if runtime.model is None:
            for other in _runtimes_of(model):
                other.detach()
            runtime.attach(model)
            self.mixed_precision, self._model = runtime, weakref.ref(model)
            _runtimes.add(runtime)
        self._explain_overflows(runtime, args)
        asked = {**vars(ReportSettings.of(args)), **_given(self.report_settings)}
        self.reporting.begin(runtime, args, ReportSettings(**asked))
        return runtime

    def _explain_overflows(self, runtime: MixedPrecision, args: TrainingArguments) -> None:
        if (self.explain_overflows is None and asks_for_explanation(args)) or self.explain_overflows:
            folder = overflow_directory(args, self.keep_overflow_batches)
            self.overflow_reports = explain_overflows(runtime, keep_batches=folder).reports

    def _adopt_restored(self, model: nn.Module) -> None:
        """Take over from the callback that the Trainer put this one in the place of.

        With ``restore_callback_states_from_checkpoint``, it makes each callback anew from its saved arguments.
        """
        if self.mixed_precision is None and self.saved_state is not None:
            for runtime in _runtimes_of(model):
                self.mixed_precision, self._model = runtime, weakref.ref(model)

    def _come_first(self) -> None:
        """Move to the front of the Trainer's callbacks, so that those which report see our entries in the logs.

        The Trainer calls its reporters before the callbacks that it is given, and hands nobody the list of them: it is
        found where the call comes from.
        """
        callbacks = _calling_callbacks(self)
        if callbacks is None:
            if not self._warned_of_order:
                self._warned_of_order = True
                logger.warning("not called by a Trainer: reporters before this callback will not see the loss scale")
            return
        if sum(isinstance(callback, MixedPrecisionCallback) for callback in callbacks) > 1:
            raise ValueError(
                "this Trainer has more than one MixedPrecisionCallback, and a loss can be scaled only once: leave one"
            )
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._callbacks = callbacks


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _calling_callbacks(callback: TrainerCallback) -> list[TrainerCallback] | None:
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler) and callback in caller.callbacks:
            return caller.callbacks
        frame = frame.f_back
    return None


def _runtimes_of(model: nn.Module) -> Iterator[MixedPrecision]:
    """Runtimes that callbacks of earlier Trainers left attached to ``model`` or to a model inside it."""
    modules = {id(module) for module in model.modules()}
    return (runtime for runtime in list(_runtimes) if id(runtime.model) in modules)


# Checkpoints


def _callback_states(state: TrainerState) -> dict[str, Any]:
    return cast(Any, state.stateful_callbacks)  # declared as a list, made a dictionary when the state is made


def _checkpoint_of(args: TrainingArguments, state: TrainerState, directory: str | None = None) -> Path | None:
    """The checkpoint that holds ``state``: ``directory``, or the one of its step in the output directory."""
    checkpoint = Path(
        str(directory or "") or Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    )
    path = checkpoint / "trainer_state.json"
    if not path.is_file():
        return None
    written = json.loads(path.read_text(encoding="utf-8"))
    return checkpoint if _run_so_far(written) == _run_so_far(vars(state)) else None


def _refuse_damaged(args: TrainingArguments, state: TrainerState) -> None:
    """Raise where the checkpoint that the Trainer has just read is not what its manifest says it was."""
    for directory in (args.resume_from_checkpoint, None):
        if (checkpoint := _checkpoint_of(args, state, directory)) is not None:
            refuse_damaged(checkpoint)
            if args.should_save:
                warn_of_missing_state(checkpoint, args.world_size)
            return


def _run_so_far(state: Mapping[str, Any]) -> str:
    history = state.get("log_history") or []
    # As text, where NaN equals itself.
    return json.dumps([state.get("global_step"), len(history), history[-1:]], sort_keys=True)


# Refusals


def _refuse_model(model: nn.Module) -> None:
    """Raise for a model whose forward cannot be reached, and for a quantized one with nothing to train."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"this model is compiled already ({name}), which hides its forward from mixed precision: give the Trainer "
            "the model itself, and TrainingArguments(torch_compile=True)"
        )
    if isinstance(model, (DistributedDataParallel, torch.jit.ScriptModule)):
        raise ValueError(
            f"{name} hides the forward of the model inside it from mixed precision: give the Trainer the model itself"
        )
    if hasattr(model, "_original_forward"):
        raise ValueError(
            f"accelerate has put its own mixed precision around the forward of this {name}, as a Trainer with "
            "fp16=True does: take it off by accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    quantized = getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None
    if quantized and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"this {name} is quantized and has nothing to train: add an adapter (peft.get_peft_model), or load one "
            "with PeftModel.from_pretrained(..., is_trainable=True)"
        )


def _refuse_late_masters(model: nn.Module, args: TrainingArguments, *, resumed: bool) -> None:
    """Raise where FP32 masters come too late for a model that was made after the Trainer, in FP16 or BF16."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in LOWER_PRECISION_DTYPES}
    if dtypes and (resumed or args.world_size > 1):
        reason = "loading the checkpoint rounded its FP32 weights" if resumed else "DDP has laid out its buckets"
        raise ValueError(
            f"the model came to be in {', '.join(map(str, dtypes))} after the Trainer was made, and {reason} before it "
            "could be given FP32 masters: have model_init return it in FP32 (dtype=torch.float32), and give the "
            "callback to the Trainer when it is made"
        )
