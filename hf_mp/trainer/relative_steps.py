"""Learning rates of Adafactor's relative steps in a lean layout, where a step frees the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.optimization import AdafactorSchedule


class _ScheduleOfFreedGradients(AdafactorSchedule):
    """Transformers' schedule, reading the rates of parameters with optimizer state instead of those with a gradient."""

    def get_lr(self) -> list[Any]:
        optimizer: Any = self.optimizer
        states = [(group, optimizer.state.get(group["params"][0])) for group in optimizer.param_groups]
        rates = [optimizer._get_lr(group, state) for group, state in states if state]
        return rates or list(self.base_lrs)


def report_rates_without_gradients(schedule: Any) -> Callable[[], None]:
    """Make an ``AdafactorSchedule`` report its rates after gradients were freed; ignore other schedules.

    Returns:
        A function that restores ``schedule``.
    """
    if type(schedule) is not AdafactorSchedule:
        return lambda: None
    schedule.__class__ = _ScheduleOfFreedGradients  # an attribute would be saved with the schedule

    def restore() -> None:
        schedule.__class__ = AdafactorSchedule

    return restore
