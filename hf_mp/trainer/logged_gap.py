"""The gap between the log-probabilities of training and of generation, for a Trainer's log."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from hf_mp.scaling.events import StepObserver
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.log_probabilities import check_labels, counted, log_probability_gap
from hf_mp.weights.ranks.placement import is_sharded

logger = logging.get_logger(__name__)


class LoggedGap(StepObserver):
    """Measures the gap on the last micro-batch of every n-th step, after its update, if tokens count in it.

    Args:
        runtime: of the attached model.
        every: n.
        temperature: that TRL samples with.
    """

    def __init__(self, runtime: MixedPrecision, every: int, temperature: float) -> None:
        self._runtime, self._every, self._temperature = runtime, every, temperature
        self._batch: dict[str, Any] = {}
        self._is_checked = False
        self._entries: dict[str, float] = {}

    def forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the batch.

        Raises:
            ValueError: at the first batch, so on every process: for a model that is sharded or does not generate, and
                a batch that cannot be measured.
        """
        batch = {} if args else kwargs
        if not self._is_checked:
            self._check(batch)
            self._is_checked = True
        # By keywords alone, as the Trainer calls a model: positions have no names to look for.
        self._batch = batch

    def detached(self) -> None:
        self._batch = {}

    def after_step(self, step: int) -> None:
        """Measure, if ``step`` is an n-th one and tokens count in its last micro-batch."""
        if step % self._every:
            return
        try:
            self._check(self._batch)
        except ValueError as error:  # the training goes on: under DDP, other processes would wait for this one
            logger.warning_once(f"there are steps without logp_gap: {error}")
            return
        if counted(self._batch).any():
            gap = log_probability_gap(self._runtime.model, self._batch, temperature=self._temperature)
            self._entries = {"logp_gap": gap.mean, "logp_gap_clipped": gap.clipped_share, "logp_gap_beta": gap.beta}

    def _check(self, batch: dict[str, Any]) -> None:
        model: Any = self._runtime.model
        is_whole = getattr(model, "can_generate", lambda: False)() and not is_sharded(model)
        if not is_whole or not {"input_ids", "labels"} <= batch.keys():
            given = f"was given {', '.join(batch) or 'arguments by position'}"
            raise ValueError(
                f"log_probability_gap_steps={self._every} is for a causal language model that is whole on each "
                f"process and trained on input_ids and labels, and this {type(model).__name__} "
                f"{given if is_whole else 'is none'}: leave it at 0"
            )
        try:
            check_labels(batch)
        except ValueError as error:
            raise ValueError(f"log_probability_gap_steps={self._every}: {error}; or leave it at 0") from error

    def log_entries(self) -> dict[str, float]:
        """What was found since the last log."""
        entries, self._entries = self._entries, {}
        return entries
