"""The learning rate that ``AdafactorSchedule`` shows, in the lean layouts."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.optimization import AdafactorSchedule


class LeanAdafactorSchedule(AdafactorSchedule):
    """Asks the optimizer's state whether a step was taken.

    The schedule of Transformers asks for a gradient, and the lean layouts free gradients as the update uses them.
    """

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group's last step; before it the schedule's initial one."""
        optimizer: Any = self.optimizer
        first = [(group, optimizer.state.get(group["params"][0])) for group in optimizer.param_groups]
        return [optimizer._get_lr(group, state) for group, state in first if state] or self.base_lrs


def read_learning_rate_from_state(scheduler: Any) -> None:
    """Make an ``AdafactorSchedule`` a :class:`LeanAdafactorSchedule`, in place; leave any other scheduler alone."""
    if type(scheduler) is AdafactorSchedule:
        scheduler.__class__ = LeanAdafactorSchedule
