"""Reports of a Trainer run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainingArguments
from transformers.utils import logging

from hf_mp.diagnostics.contract.table import PrecisionContract
from hf_mp.scaling.loss_scaler import DEFAULT_ADVICE
from hf_mp.scaling.rules import PrecisionStats, scale_text
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.settings import Default, SessionSettings

if TYPE_CHECKING:  # imported only if an option needs it
    from hf_mp.diagnostics.overflow_report import OverflowReport
    from hf_mp.diagnostics.precision_recorder import PrecisionRecorder

logger = logging.get_logger(__name__)

# Arguments in the log: those that affect numerical results.
_SETTINGS = """
    optim learning_rate weight_decay max_grad_norm lr_scheduler_type warmup_steps per_device_train_batch_size
    gradient_accumulation_steps gradient_checkpointing num_train_epochs max_steps seed torch_compile world_size
    loss_scale loss_scaler_settings
"""


def start_recording(
    runtime: MixedPrecision, settings: SessionSettings, args: TrainingArguments
) -> PrecisionRecorder | None:
    """Start the recorder of ``runtime``, or return the one that it has; None if recording is off.

    Only the first process records: recorded gradients are equal on all.
    """
    if not (settings.histogram_steps or settings.precision_report) or args.process_index != 0:
        return None
    from hf_mp.diagnostics.precision_recorder import record_precision

    values = {**args.to_dict(), "world_size": args.world_size}
    return record_precision(
        runtime,
        str(args.output_dir),
        histogram_steps=settings.histogram_steps,
        settings={name: _for_json(values[name]) for name in _SETTINGS.split() if values.get(name) is not None},
    )


def _for_json(value: Any) -> Any:
    # JSON has neither inf (a valid max_grad_norm) nor NumPy numbers.
    is_plain = type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
    return value if is_plain else str(value)


def show_contract(
    contract: PrecisionContract,
    risks: str,
    settings: SessionSettings,
    args: TrainingArguments,
    recorder: PrecisionRecorder | None,
) -> None:
    """Print the contract of a run and its risks, and record it; only on the first process."""
    if args.process_index == 0:
        note = ", the default on every machine" if isinstance(settings.precision, Default) else ""
        headline = f"precision contract of this run: {settings.policy}{note}"
        tqdm.write("\n".join(filter(None, (headline, str(contract), risks))))  # leaves the progress bar intact
        if recorder is not None:
            recorder.note_contract(contract)


def warn_of_skipped_steps(before: PrecisionStats, after: PrecisionStats, reports: Sequence[OverflowReport]) -> None:
    """Warn if a run has skipped more than half of its steps."""
    steps, skipped = after.steps - before.steps, after.skipped_steps - before.skipped_steps
    if 2 * skipped <= steps:
        return
    if reports:
        advice = reports[-1].advice or DEFAULT_ADVICE
    else:
        scale = scale_text(after.loss_scale)
        advice = f"The loss scale ({scale} now) had not found its level yet, or explain_overflows=False hid the reason."
    subject = "all" if skipped == steps else "the others"
    logger.warning(
        f"{steps - skipped} of {steps} steps were taken: {subject} were skipped for inf or NaN in their gradients. "
        f"{advice}"
    )


def end_recording(recorder: PrecisionRecorder, *, with_report: bool) -> None:
    """A failed write is a warning."""
    recorder.end()
    if with_report:
        try:
            logger.info(f"the precision report of this run is {recorder.write_report()}")
        except (OSError, ValueError) as error:
            logger.warning(f"the precision report of this run could not be written: {error}")
