"""``TrainerSession``: mixed precision of one Trainer."""

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

if TYPE_CHECKING:  # imported only if an option needs it
    from hf_mp.diagnostics.overflow_report import OverflowReport
    from hf_mp.diagnostics.precision_recorder import PrecisionRecorder

logger = logging.get_logger(__name__)

STATE_NAME = "mixed_precision.json"


class TrainerSession(TrainerCallback):
    """Mixed precision for the runs of one Trainer, from :meth:`begin` to :meth:`end`; no effect with FP32.

    Attributes:
        recorder: of the run, on the first process; None if nothing is recorded.
        contract: of the first step that was not skipped; None before, and if it is off.
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
        self._contract_recorder: ContractRecorder | None = None  # until the end of the first step
        self._original_dtypes: dict[str, torch.dtype] = {}  # by name, before the model was attached
        self._model: weakref.ref[nn.Module] | None = None
        self._trainer: Callable[[], Any] = lambda: None  # weak reference
        self._loss_sum: Tensor | None = None  # the Trainer's sum of losses for its log
        self._loss_sum_at_begin: Tensor | None = None  # of the step
        self._stats_at_begin = PrecisionStats()  # of the run
        self._at_detach = ExitStack()

    def begin(self, model: nn.Module, *, measures_norm: bool = False) -> None:
        """Attach ``model``; may be called again after another library has set a forward.

        ``measures_norm``: whether the overflow check also measures the norm of the gradients.
        """
        if self._model is None or self._model() is not model:
            self._set_model(model)
        runtime = self.runtime
        if runtime is None:
            return
        if runtime.model is None:
            detach_sessions(model)
            runtime.attach(model)
            runtime.made_by_trainer = True
        runtime.check.measures_norm = measures_norm
        self._add_observers(runtime, model)
        self.recorder = start_recording(runtime, self.settings, self.args)
        runtime.wrap_forwards()  # TRL and PEFT may have replaced some
        self._set_head_to_fp32(model, self._at_detach)

    def _set_model(self, model: nn.Module) -> None:
        """Store the dtypes of ``model``; for a second model, as of ``model_init``, make a new runtime."""
        # For save_dtype="original": attaching replaces 16-bit weights by FP32.
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        self._original_dtypes = {name: tensor.dtype for name, tensor in named if tensor.is_floating_point()}
        if self.runtime is not None and self._model is not None:
            self.runtime.detach()
            self.runtime = self.settings.make_runtime(self.args)
        self._model = weakref.ref(model)

    def _add_observers(self, runtime: MixedPrecision, model: nn.Module) -> None:
        if self.settings.explain_overflows:
            from hf_mp.diagnostics.overflow import explain_overflows

            self.overflow_reports = explain_overflows(runtime).reports
        if self.settings.on_overflow == "heal":
            from hf_mp.diagnostics.healing import heal_overflows

            healer = heal_overflows(runtime)
            healer.clip = functools.partial(self._clip_again, model)
            healer.replace_logged_loss = self._replace_logged_loss

    def attach_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer if self.runtime is None else self.runtime.attach_optimizer(optimizer)

    def attach_reference_model(self, model: nn.Module | None) -> None:
        """Attach a reference model (of DPO, KTO, ...) until :meth:`end`.

        With equal weights, its log-probabilities equal those of the policy model, bit for bit.
        """
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        # Some trainers use the policy model as its own reference.
        if self.runtime is not None and model is not None and model is not self.runtime.model:
            detach_sessions(model)
            self._attach_for_inference(model, self._at_detach, only_trainable=False)

    def _attach_for_inference(self, model: nn.Module, at_end: ExitStack, *, only_trainable: bool) -> None:
        settings = self.settings
        runtime = MixedPrecision(
            replace(settings.policy, loss_scale=None),
            tables=settings.tables,
            rules=settings.rules if self.runtime is None else self.runtime.rules,
            layout=make_inference_layout(settings.policy, only_trainable=only_trainable),
        )
        runtime.attach(model)
        at_end.callback(runtime.detach)
        self._set_head_to_fp32(model, at_end)
        runtime.made_by_trainer = True

    def _set_head_to_fp32(self, model: nn.Module, at_end: ExitStack) -> None:
        if self.settings.policy.fp32_head:
            at_end.callback(set_fused_heads_to_fp32(model))

    def begin_run(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        if self.runtime is not None and self.settings.check_gradients and self.runtime.check.is_scaled:
            self._at_detach.callback(replace_first_backward(self.runtime, self.args, trainer.accelerator))

    def record_contract(self, model: nn.Module | None) -> None:
        self._stop_recording_contract()
        if self.settings.precision_contract and model is not None:
            self._contract_recorder = ContractRecorder(model)
            self._contract_recorder.start()

    def _stop_recording_contract(self) -> None:
        recorder, self._contract_recorder = self._contract_recorder, None
        if recorder is not None:
            recorder.close()

    @property
    def saved_dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the saved weights by name; empty if they are not rounded."""
        if self.settings.save_dtype == "fp32":
            return {}
        saved_dtype = SAVE_DTYPES[self.settings.save_dtype]
        return self._original_dtypes if saved_dtype is None else dict.fromkeys(self._original_dtypes, saved_dtype)

    def clip_grad_norm(self, model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor | None:
        """Clip the gradients to the 2-norm ``max_norm``; ``inf`` only measures.

        Returns their 2-norm before, FP32 of shape (); None if torch's function must clip.
        """
        runtime = self.runtime
        if runtime is None:
            return None
        if runtime.updates_in_backward:  # it has clipped and freed the gradients
            return runtime.grad_norm
        return runtime.clip_grad_norm(optimizer, list(model.parameters()), max_norm)

    def _clip_again(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Clip the gradients of a rerun step as the Trainer does, and replace its logged norm."""
        max_norm = self.args.max_grad_norm
        limit = max_norm if max_norm and max_norm > 0 else math.inf
        norm = self.clip_grad_norm(model, optimizer, limit)
        if norm is None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        logged = norm_to_log(self._trainer())
        if logged is not None:
            logged.copy_(norm)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.runtime is not None:
            self._stats_at_begin = self.runtime.stats
        if self.settings.policy.is_lean:
            self._at_detach.callback(report_rates_without_gradients(kwargs.get("lr_scheduler")))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.runtime is not None and args.process_index == 0:
            warn_of_skipped_steps(self._stats_at_begin, self.runtime.stats, self.overflow_reports)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.settings.on_overflow == "heal":
            self._loss_sum = getattr(self._trainer(), "_tr_loss", None)  # None in a custom training loop
            self._loss_sum_at_begin = None if self._loss_sum is None else self._loss_sum.clone()

    def _replace_logged_loss(self, loss: Tensor) -> bool:
        """Replace the Trainer's substitute for this step's inf or NaN in its sum by ``loss``, FP32 of shape ().

        Returns False if there is no such sum.
        """
        if self._loss_sum is None or self._loss_sum_at_begin is None:
            return False
        self._loss_sum.copy_(self._loss_sum_at_begin + loss)
        return True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        recorder = self._contract_recorder
        # `step_was_skipped` synchronizes with the GPU.
        if recorder is None or (self.runtime is not None and self.runtime.step_was_skipped):
            return
        self.contract = recorder.contract(optimizer, self.saved_dtypes)
        self._stop_recording_contract()
        risks = check_training(recorder.model, optimizer).advice if self.contract.lacks_masters else ""
        show_contract(self.contract, risks, self.settings, self.args, self.recorder)

    def log_entries(self, logs: Mapping[str, Any]) -> dict[str, float]:
        if self.runtime is None or "loss" not in logs:
            return {}
        latest = None if self.recorder is None else self.recorder.latest
        recorded = {} if latest is None else latest.log_entries()
        return {**self.runtime.stats.log_entries(), **recorded}

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Run ``model`` in autocast in this context; between runs without master weights."""
        with ExitStack() as at_end:
            if self.runtime is not None and not _runtimes_of(model):
                self._attach_for_inference(model, at_end, only_trainable=True)
            yield

    def save(self, checkpoint: Path) -> None:
        if self.runtime is not None:
            (checkpoint / STATE_NAME).write_text(json.dumps(self.runtime.state_dict(), indent=2) + "\n", "utf-8")

    def load(self, checkpoint: Path) -> None:
        """Load the loss scale from a checkpoint of hf_mp, or of a Trainer with ``fp16=True``.

        With FP32, or if the precision differs, a warning describes the change.
        """
        path, torch_path = checkpoint / STATE_NAME, checkpoint / SCALER_NAME
        if path.is_file():
            with as_checkpoint_error(path, "the loss scale"):
                state = json.loads(path.read_text(encoding="utf-8"))
                if self.runtime is not None:
                    self.runtime.load_state_dict(state)
                else:
                    saved = PrecisionPolicy.parse(state["precision"])
                    logger.warning(f"{checkpoint}: {self.settings.policy.explain_change(saved)}")
        elif self.runtime is not None and torch_path.is_file():
            with as_checkpoint_error(torch_path, "the loss scale"):
                self.runtime.scaler.load_state_dict(torch.load(torch_path, weights_only=True))
                self.runtime.stats = PrecisionStats.resumed(self.runtime.scaler.state)
        elif self.runtime is not None:
            logger.warning(f"{checkpoint} has no {STATE_NAME}: the loss scale starts anew")

    def end(self, *, keep_attached: bool = False) -> None:
        try:
            if self.recorder is not None:
                end_recording(self.recorder, with_report=self.settings.precision_report)
        finally:
            if not keep_attached:
                self.detach()

    def detach(self) -> None:
        """Make the models ordinary FP32 models; the runtime keeps its loss scale and statistics."""
        self._at_detach.close()
        self._stop_recording_contract()
        if self.runtime is not None:
            self.runtime.detach()


class SessionProperties:
    session: TrainerSession | None = None

    @property
    def mixed_precision(self) -> MixedPrecision | None:
        """The :class:`MixedPrecision` of the current model, with its ``stats``; None with FP32."""
        return None if self.session is None else self.session.runtime

    @property
    def overflow_reports(self) -> list[OverflowReport]:
        """An :class:`OverflowReport` for each explained skipped step of the current model."""
        return [] if self.session is None else self.session.overflow_reports


def detach_sessions(model: nn.Module) -> None:
    for runtime in _runtimes_of(model):
        runtime.detach()


def _runtimes_of(model: nn.Module) -> list[MixedPrecision]:
    # Not runtimes of user code: attaching their model a second time raises.
    return [runtime for runtime in runtimes_of(model) if runtime.made_by_trainer]
