"""``GradientCheck``: what a backward left in the gradients, looked at once, and the verdict that a step needs."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import SQUARES_BELOW, all_finite, largest_magnitude, largest_magnitude_and_norm
from hf_mp.scaling.rules import StepReport
from hf_mp.weights.distributed import Ranks, local_part
from hf_mp.weights.layout import WeightLayout

UNKNOWN_OPTIMIZER = (
    "this model is attached to a MixedPrecision, and an optimizer that it does not know updates its weights: updates "
    "that overflow are not skipped, and the loss scale stands still. Call attach_optimizer(optimizer), or detach()"
)
NO_BORDER = (
    "gradients reached the parameters of an attached model, but none came in through its outputs, so the loss scale "
    "was not applied and small ones may be lost. The loss was computed from a tensor that forward() did not return (a "
    "hook, an attribute, a closure): return it, in a tuple, a mapping, a dataclass or an object"
)


class GradientCheck:
    """Measures the gradients when a backward ends, before anyone clips them, and tells whether a step is to be skipped.

    Args:
        ranks: which processes train together.
        on_ended: called when a backward has ended, with the largest magnitude: unscaled, not read yet; None where it
            was not measured.

    Attributes:
        layout: the :class:`WeightLayout` of the model.
        parameters: gives the parameters whose gradients a backward of the model may leave.
        is_scaled: whether the loss is scaled.
        runs: whether a backward runs that came in through an output of the model, so that its gradients are scaled.
        measures_norm: whether the global norm is measured along; set by who clips with :meth:`norm`.
    """

    def __init__(self, ranks: Ranks, on_ended: Callable[[Tensor | None], None]) -> None:
        self.layout: WeightLayout | None = None
        self.parameters: Callable[[], Sequence[nn.Parameter]] = list
        self.is_scaled = self.measures_norm = False
        self._ranks, self._on_ended = ranks, on_ended
        self._task: int | None = None  # autograd's number of the backward that runs, or ran last
        self.runs = False
        self._warned: set[str] = set()
        self._weights_version = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew: the gradients were used, or thrown away."""
        self._largest: Tensor | None = None  # of the unscaled gradients since the last step
        self._norm: Tensor | None = None
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def backward_began(self) -> None:
        """A gradient enters the model through an output: the one place where a backward is known to begin."""
        if (task := torch._C._current_graph_task_id()) == self._task:
            return
        self._task = task
        if self._largest is not None and not self._gradients(parameters := self.parameters()):
            if _version(parameters) != self._weights_version:  # another optimizer has used them
                self._warn(UNKNOWN_OPTIMIZER)
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

    def warn_of_leak(self) -> None:
        """A gradient leaves to a parameter's ``.grad`` in a backward that did not come in through an output."""
        self._warn(NO_BORDER)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        return [] if self.layout is None else self.layout.gradients(parameters)

    def _backward_ended(self) -> None:
        self.runs = False
        largest = self._measure() if self.is_scaled or self.measures_norm else None
        self._on_ended(largest)

    def _measure(self) -> Tensor | None:
        """The largest magnitude of what the backward left; None for nothing (FSDP accumulates without reducing)."""
        parameters = self.parameters()
        found = self._gradients(parameters)
        if not found:
            return None
        gradients = [gradient for gradient, _ in found]
        norm: Tensor | None = None
        if self.measures_norm and all(_is_plain_fp32(gradient, factor) for gradient, factor in found):
            largest, norm = largest_magnitude_and_norm(gradients)
        else:
            largest = largest_true_magnitude(found)
        self._see(gradients, norm)
        self._weights_version = _version(parameters)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return largest

    def _see(self, gradients: Iterable[Tensor], norm: Tensor | None) -> None:
        # Weakly: gradients may be freed early. A DTensor's version counter knows nothing of writes into its shard.
        plain = [gradient for gradient in gradients if type(gradient) is Tensor]
        self._seen = {id(gradient): (weakref.ref(gradient), gradient._version) for gradient in plain}
        self._norm = norm

    def _are_as_seen(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> bool:
        """Whether these gradients are those that were measured when the backward ended, and unchanged since."""
        if not gradients or not self._ranks.gradients_are_final(parameters):
            return False
        for gradient in gradients:
            reference, version = self._seen.get(id(gradient), (None, None))
            if reference is None or reference() is not gradient or version != gradient._version:
                return False
        return True

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The global 2-norm of the gradients as the backward left them; None where it is not known (any more).

        Bit for bit that of ``torch.nn.utils.get_total_norm``, measured along while :attr:`measures_norm` is set.
        """
        gradients = [gradient for gradient, _ in self._gradients(parameters)]
        is_all = self._seen.keys() <= set(map(id, gradients))
        return self._norm if is_all and self._are_as_seen(parameters, gradients) else None

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale the gradients down to ``max_norm``, as ``torch.nn.utils.clip_grads_with_norm_`` does.

        Args:
            parameters: all that have gradients.
            max_norm: above 0.
            norm: what :meth:`norm` told. With a finite one, what was finite stays so, and is not looked at again.
        """
        if norm <= max_norm - 1e-5:  # the factor is 1: one pass over the gradients less
            return
        clip_grads_with_norm_(parameters, max_norm, norm)
        if norm.isfinite():  # others have become 0 or NaN
            self._see([gradient for gradient, _ in self._gradients(parameters)], None)

    def report(self, optimizer: Optimizer) -> StepReport:
        """What the gradients of ``optimizer`` are like, on all ranks: one read of a device value.

        A gradient of 2**64 or more counts as an overflow: its square, Adam's second moment, would stay inf for good.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [gradient for gradient, _ in self._gradients(parameters)]
        measured = None if self._largest is None else self._largest.item()
        # In a loop of one's own, gradients may be written so that no version counter rises (`.data`, NumPy).
        if measured is not None and self.measures_norm and self._are_as_seen(parameters, gradients):
            overflow = not measured < SQUARES_BELOW
        else:
            overflow = not all_finite(map(local_part, gradients), SQUARES_BELOW)
        # Clipping by value, or a repair by hand, may have hidden what the backward gave.
        overflow = overflow or (measured is not None and not math.isfinite(measured))
        # Without loss scaling there is no headroom to tell of.
        largest = measured if self.is_scaled and not overflow else None
        return self._ranks.agree(StepReport(overflow, largest), parameters)

    def culprits(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        """The parameters whose gradients make a step be skipped, by name."""
        largest = {name: largest_true_magnitude(self._gradients([parameter])).item() for name, parameter in named}
        return [
            f"{name} ({found:g} squared)" if math.isfinite(found) else name
            for name, found in largest.items()
            if not found < SQUARES_BELOW
        ]


def _version(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter._version for parameter in parameters[:1])


def _is_plain_fp32(gradient: Tensor, factor: Tensor | None) -> bool:
    is_dense = type(gradient) is Tensor and not gradient.is_sparse
    return is_dense and gradient.dtype is torch.float32 and factor is None


def largest_true_magnitude(found: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The largest magnitude of gradients times their factors, FP32 of shape (); the gradients are not written to.

    Args:
        found: gradients, each with the factor that makes it true: FP32 of shape (1,), or None for 1.
    """
    by_factor: dict[Tensor | None, list[Tensor]] = {}
    for gradient, factor in found:
        by_factor.setdefault(factor, []).append(local_part(gradient))
    largest = [
        largest_magnitude(gradients) if factor is None else largest_magnitude(gradients) * factor.squeeze()
        for factor, gradients in by_factor.items()
    ]
    if not largest:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.stack([magnitude.to(largest[0].device) for magnitude in largest]).max()
