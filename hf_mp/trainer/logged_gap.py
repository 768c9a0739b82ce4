"""The gap between the log-probabilities of training and of generation, for a Trainer's log."""

from __future__ import annotations

from typing import Any

from hf_mp.scaling.events import StepObserver
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.log_probabilities import log_probability_gap
from hf_mp.weights.distributed import is_sharded


class LoggedGap(StepObserver):
    """Measures the gap on the last micro-batch of some steps, after their update.

    Args:
        runtime: of the attached model.
        every: how many steps.
        temperature: that TRL samples with.
    """

    def __init__(self, runtime: MixedPrecision, every: int, temperature: float) -> None:
        self._runtime, self._every, self._temperature = runtime, every, temperature
        self._batch: dict[str, Any] = {}
        self._entries: dict[str, float] = {}

    def forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batch = {} if args else kwargs

    def detached(self) -> None:
        self._batch = {}

    def after_step(self, step: int) -> None:
        """Measure, if it is the turn of ``step``.

        Raises:
            ValueError: for a model that is sharded or does not generate, and a batch without labels.
        """
        if step % self._every:
            return
        model: Any = self._runtime.model
        generates = getattr(model, "can_generate", lambda: False)()
        if not generates or is_sharded(model) or not {"input_ids", "labels"} <= self._batch.keys():
            raise ValueError(
                f"log_probability_gap_steps={self._every} is for a causal language model that is whole on each "
                f"process and trained on input_ids and labels, and this {type(model).__name__} "
                f"{_why(self._batch) if generates and not is_sharded(model) else 'is none'}: leave it at 0"
            )
        gap = log_probability_gap(model, self._batch, temperature=self._temperature)
        self._entries = {"logp_gap": gap.mean, "logp_gap_clipped": gap.clipped_share, "logp_gap_beta": gap.beta}

    def log_entries(self) -> dict[str, float]:
        """What was found since the last log."""
        entries, self._entries = self._entries, {}
        return entries


def _why(batch: dict[str, Any]) -> str:
    return f"was given {', '.join(batch) or 'arguments by position'}"
