"""``TrainerSession``: one Trainer's mixed precision, behind the Trainer subclass and the callback."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import SCALER_NAME
from transformers.utils import logging

from hf_mp.diagnostics.contract.record import ContractRecorder
from hf_mp.diagnostics.contract.table import PrecisionContract
from hf_mp.diagnostics.lost_updates import check_training
from hf_mp.policy import PrecisionPolicy
from hf_mp.scaling.rules import PrecisionStats
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.checkpoints.loaded_state import as_checkpoint_error
from hf_mp.trainer.find_trainer import norm_to_log
from hf_mp.trainer.first_backward import replace_first_backward
from hf_mp.trainer.fused_head import set_fused_heads_to_fp32
from hf_mp.trainer.relative_steps import report_rates_without_gradients
from hf_mp.trainer.reporting import end_recording, show_contract, start_recording, warn_of_skipped_steps
from hf_mp.trainer.settings import OF_MIXED, SAVE_DTYPES, SessionSettings
from hf_mp.weights.attach_checks import runtimes_of
from hf_mp.weights.weight_store import make_inference_layout

if TYPE_CHECKING:  # what not every training asks for is imported where it does
    from hf_mp.diagnostics.overflow_report import OverflowReport
    from hf_mp.diagnostics.precision_recorder import PrecisionRecorder

logger = logging.get_logger(__name__)

STATE_NAME = "mixed_precision.json"  # in each checkpoint directory


class TrainerSession(TrainerCallback):
    """Mixed precision for the runs of one Trainer, from :meth:`begin` to :meth:`end`; with FP32 nothing happens.

    As a callback, it is told of each step.

    Args:
        settings: what to do.
        args: of the Trainer.

    Attributes:
        runtime: the :class:`MixedPrecision` of the current model, also between runs; None for FP32.
        overflow_reports: an :class:`OverflowReport` for each skipped step of that model that was explained.
        recorder: of the run, on the first process; None where nothing is recorded.
        contract: what the first step of the last run that was not skipped showed; None before, and where it is off.
    """

    def __init__(self, settings: SessionSettings, args: TrainingArguments) -> None:
        self.settings, self.args = settings, args
        self.runtime = settings.make_runtime(args) if settings.policy.is_mixed else None
        without_effect = [name for name in OF_MIXED if getattr(settings, name)]
        if self.runtime is None and without_effect:
            logger.warning(f"no effect with precision='fp32': {', '.join(without_effect)}")
        self.overflow_reports: list[OverflowReport] = []
        self.recorder: PrecisionRecorder | None = None
        self.contract: PrecisionContract | None = None
        self._contract_recorder: ContractRecorder | None = None  # until the first step has ended
        self._loaded_in: dict[str, torch.dtype] = {}  # dtypes of the model before it was attached, by name
        self._model: weakref.ref[nn.Module] | None = None  # that the runtime was made for
        self._trainer: Callable[[], Any] = lambda: None  # a weak reference to the one that trains
        # The sum of its losses for its log, and what that was when the step began.
        self._counted: tuple[Tensor, Tensor] | None = None
        self._at_begin = PrecisionStats()  # of the run
        # In reverse order: on a model that was begun twice, fused heads come back to what they were at first.
        self._at_detach = ExitStack()

    # Begin

    def begin(self, model: nn.Module, *, measures_norm: bool = False) -> None:
        """Attach ``model``; before its optimizer is made, and again whenever a library may have set a forward.

        Args:
            model: of the Trainer.
            measures_norm: have the norm of the gradients measured along with their check, for :meth:`clip_grad_norm`.
        """
        if self._model is None or self._model() is not model:
            # save_dtype="original" rounds to what each weight was loaded in, which attaching replaces by FP32.
            held = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
            self._loaded_in = {name: one.dtype for name, one in held if one.is_floating_point()}
            if self.runtime is not None and self._model is not None:
                # With a model_init, each train() has a new model: a runtime is of one.
                self.runtime.detach()
                self.runtime = self.settings.make_runtime(self.args)
            self._model = weakref.ref(model)
        if self.runtime is None:
            return
        if self.runtime.model is None:
            release(model)
            self.runtime.attach(model)
            self.runtime.made_by_trainer = True
        self.runtime.check.measures_norm = measures_norm
        self._observe(self.runtime, model)
        self.recorder = start_recording(self.runtime, self.settings, self.args)
        # TRL and PEFT may have put forwards of their own over the attached ones since.
        self.runtime.wrap_forwards()
        self._keep_head(model, self._at_detach)

    def _observe(self, runtime: MixedPrecision, model: nn.Module) -> None:
        """Have ``runtime`` observed by what the settings ask for; observers that it has already stay."""
        settings = self.settings
        if settings.explain_overflows:
            from hf_mp.diagnostics.overflow import explain_overflows

            self.overflow_reports = explain_overflows(runtime).reports
        if settings.on_overflow == "heal":
            from hf_mp.diagnostics.healing import heal_overflows

            healer = heal_overflows(runtime)
            healer.clip, healer.replace_logged_loss = (
                functools.partial(self._clip_again, model),
                self._replace_logged_loss,
            )

    def attach_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step from now on."""
        return optimizer if self.runtime is None else self.runtime.attach_optimizer(optimizer)

    def attach_reference_model(self, model: nn.Module | None) -> None:
        """Run a reference model (of DPO, KTO, ...) in the autocast of the policy model until :meth:`end`.

        At equal weights it then gives the same log-probabilities, bit for bit. It is not trained.
        """
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        # A second attachment would cast twice: some trainers give the policy model as its own reference.
        if self.runtime is not None and model is not None and model is not self.runtime.model:
            release(model)
            self._attach_for_inference(model, self._at_detach, only_trainable=False)

    def _attach_for_inference(self, model: nn.Module, at_end: ExitStack, *, only_trainable: bool) -> None:
        """Attach a precision to ``model``, which is not trained, until ``at_end``."""
        settings = self.settings
        # Nothing is trained in it, and a scale would be one more state that has to agree.
        policy = replace(settings.policy, loss_scale=None)
        rules = settings.rules if self.runtime is None else self.runtime.rules
        runtime = MixedPrecision(
            policy,
            tables=settings.tables,
            rules=rules,
            layout=make_inference_layout(settings.policy, only_trainable=only_trainable),
        )
        runtime.attach(model)
        at_end.callback(runtime.detach)
        self._keep_head(model, at_end)
        runtime.made_by_trainer = True

    def _keep_head(self, model: nn.Module, at_end: ExitStack) -> None:
        if self.settings.policy.fp32_head:
            at_end.callback(set_fused_heads_to_fp32(model))

    def begin_run(self, trainer: Any) -> None:
        """``trainer`` begins a run, of which the first backward is checked for what leaks past a border."""
        self._trainer = weakref.ref(trainer)
        if self.runtime is not None and self.settings.check_gradients and self.runtime.check.is_scaled:
            self._at_detach.callback(replace_first_backward(self.runtime, self.args, trainer.accelerator))

    def watch_contract(self, model: nn.Module | None) -> None:
        """Have the precision contract taken from the first step of the run that begins, also one in FP32."""
        self._stop_recording_contract()
        if self.settings.precision_contract and model is not None:
            self._contract_recorder = ContractRecorder(model)
            self._contract_recorder.start()

    def _stop_recording_contract(self) -> None:
        watch, self._contract_recorder = self._contract_recorder, None
        if watch is not None:
            watch.close()

    @property
    def saved_dtypes(self) -> dict[str, torch.dtype]:
        """To which dtype each weight is rounded when the model is saved; empty where they are saved as they are."""
        name = self.settings.save_dtype
        if name == "fp32":
            return {}
        return {key: SAVE_DTYPES[name] or dtype for key, dtype in self._loaded_in.items()}

    # In the run

    def clip_grad_norm(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """Clip the gradients to this 2-norm, ``inf`` only measures it; None if torch's own function must do that.

        Returns:
            The norm before, FP32 of shape (): measured when the backward ended, or by the layout that keeps them.
        """
        runtime = self.runtime
        if runtime is None:
            return None
        # An update inside backward has clipped and used them already.
        if runtime.updates_in_backward:
            return runtime.grad_norm
        return runtime.clip_grad_norm(optimizer, list(model.parameters()), max_norm)

    def _clip_again(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clip the gradients of a step that ran again as the Trainer clipped those of its first run."""
        max_norm = self.args.max_grad_norm
        limit = max_norm if max_norm and max_norm > 0 else math.inf  # which measures the norm alone
        if (norm := self.clip_grad_norm(model, optimizer, limit)) is None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if (logged := norm_to_log(self._trainer())) is not None:
            logged.copy_(norm)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note where the run begins, after its checkpoint was loaded."""
        if self.runtime is not None:
            self._at_begin = self.runtime.stats
        if self.settings.policy.is_lean:
            self._at_detach.callback(report_rates_without_gradients(kwargs.get("lr_scheduler")))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn where the run took no step."""
        if self.runtime is not None and args.process_index == 0:
            warn_of_skipped_steps(self._at_begin, self.runtime.stats, self.overflow_reports)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the log has counted before the step, where the loss of that may be healed."""
        if self.settings.on_overflow == "heal":
            counted = getattr(self._trainer(), "_tr_loss", None)  # not in a training loop of somebody's own
            self._counted = None if counted is None else (counted, counted.clone())

    def _replace_logged_loss(self, loss: Tensor) -> bool:
        """Have ``loss`` counted as that of the step, of which the Trainer has counted what it makes of inf or NaN."""
        if self._counted is not None:
            self._counted[0].copy_(self._counted[1] + loss)
        return self._counted is not None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """A step has just ended: the first that was not skipped shows the contract."""
        # A skipped step updated nothing: it does not show in which dtype moments are kept.
        # Asked only while there is a watch: on a GPU, the answer waits for the step.
        if self._contract_recorder is not None and not (self.runtime is not None and self.runtime.step_was_skipped):
            model = self._contract_recorder.model
            self.contract = self._contract_recorder.contract(optimizer, self.saved_dtypes)
            self._stop_recording_contract()
            risks = check_training(model, optimizer).advice if self.contract.lacks_masters else ""
            show_contract(self.contract, risks, self.settings, self.args, self.recorder)

    def log_entries(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Entries to add to ``logs``: the stats, if these are training logs."""
        if self.runtime is None or "loss" not in logs:
            return {}
        latest = None if self.recorder is None else self.recorder.latest
        recorded = {} if latest is None else latest.log_entries()
        return {**self.runtime.stats.log_entries(), **recorded}

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Context that runs ``model`` in autocast; between runs it is attached for this alone, without masters."""
        with ExitStack() as at_end:
            if self.runtime is not None and not _runtimes_of(model):
                # Masters would cost an evaluation 4 bytes a parameter, and stay nowhere.
                self._attach_for_inference(model, at_end, only_trainable=True)
            yield

    # Checkpoints

    def save(self, checkpoint: Path) -> None:
        """Write the state of the loss scale."""
        if self.runtime is not None:
            text = json.dumps(self.runtime.state_dict(), indent=2)
            (checkpoint / STATE_NAME).write_text(text + "\n", encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Take over the loss scale from a checkpoint of hf_mp, or from one of a Trainer with ``fp16=True``.

        A warning says what changes where it was saved in another precision; with FP32, nothing is taken over.

        Raises:
            CheckpointError: for a file that does not hold such a state; the message names it.
        """
        path, torch_path = checkpoint / STATE_NAME, checkpoint / SCALER_NAME
        with as_checkpoint_error(path if path.is_file() else torch_path, "the loss scale"):
            state = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
            if self.runtime is None:
                if state is not None:
                    saved = PrecisionPolicy.parse(state["precision"])
                    logger.warning(f"{checkpoint}: {self.settings.policy.explain_change(saved)}")
            elif state is not None:
                self.runtime.load_state_dict(state)
            elif torch_path.is_file():
                self.runtime.scaler.load_state_dict(torch.load(torch_path, weights_only=True))
                self.runtime.stats = PrecisionStats.resumed(self.runtime.scaler.state)
            else:
                logger.warning(f"{checkpoint} has no {STATE_NAME}: the loss scale starts anew")

    # End

    def end(self, *, keep_attached: bool = False) -> None:
        """The run has ended, or failed: write its report, and let go of model, references and optimizer."""
        try:
            if self.recorder is not None:
                end_recording(self.recorder, with_report=self.settings.precision_report)
        finally:
            if not keep_attached:
                self.detach()

    def detach(self) -> None:
        """Leave ordinary FP32 models; the runtime keeps its loss scale and its stats."""
        self._at_detach.close()
        self._stop_recording_contract()
        if self.runtime is not None:
            self.runtime.detach()


class SessionProperties:
    """What both adapters tell of their session."""

    session: TrainerSession | None = None

    @property
    def mixed_precision(self) -> MixedPrecision | None:
        """The :class:`MixedPrecision` runtime of the current model, with its ``stats``; None with FP32."""
        return None if self.session is None else self.session.runtime

    @property
    def overflow_reports(self) -> list[OverflowReport]:
        """An :class:`OverflowReport` for each skipped step of the current model that was explained."""
        return [] if self.session is None else self.session.overflow_reports


def release(model: nn.Module) -> None:
    """Detach what earlier sessions left attached to ``model`` or to a model inside it."""
    for runtime in _runtimes_of(model):
        runtime.detach()


def _runtimes_of(model: nn.Module) -> list[MixedPrecision]:
    # A model that a user attached stays attached: attaching it a second time raises and says what to do.
    return [runtime for runtime in runtimes_of(model) if runtime.made_by_trainer]
