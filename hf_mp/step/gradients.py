"""``GradientCheck``: measures gradients, clips them, and detects an overflow before the update."""

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
from hf_mp.casting.compile_exclusion import uncompiled
from hf_mp.kernels.gradient_scan import OVERFLOW_LIMIT, all_finite, largest_magnitude, largest_magnitude_and_norm
from hf_mp.kernels.tensors import is_on_host
from hf_mp.ranks.agreement import RankGroup
from hf_mp.ranks.parallelism import is_distributed, local_parts
from hf_mp.scaling.rules import StepReport
from hf_mp.step.profiling import profiled
from hf_mp.weights.fp32_reads import as_stored
from hf_mp.weights.fused_adamw import Clipping
from hf_mp.weights.weight_store import WeightStore

_DEVICES_WITH_FOUND_INF = ("cuda",)  # their fused optimizers skip on found_inf

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
    """Running backwards, by autograd's number."""

    def __init__(self) -> None:
        self.through_output: set[int] = set()  # those that have passed through a model output
        self.nested: dict[int, Any] = {}  # the NestedBackwards, which custom backwards run

    def are_scaled(self, task: int) -> bool:
        """Return whether the gradients of backward ``task`` are multiplied by S in this model."""
        nested = None if task in self.through_output else self.nested.get(task)
        return bool(self.through_output) if nested is None else nested.is_scaled

    def register_backward(self, on_ended: Callable[[], None]) -> bool:
        """Record the running backward, and call ``on_ended`` at its end; return whether it was new."""
        task = torch._C._current_graph_task_id()
        if task in self.nested and self.nested[task].within.has_recomputed:
            raise RuntimeError(
                "the backward of a custom autograd function recomputes a part of an attached model, and runs another "
                "backward that also enters that model through its outputs: hf_mp cannot tell which of the gradients "
                "are multiplied by the loss scale. Run two, one for each"
            )
        is_first = task not in self.through_output
        if is_first:
            self.through_output.add(task)
            self._call_at_end(task, on_ended)
        return is_first

    def _call_at_end(self, task: int, on_ended: Callable[[], None]) -> None:
        """Call ``on_ended`` at the end of the running backward; end its record also if it raises."""
        profile = profiled("backward")
        profile.__enter__()
        end = partial(self._end, task, profile, on_ended)
        # If the backward raises, autograd frees `end`, which ends the record and the profile.
        weakref.finalize(end, self.through_output.discard, task).atexit = False
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, end))  # queued again, to run after the callback of DDP, which waits for the all-reduce

    @uncompiled  # otherwise a compiled training step compiles it separately
    def _end(self, task: int, profile: AbstractContextManager[Any], on_ended: Callable[[], None]) -> None:
        profile.__exit__(None, None, None)
        self.through_output.discard(task)
        on_ended()


@dataclass(frozen=True)
class GradientMeasurement:
    """Gradients at the end of a backward, before clipping.

    Attributes:
        largest: largest unscaled magnitude, FP32 of shape ().
        norm: global 2-norm, FP32 of shape (), or None.
        gradients: weak references and version counters by ``id``; empty if writes do not raise version counters.
    """

    largest: Tensor
    norm: Tensor | None
    gradients: Mapping[int, tuple[weakref.ref[Tensor], int]]

    def is_of(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether ``gradients`` are those measured, with the same version counters."""
        measured, given = self.gradients, {id(gradient): gradient for gradient in gradients}
        if not measured or len(gradients) != len(measured) or measured.keys() != given.keys():
            return False
        return all(
            given[key] is reference() and given[key]._version == version
            for key, (reference, version) in measured.items()
        )


@dataclass(frozen=True)
class OverflowStatus:
    """Overflow status of the gradients of one optimizer, on their device. Only :meth:`read` synchronizes.

    Attributes:
        parameters, gradients: those of the optimizer.
        numbers: FP32 of shape (1,) or (2,): the largest magnitude of ``gradients`` and, if measured, that of the
            backwards since the last step, before clipping.
        copy_event: CUDA event after the copy of ``numbers`` to the host, or None.
    """

    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]
    numbers: Tensor
    copy_event: Any = None

    @property
    def may_stay_on_device(self) -> bool:
        """Whether the device can skip the step. Several processes need the status on the host."""
        device_type = self.numbers.device.type
        if device_type not in _DEVICES_WITH_FOUND_INF or is_distributed():
            return False
        # For parameters on the host, torch reads found_inf before its copy is complete. `is_cuda` is three times as
        # fast as `device.type`.
        return all([getattr(gradient, f"is_{device_type}") for gradient in self.gradients])

    def found_inf(self) -> Tensor:
        """Return 1 for an overflow, otherwise 0, on the device: FP32 of shape ()."""
        largest = self.numbers[0]
        return torch.logical_not(largest < OVERFLOW_LIMIT, out=torch.empty_like(largest))  # two kernels; also for NaN

    def to_host(self) -> OverflowStatus:
        """Copy the numbers to the host without waiting; return a status of them that references no gradients."""
        device = self.numbers.device
        numbers = self.numbers.to("cpu", non_blocking=True)  # into pinned memory
        copy_event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return OverflowStatus((), (), numbers, copy_event)

    def read(self) -> tuple[bool, float | None]:
        """Return whether the gradients overflow, and the largest magnitude of the backwards. Synchronizes.

        2**64 and more overflow, because the square would make Adam's second moment inf permanently.
        """
        if self.copy_event is not None:
            self.copy_event.synchronize()
        largest, *measured = self.numbers.tolist()
        return not largest < OVERFLOW_LIMIT, measured[0] if measured else None


class GradientCheck:
    """Measures gradients after a backward, for the loss scale, and again before an update, for the overflow status.

    Args:
        on_ended: called after a backward, with the largest unscaled magnitude on the device (None if not measured).
        parameters: returns the parameters with gradients from a backward.
        measures_norm: whether to measure the 2-norm too, and to measure again before the update only if a version
            counter has changed. Default False, because writes through ``.data`` and NumPy change none.

    Attributes:
        is_scaled: whether the loss is scaled; False until a model is attached.
        compares_gradients: whether healing calls :meth:`measurement_if_unchanged`.
    """

    def __init__(
        self,
        on_ended: Callable[[Tensor | None], None],
        weights: WeightStore,
        ranks: RankGroup,
        parameters: Callable[[], Sequence[nn.Parameter]],
        *,
        measures_norm: bool = False,
    ) -> None:
        self._on_ended, self._weights, self._ranks, self.parameters = on_ended, weights, ranks, parameters
        self.measures_norm = measures_norm
        self.is_scaled = self.compares_gradients = False
        self.backwards = ActiveBackwards()
        self._losses: list[Tensor | None] = []  # since the last step, before the cast to FP32
        self._versions: dict[int, int] = {}  # of the weights at the end of the last backward
        self._warned: set[str] = set()
        self.reset_step()

    def warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn_caller(message)

    def reset_step(self) -> None:
        """Discard the measurements: the gradients were used or freed."""
        self._largest: Tensor | None = None  # of the unscaled magnitudes since the last step
        self._measured: GradientMeasurement | None = None  # after the last backward
        self.clipping: Clipping | None = None  # deferred to the next update
        self.was_used_by_other_model = False  # whether the optimizer of another model has used the gradients

    # Backward

    def record_backward(self, loss: Tensor | None) -> None:
        """Record the running backward, which reaches a model output, and ``loss``, that output if it is a scalar."""
        is_new = self.backwards.register_backward(self._backward_ended)
        if is_new and self._largest is not None:
            self._reset_if_stepped_elsewhere()
        if is_new and self._largest is None:  # stepped since, or not measured
            self._losses = []
        self._losses.append(loss)

    def _reset_if_stepped_elsewhere(self) -> None:
        """Discard the measurements if gradients were freed, or with a warning if weights were written."""
        parameters = self.parameters()
        versions = _versions_of(parameters)
        is_used = any(versions.get(weight, before) != before for weight, before in self._versions.items())
        if is_used and not self.was_used_by_other_model and NOT_ATTACHED not in self._warned:
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
        """Return the gradients of ``parameters`` as stored: scaled in a lean layout."""
        return [gradient for gradient, _ in self._weights.layout.gradients_and_factors(parameters)]

    def measure(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Measure the gradients after a backward; return the largest, or None before FSDP reduces them."""
        found = self._weights.layout.gradients_and_factors(parameters)
        if not found:
            return None
        gradients = [gradient for gradient, _ in found]
        has_norm = self.measures_norm and all(
            type(gradient) is Tensor and not gradient.is_sparse and gradient.dtype is torch.float32 and factor is None
            for gradient, factor in found
        )
        largest, norm = largest_magnitude_and_norm(gradients) if has_norm else (largest_unscaled_magnitude(found), None)
        self._measured = GradientMeasurement(largest, norm, self._versions_of_gradients(gradients, parameters))
        self.clipping = None
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return largest

    def _versions_of_gradients(
        self, gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> dict[int, tuple[weakref.ref[Tensor], int]]:
        is_needed = self.measures_norm or self.compares_gradients
        # Collective calls of a loop and writes to the shard of a DTensor raise no version counters.
        is_final = is_needed and self._ranks.are_gradients_reduced(parameters)
        has_versions = is_final and all([type(one) is Tensor and not one.is_inference() for one in gradients])
        return {id(one): (weakref.ref(one), one._version) for one in gradients} if has_versions else {}

    def measurement_if_unchanged(self, gradients: Sequence[Tensor]) -> GradientMeasurement | None:
        """Return the measurement of the last backward; None if ``gradients`` differ from those measured."""
        measured = self._measured
        return measured if measured is not None and measured.is_of(gradients) else None

    # Clipping

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return the 2-norm, with the bits of ``get_total_norm``; None if gradients have changed since the backward."""
        measured = self.measurement_if_unchanged(self.gradients(parameters))
        return None if measured is None else measured.norm

    def defer_clipping(self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Clip the gradients of ``parameters`` to the 2-norm ``max_norm`` in the next update.

        ``norm`` is their 2-norm, FP32 of shape (). ``max_norm=inf`` clips nothing. The fused kernel multiplies each
        gradient that it reads; otherwise torch multiplies the gradients before the step.
        """
        can_read = is_on_host(norm)  # elsewhere, reading it would synchronize
        if not math.isfinite(max_norm) or (can_read and max_norm / (norm + 1e-6) >= 1):
            return  # the factor is 1
        self.clipping = Clipping(parameters, max_norm, norm)
        # A norm beyond FP32 clips finite gradients to 0, as in torch. The check of the step must see the zeros, not the
        # gradients before. On a GPU the norm is not read.
        if can_read and not norm.isfinite() and all_finite(local_parts(self.gradients(parameters))):
            self.apply_clipping()
            self._measured = None  # measured before clipping

    def apply_clipping(self) -> None:
        """Clip now, for an optimizer that reads the gradients itself."""
        clipping, self.clipping = self.clipping, None
        if clipping is not None:
            clip_grads_with_norm_(*clipping)

    # Step

    def overflow_status(self, parameters: Sequence[nn.Parameter]) -> OverflowStatus:
        """Return the overflow status of ``parameters``, those of an optimizer."""
        gradients = self.gradients(parameters)
        measured = self.measurement_if_unchanged(gradients) if self.measures_norm else None
        largest = largest_magnitude(local_parts(gradients)) if measured is None else measured.largest
        of_backwards = self._largest
        numbers = largest[None] if of_backwards is None else torch.stack([largest, of_backwards.to(largest.device)])
        return OverflowStatus(parameters, gradients, numbers)

    def overflows(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether gradients of ``parameters`` overflow on any rank: a collective call that synchronizes."""
        overflow, _ = self.overflow_status(parameters).read()
        return self._ranks.all_reduce_report(StepReport(overflow), parameters).overflow

    def losses_are_finite(self) -> bool:
        """Return whether the losses since the last step are finite; if not, no loss scale prevents the overflow."""
        return all_finite([loss for loss in self._losses if loss is not None])

    def all_ranks_report(self, status: OverflowStatus | StepReport) -> StepReport:
        """Read ``status`` and return the report of all ranks (a collective call); return a StepReport unchanged."""
        if isinstance(status, StepReport):
            return status
        overflow, largest = status.read()
        if not self.is_scaled or overflow:
            largest = None
        # inf or NaN was overwritten since the backward, or is in gradients of another optimizer.
        only_backward_overflowed = largest is not None and not math.isfinite(largest)
        if only_backward_overflowed and all_finite(local_parts(self.gradients(self.parameters()))):
            self.warn_once(
                "gradients were inf or NaN when the backward ended, and are finite at optimizer.step(): the step is "
                "taken with what is there now, and the loss scale does not learn of the overflow"
            )
        report = StepReport(
            overflow,
            largest_gradient=None if only_backward_overflowed else largest,
            may_be_scale=not overflow or self.losses_are_finite(),
        )
        return self._ranks.all_reduce_report(report, status.parameters)


def _versions_of(parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    with as_stored():
        return {id(parameter): parameter._version for parameter in parameters if parameter.requires_grad}


def largest_unscaled_magnitude(found: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Return the largest magnitude of gradients (at least one) times factors (None for 1): FP32 of shape ()."""
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
    """Return the names of parameters with overflowing gradients, with the magnitude if it is finite."""
    named = () if model is None else model.named_parameters()
    # Synchronizes for each parameter: only for the error that ends a training.
    gradients = {name: weights.layout.gradients_and_factors([one]) for name, one in named}
    largest = {name: largest_unscaled_magnitude(one).item() for name, one in gradients.items() if one}
    found = {name: value for name, value in largest.items() if not value < OVERFLOW_LIMIT}
    # A finite value is too large because its square overflows in Adam.
    return [f"{name} ({value:g} squared)" if math.isfinite(value) else name for name, value in found.items()]
