"""The learning rates of Adafactor's relative steps in a lean layout, where a step frees the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.optimization import AdafactorSchedule


class _OfFreedGradients(AdafactorSchedule):
    """Transformers' schedule, which reads the rates from the state of parameters that have been stepped.

    Transformers' own looks for parameters with a gradient, and without any shows the initial rate.
    """

    def get_lr(self) -> list[Any]:
        optimizer: Any = self.optimizer
        first = [(group, optimizer.state.get(group["params"][0])) for group in optimizer.param_groups]
        rates = [optimizer._get_lr(group, state) for group, state in first if state]
        return rates or list(self.base_lrs)


def report_rates_without_gradients(schedule: Any) -> Callable[[], None]:
    """Have a Transformers ``AdafactorSchedule`` show the true rates though a step frees its gradients.

    Other schedules stay as they are.

    Returns:
        A function that makes ``schedule`` Transformers' own again.
    """
    if type(schedule) is not AdafactorSchedule:
        return lambda: None
    schedule.__class__ = _OfFreedGradients  # no attribute: those are saved with the schedule

    def restore() -> None:
        schedule.__class__ = AdafactorSchedule

    return restore
