"""What a Trainer shows of its run's precision: the progress bar's live line, the log, the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hf_mp.diagnostics.contract.table import PrecisionContract
from hf_mp.scaling.rules import scale_text
from hf_mp.step.mixed_precision import MixedPrecision, PrecisionStats
from hf_mp.trainer.settings import SessionSettings

if TYPE_CHECKING:  # imported where something is recorded
    from hf_mp.diagnostics.precision_recorder import PrecisionRecorder

logger = logging.get_logger(__name__)

# What decides the numbers of a run, and says nothing of the machine.
_SETTINGS = """
    optim learning_rate weight_decay max_grad_norm lr_scheduler_type warmup_steps per_device_train_batch_size
    gradient_accumulation_steps gradient_checkpointing num_train_epochs max_steps seed torch_compile world_size
    loss_scale loss_scaler_settings
"""


class TrainerReporting:
    """Shows one Trainer's precision; with nothing asked for, only in its progress bar."""

    def __init__(self, settings: SessionSettings) -> None:
        self.recorder: PrecisionRecorder | None = None
        self._settings = settings
        self._line = ""

    def begin(self, runtime: MixedPrecision, args: TrainingArguments) -> None:
        """Have ``runtime`` recorded if that is asked for, on the first process alone; once for each runtime."""
        settings = self._settings
        self.recorder = None
        # One log a run: the gradients are the same on every process when they are looked at.
        if settings.records and args.process_index == 0:
            from hf_mp.diagnostics.precision_recorder import record_precision

            self.recorder = record_precision(
                runtime,
                str(args.output_dir),
                histogram_steps=settings.histogram_steps,
                settings={
                    name: _readable(value)
                    for name in _SETTINGS.split()
                    if (value := getattr(args, name, None)) is not None
                },
            )

    def show_contract(self, contract: PrecisionContract, risks: str, args: TrainingArguments) -> None:
        """Print the contract of a run and its risks, and record it for the page; on the first process alone."""
        if args.process_index == 0:
            # tqdm writes it above the progress bar; print would tear the bar apart.
            tqdm.write("\n".join(filter(None, ("precision contract of this run:", str(contract), risks))))
            if self.recorder is not None:
                self.recorder.note_contract(contract)

    def after_step(self, stats: PrecisionStats, callbacks: Iterable[TrainerCallback]) -> None:
        """Show the optimizer step that has just ended in the progress bar."""
        for callback in callbacks:
            if isinstance(callback, ProgressCallback):
                self._show_in_progress_bar(callback, stats)

    def _show_in_progress_bar(self, callback: ProgressCallback, stats: PrecisionStats) -> None:
        bar: Any = callback.training_bar
        if bar is None or (bar.postfix and bar.postfix != self._line):  # another callback shows its own line
            return
        self._line = live_line(stats)
        bar.set_postfix_str(self._line, refresh=False)  # drawn along with the next step

    def log_entries(self) -> dict[str, float]:
        """Entries for a training log, in addition to the stats."""
        latest = None if self.recorder is None else self.recorder.latest
        return {} if latest is None else latest.log_entries()

    def end(self, args: TrainingArguments) -> None:
        """Training has come to its end: write the page, if that was asked for."""
        if self.recorder is None:
            return
        self.recorder.end()
        if self._settings.precision_report:
            try:
                logger.info(f"the precision report of this run is {self.recorder.write_report()}")
            except (OSError, ValueError) as error:  # the training is done: a page is no reason to lose its result
                logger.warning(f"the precision report of this run could not be written: {error}")


def _readable(value: Any) -> Any:
    # max_grad_norm=inf is a setting, and JSON has no word for it
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(getattr(value, "value", value))


def live_line(stats: PrecisionStats) -> str:
    """The stats in a few words: ``loss scale 2048, headroom 5.3, skipped 1``."""
    headroom = [] if stats.headroom is None else [f"headroom {stats.headroom:.1f}"]
    return ", ".join([f"loss scale {scale_text(stats.loss_scale)}", *headroom, f"skipped {stats.skipped_steps}"])
