"""What a Trainer shows of its run's precision: the contract, the log of a recorder, the report."""

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

if TYPE_CHECKING:  # imported where something is recorded or explained
    from hf_mp.diagnostics.overflow_report import OverflowReport
    from hf_mp.diagnostics.precision_recorder import PrecisionRecorder

logger = logging.get_logger(__name__)

# What decides the numbers of a run, and says nothing of the machine.
_SETTINGS = """
    optim learning_rate weight_decay max_grad_norm lr_scheduler_type warmup_steps per_device_train_batch_size
    gradient_accumulation_steps gradient_checkpointing num_train_epochs max_steps seed torch_compile world_size
    loss_scale loss_scaler_settings
"""


def start_recording(
    runtime: MixedPrecision, settings: SessionSettings, args: TrainingArguments
) -> PrecisionRecorder | None:
    """Have ``runtime`` recorded if that is asked for, on the first process alone; once for each runtime."""
    # One log a run: the gradients are the same on every process when they are looked at.
    if not (settings.histogram_steps or settings.precision_report) or args.process_index != 0:
        return None
    from hf_mp.diagnostics.precision_recorder import record_precision

    said = {**args.to_dict(), "world_size": args.world_size}
    return record_precision(
        runtime,
        str(args.output_dir),
        histogram_steps=settings.histogram_steps,
        settings={name: _for_json(said[name]) for name in _SETTINGS.split() if said.get(name) is not None},
    )


def _for_json(value: Any) -> Any:
    # JSON has no word for max_grad_norm=inf, which is a setting, nor for numbers of NumPy.
    is_plain = type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
    return value if is_plain else str(value)


def show_contract(
    contract: PrecisionContract,
    risks: str,
    settings: SessionSettings,
    args: TrainingArguments,
    recorder: PrecisionRecorder | None,
) -> None:
    """Print the contract of a run and its risks, and record it for the page; on the first process alone."""
    if args.process_index == 0:
        # tqdm writes it above the progress bar; print would tear the bar apart.
        headline = f"precision contract of this run: {_precision_of(settings)}"
        tqdm.write("\n".join(filter(None, (headline, str(contract), risks))))
        if recorder is not None:
            recorder.note_contract(contract)


def _precision_of(settings: SessionSettings) -> str:
    """Return the precision of a run, and the rule that chose it if the script named none."""
    is_default = isinstance(settings.precision, Default)
    return f"{settings.policy}{', the default on every machine' if is_default else ''}"


def warn_of_skipped_steps(before: PrecisionStats, after: PrecisionStats, reports: Sequence[OverflowReport]) -> None:
    """Warn if a run has skipped more than half of its steps: the Trainer ends it as a success."""
    steps, skipped = after.steps - before.steps, after.skipped_steps - before.skipped_steps
    if 2 * skipped <= steps:
        return
    scale = scale_text(after.loss_scale)
    way_out = f"The loss scale ({scale} now) had not found its level yet, or explain_overflows=False hid the reason."
    if reports:
        way_out = reports[-1].advice or DEFAULT_ADVICE
    which = "all" if skipped == steps else "the others"
    taken = f"{steps - skipped} of {steps} steps were taken"
    logger.warning(f"{taken}: {which} were skipped for inf or NaN in their gradients. {way_out}")


def end_recording(recorder: PrecisionRecorder, *, with_report: bool) -> None:
    """Training has come to its end: write the page, if that was asked for."""
    recorder.end()
    if with_report:
        try:
            logger.info(f"the precision report of this run is {recorder.write_report()}")
        except (OSError, ValueError) as error:  # the training is done: a page is no reason to lose its result
            logger.warning(f"the precision report of this run could not be written: {error}")
