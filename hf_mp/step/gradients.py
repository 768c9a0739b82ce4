"""``GradientCheck``: what a backward left in the gradients, looked at once, and the verdict that a step needs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import SQUARES_BELOW, all_finite
from hf_mp.scaling.rules import StepReport
from hf_mp.weights.attachable import UNKNOWN_OPTIMIZER
from hf_mp.weights.distributed import Ranks, local_part
from hf_mp.weights.layout import WeightLayout, measure
from hf_mp.weights.seen_gradients import SeenGradients


class GradientCheck:
    """Measures the gradients when a backward ends, before anyone clips them, and tells whether to skip a step.

    Args:
        layout: of the model; set again when the processes that train together change it.
        ranks: which processes train together.
        parameters: gives the parameters whose gradients a backward of the model may leave, each once.
        on_ended: called when a backward has ended, with the largest unscaled magnitude; None where not measured.
    """

    def __init__(
        self,
        layout: WeightLayout,
        ranks: Ranks,
        parameters: Callable[[], Sequence[nn.Parameter]],
        on_ended: Callable[[Tensor | None], None],
    ) -> None:
        self.layout, self._ranks, self.parameters, self._on_ended = layout, ranks, parameters, on_ended
        self.is_scaled = False  # whether the loss is scaled
        self.measures_norm = False  # whether the global norm is measured along, for norm()
        self.runs = False  # a backward that came in through an output of the model, so that its gradients are scaled
        self._task: int | None = None  # autograd's number of the backward that runs, or ran last
        self._warned: set[str] = set()
        self._weights_version = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew: the gradients were used, or thrown away."""
        self._largest: Tensor | None = None  # of the unscaled gradients since the last step
        self._seen = SeenGradients()

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [gradient for gradient, _ in self.layout.gradients(parameters)]

    def backward_began(self) -> None:
        """A gradient enters the model through an output: the one place where a backward is known to begin."""
        if (task := torch._C._current_graph_task_id()) == self._task:
            return
        self._task = task
        if self._largest is not None and not self._gradients(parameters := self.parameters()):
            if _version(parameters) != self._weights_version:  # another optimizer has used them
                self.warn_once(UNKNOWN_OPTIMIZER)
            self.forget()  # what was measured before was thrown away without a step
        self.runs = True
        # Two callbacks deep: the first of DDP's follow this one, and its all-reduce may write .grad till then.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._backward_ended))

    @contextmanager
    def no_backward(self) -> Iterator[None]:
        """To run forward code in that a backward calls: what it differentiates itself is not scaled."""
        before, self.runs = self.runs, False
        try:
            yield
        finally:
            self.runs = before

    def warn_once(self, message: str) -> None:
        """Warn of ``message`` unless that was done before."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def _backward_ended(self) -> None:
        self.runs = False
        self._on_ended(self._measure() if self.is_scaled or self.measures_norm else None)

    def _measure(self) -> Tensor | None:
        """The largest magnitude of what the backward left; None for nothing (FSDP accumulates without reducing)."""
        parameters = self.parameters()
        if not (found := self.layout.gradients(parameters)):
            return None
        largest, norm = measure(found, with_norm=self.measures_norm)
        if self._ranks.gradients_are_final(parameters):
            self._seen = SeenGradients([gradient for gradient, _ in found], norm)
        self._weights_version = _version(parameters)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return largest

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The global 2-norm of the gradients as the backward left them; None where it is not known (any more).

        Bit for bit that of ``torch.nn.utils.get_total_norm``, measured along while :attr:`measures_norm` is set.
        """
        return self._seen.norm_of(self._gradients(parameters))

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale all gradients down to ``max_norm``, as ``torch.nn.utils.clip_grads_with_norm_``, from :meth:`norm`."""
        self._seen = self._seen.clip(parameters, max_norm, norm)

    def report(self, optimizer: Optimizer) -> StepReport:
        """What the gradients of ``optimizer`` are like, on all ranks: one read of a device value.

        A gradient of 2**64 or more counts as an overflow: its square, Adam's second moment, would stay inf for good.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = self._gradients(parameters)
        measured = None if self._largest is None else self._largest.item()
        # In a plain loop, gradients may be written so that no version counter rises (`.data`, NumPy).
        if measured is not None and self.measures_norm and self._seen.hold(gradients):
            overflow = not measured < SQUARES_BELOW
        else:
            overflow = not all_finite(map(local_part, gradients), SQUARES_BELOW)
        # Clipping by value, or a repair by hand, may have hidden what the backward gave.
        overflow = overflow or (measured is not None and not math.isfinite(measured))
        # Without loss scaling there is no headroom to tell of.
        largest = measured if self.is_scaled and not overflow else None
        return self._ranks.agree(StepReport(overflow, largest), parameters)


def _version(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter._version for parameter in parameters[:1])
