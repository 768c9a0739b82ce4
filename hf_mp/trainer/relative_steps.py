"""Learning rates of Adafactor's relative steps in a lean layout, where a step frees the gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.optimization import AdafactorSchedule


class _ScheduleOfFreedGradients(AdafactorSchedule):
    """Reads the rates of parameters with optimizer state instead of those with a gradient."""

    def get_lr(self) -> list[Any]:
        optimizer: Any = self.optimizer
        states = [(group, optimizer.state.get(group["params"][0])) for group in optimizer.param_groups]
        rates = [optimizer._get_lr(group, state) for group, state in states if state]
        return rates or list(self.base_lrs)


def report_rates_without_gradients(schedule: Any) -> Callable[[], None]:
    """Replace the class of an ``AdafactorSchedule``; return a function that restores it."""
    if type(schedule) is not AdafactorSchedule:
        return lambda: None
    schedule.__class__ = _ScheduleOfFreedGradients  # an attribute would be saved with the schedule
    return partial(setattr, schedule, "__class__", AdafactorSchedule)
