"""``GradientCheck``: the backwards that run, the gradients that they left, clipping, and the overflow status."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from hf_mp._warnings import warn_caller
from hf_mp.casting.uncompiled import uncompiled
from hf_mp.kernels.gradient_scan import SQUARES_BELOW, all_finite, largest_magnitude, largest_magnitude_and_norm
from hf_mp.kernels.tensors import is_on_host
from hf_mp.ranks.agreement import Ranks
from hf_mp.ranks.parallelism import is_distributed, local_parts
from hf_mp.scaling.rules import StepReport
from hf_mp.step.profiling import profiled
from hf_mp.weights.fused_adamw import Clipping
from hf_mp.weights.outside_reads import as_stored
from hf_mp.weights.source import WeightStore

_DEVICES_WITH_FOUND_INF = ("cuda",)  # devices whose fused optimizers skip on found_inf, so that the host need not wait

NOT_ATTACHED = (
    "an optimizer that was not attached updates the weights of an attached model: its steps are taken even when "
    "gradients overflow, and the loss scale stays as it is. Call attach_optimizer(optimizer), or hf_mp.detach(model)"
)
WRITTEN_BETWEEN_BACKWARDS = (
    "weights of an attached model were written between two backwards, and no optimizer stepped: the gradients of the "
    "first backward count for no step. If these writes are an update, they are made even when gradients overflow: "
    "update by an optimizer that attach_optimizer(optimizer) was called with"
)


class ActiveBackwards:
    """The backwards under way that began at an output of the model, so that their gradients are scaled."""

    def __init__(self) -> None:
        self.open: set[int] = set()  # autograd's number of each
        # By autograd's number, those that custom backwards run (:mod:`hf_mp.step.custom_backward`).
        self.nested: dict[int, Any] = {}

    def are_scaled(self, task: int) -> bool:
        """Whether the gradients of the backward with this number, if it is of this model, are multiplied by S."""
        nested = None if task in self.open else self.nested.get(task)
        return bool(self.open) if nested is None else nested.is_scaled

    def register_backward(self, on_ended: Callable[[], None]) -> bool:
        """A gradient enters through an output; whether it is the first of its backward, which calls ``on_ended``."""
        task = torch._C._current_graph_task_id()
        if task in self.nested and self.nested[task].within.has_recomputed:
            raise RuntimeError(
                "the backward of a custom autograd function recomputes a part of an attached model, and runs another "
                "backward that also enters that model through its outputs: hf_mp cannot tell which of the gradients "
                "are multiplied by the loss scale. Run two, one for each"
            )
        is_first = task not in self.open
        if is_first:
            self.open.add(task)
            span = profiled("backward")  # a backward that raises ends its span when this object is freed
            span.__enter__()
            # Two callbacks deep: DDP queues its own after this one, and its all-reduce writes .grad until then.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            end = partial(self._end, task, span, on_ended)
            # autograd frees the callbacks of a backward that raises.
            weakref.finalize(end, self.open.discard, task).atexit = False
            queue(partial(queue, end))
        return is_first

    @uncompiled  # of a training step that is compiled, this would be compiled as a function of its own
    def _end(self, task: int, span: AbstractContextManager[Any], on_ended: Callable[[], None]) -> None:
        span.__exit__(None, None, None)
        self.open.discard(task)
        on_ended()


@dataclass(frozen=True)
class GradientMeasurement:
    """What was measured of the gradients when a backward ended, before anyone clips them."""

    largest: Tensor  # magnitude, unscaled; FP32 of shape ()
    norm: Tensor | None  # the global 2-norm, where it was asked for
    # By identity, held weakly, for they may be freed early, with their versions; empty where a write would not be seen.
    gradients: Mapping[int, tuple[weakref.ref[Tensor], int]]

    def is_of(self, gradients: Sequence[Tensor]) -> bool:
        """Whether ``gradients`` are those measured, at least one, and unwritten since (``.data`` is not seen)."""
        measured, given = self.gradients, {id(gradient): gradient for gradient in gradients}
        if not measured or len(gradients) != len(measured) or measured.keys() != given.keys():
            return False
        return all(
            given[key] is reference() and given[key]._version == seen for key, (reference, seen) in measured.items()
        )


@dataclass(frozen=True)
class OverflowStatus:
    """What the gradients of one optimizer are like, on their device: the host has read nothing before :meth:`read`."""

    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]
    # Their largest magnitude and, if it was measured, that of the backwards since the last step, before anyone clipped.
    # FP32, of shape (1,) or (2,): the host reads both at once.
    numbers: Tensor
    copy_event: Any = None  # the event after which they are on the host; None if they are there, or stay on the device

    @property
    def may_stay_on_device(self) -> bool:
        """Whether reading would stall the host though the device can skip the step; several processes have to agree."""
        kind = self.numbers.device.type
        if kind not in _DEVICES_WITH_FOUND_INF or is_distributed():
            return False
        # torch sends found_inf to parameters of the host as well, and reads it there before it has come.
        return all([getattr(gradient, f"is_{kind}") for gradient in self.gradients])  # a third of device.type's time

    def found_inf(self) -> Tensor:
        """FP32 of shape (): 1 for an overflow, else 0."""
        largest = self.numbers[0]
        return torch.logical_not(largest < SQUARES_BELOW, out=torch.empty_like(largest))  # two kernels

    def to_host(self) -> OverflowStatus:
        """This status, its numbers on their way to the host; :meth:`read` waits for them and no later kernel.

        Holds no gradients, so that they may be freed: those of a device that takes ``found_inf`` are not read again.
        """
        device = self.numbers.device
        numbers = self.numbers.to("cpu", non_blocking=True)  # into pinned memory
        copy_event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return OverflowStatus((), (), numbers, copy_event)

    def read(self) -> tuple[bool, float | None]:
        """Whether the gradients overflow, and the largest magnitude of the backward: one read of the device.

        2**64 or more counts as an overflow: its square, Adam's second moment, would stay inf for good.
        """
        if self.copy_event is not None:
            self.copy_event.synchronize()
        largest, *measured = self.numbers.tolist()
        return not largest < SQUARES_BELOW, measured[0] if measured else None


class GradientCheck:
    """Measures the gradients: for the loss scale when a backward ends, for the overflow status when an optimizer steps.

    Twice, because somebody may clip or write gradients in between; with ``measures_norm`` the status trusts what was
    measured when the backward ended.

    Args:
        on_ended: called when a backward has ended, with the largest unscaled magnitude (None where not measured).
        weights: whose gradients they are.
        ranks: the processes that train along.
        parameters: gives the parameters that a backward may leave gradients in.
        measures_norm: whether the 2-norm is measured as well, for :meth:`norm`, and the step uses the values that were
            measured. Default False: the step reads the gradients again, because a plain loop may have written them past
            their version counters (``.data``, NumPy).
    """

    def __init__(
        self,
        on_ended: Callable[[Tensor | None], None],
        weights: WeightStore,
        ranks: Ranks,
        parameters: Callable[[], Sequence[nn.Parameter]],
        *,
        measures_norm: bool = False,
    ) -> None:
        self._on_ended, self._weights, self._ranks, self.parameters = on_ended, weights, ranks, parameters
        self.measures_norm = measures_norm
        self.is_scaled = False  # whether the loss is scaled: not before a model is attached
        self.backwards = ActiveBackwards()
        self.compares_gradients = (
            False  # whether measurement_if_unchanged() is asked without measures_norm, as healing does
        )
        self._losses: list[Tensor | None] = []  # of the backwards since the last step, as the model computed them
        self._versions: dict[int, int] = {}  # of the weights, at the end of the last backward
        self._warned: set[str] = set()
        self.reset_step()

    def warn_once(self, message: str) -> None:
        """Warn of ``message`` unless that was done before."""
        if message not in self._warned:
            self._warned.add(message)
            warn_caller(message)

    def reset_step(self) -> None:
        """Begin anew: the gradients were used, or thrown away."""
        self._largest: Tensor | None = None  # of the unscaled gradients since the last step
        self._measured: GradientMeasurement | None = None  # when the last backward ended
        self.clipping: Clipping | None = None  # what the next update will scale down
        self.is_used_by_attached = False  # whether an optimizer that is attached to another model has used them

    # Backward

    def on_output_gradient(self, loss: Tensor | None) -> None:
        """A gradient enters the model through an output: the one place where a backward is known to begin.

        ``loss`` is that output as the model computed it, if it is a scalar.
        """
        if self.backwards.register_backward(self._backward_ended):
            if self._largest is not None:
                self._reset_if_stepped_elsewhere()
            if self._largest is None:
                self._losses = []
        self._losses.append(loss)

    def _reset_if_stepped_elsewhere(self) -> None:
        """Forget what was measured before if another optimizer has used it, or somebody has thrown it away."""
        parameters = self.parameters()
        versions = _versions_of(parameters)
        is_used = any(versions.get(weight, seen) != seen for weight, seen in self._versions.items())
        if is_used and not self.is_used_by_attached and NOT_ATTACHED not in self._warned:
            self.warn_once(WRITTEN_BETWEEN_BACKWARDS)
        if is_used or not self.gradients(parameters):
            self.reset_step()

    def _backward_ended(self) -> None:
        largest = None
        if self.is_scaled or self.measures_norm or self.compares_gradients:
            with profiled("gradients"):
                parameters = self.parameters()
                largest = self.measure(parameters)
            self._versions = _versions_of(parameters)
        self._on_ended(largest)

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The gradients that ``parameters`` have, as backward left them."""
        return [gradient for gradient, _ in self._weights.layout.gradients_and_factors(parameters)]

    def measure(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The largest magnitude of the gradients that a backward left; None for none (FSDP does not reduce yet)."""
        if not (found := self._weights.layout.gradients_and_factors(parameters)):
            return None
        gradients, norm = [gradient for gradient, _ in found], None
        are_dense_fp32 = self.measures_norm and all(
            type(gradient) is Tensor and not gradient.is_sparse and gradient.dtype is torch.float32 and factor is None
            for gradient, factor in found
        )
        if are_dense_fp32:
            largest, norm = largest_magnitude_and_norm(gradients)
        else:
            largest = largest_unscaled_magnitude(found)
        # A loop that reduces gradients itself writes them after its backward, and raises no version counter.
        is_final = (self.measures_norm or self.compares_gradients) and self._ranks.gradients_are_final(parameters)
        # A DTensor's version counter knows nothing of writes into its shard, and an inference tensor has none.
        is_known = is_final and all([type(one) is Tensor and not one.is_inference() for one in gradients])
        versions = {id(one): (weakref.ref(one), one._version) for one in gradients} if is_known else {}
        self._measured, self.clipping = GradientMeasurement(largest, norm, versions), None
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return largest

    def measurement_if_unchanged(self, gradients: Sequence[Tensor]) -> GradientMeasurement | None:
        """What was measured when the last backward ended, if ``gradients`` are still what it left."""
        measured = self._measured
        return measured if measured is not None and measured.is_of(gradients) else None

    # Clipping

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """The global 2-norm as the backward left it, bit for bit ``get_total_norm``'s; None where it is not known."""
        measured = self.measurement_if_unchanged(self.gradients(parameters))
        return None if measured is None else measured.norm

    def defer_clipping(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Have the next update scale all gradients down to ``max_norm``, from :meth:`norm`; ``inf`` leaves them alone.

        Until then gradients stay as they are: a kernel multiplies as it reads them, else torch does before the step.
        """
        is_known = is_on_host(norm)  # for any other device the comparison would wait
        if not math.isfinite(max_norm) or (is_known and max_norm / (norm + 1e-6) >= 1):
            return  # torch would multiply them by 1
        self.clipping = Clipping(parameters, max_norm, norm)
        if is_known and not norm.isfinite() and all_finite(local_parts(self.gradients(parameters))):
            self.apply_clipping()  # finite gradients of a norm beyond FP32: to 0, and the step is taken, as by torch
            self._measured = None

    def apply_clipping(self) -> None:
        """Scale the gradients down where that was left to the update, for an optimizer that reads them itself."""
        clipping, self.clipping = self.clipping, None
        if clipping is not None:
            clip_grads_with_norm_(*clipping)

    # Step

    def overflow_status(self, parameters: Sequence[nn.Parameter]) -> OverflowStatus:
        """What the gradients of ``parameters``, an optimizer's, are like now."""
        gradients = self.gradients(parameters)
        measured = self.measurement_if_unchanged(gradients) if self.measures_norm else None
        largest = largest_magnitude(local_parts(gradients)) if measured is None else measured.largest
        so_far = self._largest
        numbers = largest[None] if so_far is None else torch.stack([largest, so_far.to(largest.device)])
        return OverflowStatus(parameters, gradients, numbers)

    def overflows(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether gradients of ``parameters`` overflow now; reads the device, and is a collective call of all ranks."""
        overflow, _ = self.overflow_status(parameters).read()
        return self._ranks.agree(StepReport(overflow), parameters).overflow

    def losses_are_finite(self) -> bool:
        """Whether the losses since the last step are finite: inf and NaN in a loss are there at any loss scale."""
        return all_finite([loss for loss in self._losses if loss is not None])

    def all_ranks_report(self, status: OverflowStatus | StepReport) -> StepReport:
        """The report on which all processes that train the parameters agree: a collective call if there are several."""
        if isinstance(status, StepReport):
            return status
        overflow, largest = status.read()
        is_elsewhere = largest is not None and not overflow and not math.isfinite(largest) and self.is_scaled
        if is_elsewhere and all_finite(local_parts(self.gradients(self.parameters()))):  # else another optimizer has it
            self.warn_once(
                "gradients were inf or NaN when the backward ended, and are finite at optimizer.step(): the step is "
                "taken with what is there now, and the loss scale does not learn of the overflow"
            )
        # Without loss scaling there is no headroom to tell of.
        is_known = self.is_scaled and not overflow and not is_elsewhere
        is_of_scale = not overflow or self.losses_are_finite()
        return self._ranks.agree(StepReport(overflow, largest if is_known else None, is_of_scale), status.parameters)


def _versions_of(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """The version counters of the trained ones of ``parameters``, by identity."""
    with as_stored():
        return {id(parameter): parameter._version for parameter in parameters if parameter.requires_grad}


def largest_unscaled_magnitude(found: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The largest magnitude of gradients, at least one, times their factors (None for 1), FP32 of shape ()."""
    # A fused scan takes gradients of one factor together.
    by_factor: dict[Tensor | None, list[Tensor]] = {}
    for gradient, factor in found:
        by_factor.setdefault(factor, []).append(gradient)
    largest: list[Tensor] = []
    for factor, gradients in by_factor.items():
        magnitude = largest_magnitude(local_parts(gradients))
        largest.append(magnitude if factor is None else magnitude * factor.squeeze())
    first, *others = largest
    return torch.stack([first, *[one.to(first.device) for one in others]]).max() if others else first


def names_of_overflowing(weights: WeightStore, model: nn.Module | None) -> list[str]:
    """The parameters whose gradients make a step be skipped, by name."""
    named = () if model is None else model.named_parameters()
    # One read of the device for each parameter: only the error that ends a training asks.
    gradients = {name: weights.layout.gradients_and_factors([one]) for name, one in named}
    largest = {name: largest_unscaled_magnitude(one).item() for name, one in gradients.items() if one}
    found = {name: value for name, value in largest.items() if not value < SQUARES_BELOW}
    return [f"{name} ({value:g} squared)" if math.isfinite(value) else name for name, value in found.items()]
