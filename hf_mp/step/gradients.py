"""``GradientCheck``: when a backward runs, what it left in the gradients, and the verdict that a step needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import SQUARES_BELOW, all_finite
from hf_mp.scaling.rules import StepReport
from hf_mp.weights.attachable import REPAIRED, UNKNOWN_OPTIMIZER
from hf_mp.weights.distributed import local_parts
from hf_mp.weights.open_backwards import OpenBackwards
from hf_mp.weights.seen_gradients import SeenGradients, Verdict, found_inf_of, versions_of


class GradientCheck(SeenGradients):
    """Measures the gradients when a backward ends, before anyone clips them, and tells whether to skip a step.

    ``on_ended`` is called with the largest unscaled magnitude (None where not measured); ``seen`` is the base's.
    """

    def __init__(self, on_ended: Callable[[Tensor | None], None], *seen: Any) -> None:
        super().__init__(*seen)
        self._on_ended = on_ended
        self.is_scaled = False  # whether the loss is scaled
        self.runs = OpenBackwards()
        self._versions: dict[int, int] = {}  # of the weights, at the end of the last backward

    def backward_began(self) -> None:
        """A gradient enters the model through an output: the one place where a backward is known to begin."""
        if not self.runs.begin(task := torch._C._current_graph_task_id()):
            return
        if self._largest is not None:
            versions = versions_of(parameters := self.parameters())
            if is_used := any(versions.get(weight, seen) != seen for weight, seen in self._versions.items()):
                self.warn_once(UNKNOWN_OPTIMIZER)
            if is_used or not self.gradients(parameters):
                self.forget()  # what was measured before was used by another optimizer, or thrown away
        # Two callbacks deep: the first of DDP's follow this one, and its all-reduce may write .grad till then.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: self._backward_ended(task)))

    def _backward_ended(self, task: int) -> None:
        self.runs.end(task)
        largest = None
        if self.is_scaled or self.measures_norm:
            largest = self.measure(parameters := self.parameters())
            self._versions = versions_of(parameters)
        self._on_ended(largest)

    def verdict(self, optimizer: Optimizer) -> Verdict:
        """What the gradients of ``optimizer`` are like.

        A gradient of 2**64 or more counts as an overflow: its square, Adam's second moment, would stay inf for good.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = self.gradients(parameters)
        seen = self._largest
        decisive, is_exact = self.decisive(parameters, gradients, before_clipping=self.is_scaled)
        values = torch.stack([decisive] if seen is None else [seen.to(decisive.device), decisive])

        def report() -> StepReport:
            known = values.tolist()
            measured, bound = None if seen is None else known[0], known[-1]
            overflow = not bound < SQUARES_BELOW and (is_exact or not all_finite(local_parts(gradients), SQUARES_BELOW))
            if is_repaired := measured is not None and not overflow and not math.isfinite(measured):
                self.warn_once(REPAIRED)
            # Without loss scaling there is no headroom to tell of.
            largest = None if overflow or is_repaired or not self.is_scaled else measured
            return self._ranks.agree(StepReport(overflow, largest), parameters)

        return Verdict(report, found_inf_of(decisive, SQUARES_BELOW))
