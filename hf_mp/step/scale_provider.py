"""``LossScaleProvider``: S and 1/S for the scale boundary of one attached model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from hf_mp.casting.autocast_stack import state
from hf_mp.casting.dispatcher_kernels import current_graph_task
from hf_mp.scale_boundary import accumulating_edges


class LossScaleProvider:
    """:class:`~hf_mp.scale_boundary.ScaleProvider` of the model of ``runtime``, a ``StepRuntime``."""

    def __init__(self, runtime: Any) -> None:
        self._runtime, self.scaler = runtime, runtime.scaler

    @property
    def updates_in_backward(self) -> bool:
        """Whether each gradient is used during the backward, before DDP can reduce it."""
        return self._runtime.updates_in_backward

    def loss_scale_for(self, device: torch.device) -> Tensor | None:
        self.scaler.finish_pending_step()  # it may change S
        return self.scaler.scale_and_inverse(device).scale if self._runtime.check.is_scaled else None

    def inverse_scale_for(self, device: torch.device, node: Any, indices: Sequence[int]) -> Tensor | None:
        """Return 1/S if the gradients that reach ``node`` are multiplied by S, otherwise None.

        In the order of the code:

        1. The precision has no loss scale: None.
        2. A custom backward runs this backward: :meth:`_inverse_scale_in`.
        3. A backward through an output of the model runs, this one or one around it: 1/S. Code that recomputes a part
           of a forward is excepted: its gradients are not scaled.
        4. The backward has reached no output, so S was not applied: None. Warns if gradients reach ``.grad``.
        """
        check = self._runtime.check
        if not check.is_scaled:
            return None
        backwards, task = check.backwards, current_graph_task()
        nested = None if task in backwards.through_output else backwards.nested.get(task)
        if nested is not None:
            return self._inverse_scale_in(nested, device, node, indices)
        forward, autocast = state.forward, self._runtime.autocast
        is_recomputing = forward is not None and forward.autocast is autocast and forward.is_recomputing
        if backwards.through_output and not is_recomputing:
            return self.scaler.scale_and_inverse(device).inverse
        if accumulating_edges(node, indices):
            check.warn_once(
                "gradients reached the parameters of an attached model, but none came in through its outputs, so the "
                "loss scale was not applied and small ones may be lost. The loss was computed from a tensor that "
                "forward() did not return (a hook, an attribute, a closure): return it, in a tuple, a mapping, a "
                "dataclass or an object"
            )
        return None

    def _inverse_scale_in(self, nested: Any, device: torch.device, node: Any, indices: Sequence[int]) -> Tensor | None:
        """As :meth:`inverse_scale_for`, for a backward ``nested`` that a custom backward runs.

        If it adds to ``.grad``, the gradients leave the scaled graph: 1/S. Gradients of ``torch.autograd.grad`` go back
        to it, because the custom backward returns them: None. They are recorded, and must not be written to ``.grad``.
        """
        if nested.is_scaled and nested.accumulates:
            return self.scaler.scale_and_inverse(device).inverse
        if nested.is_scaled:
            nested.within.record_returned(node, indices)
        return None

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        self._runtime.begin_iteration()
        check, observers = self._runtime.check, self._runtime.observers
        is_needed = check.is_scaled or check.measures_norm or observers
        if is_needed or profiler._is_profiler_enabled:  # the profiler shows the backward
            check.record_backward(getattr(node, "value", None))  # None for a second derivative
        for observer in observers:
            observer.on_output_gradient(node, gradient)

    def take_scaled_gradients(self, node: Any, gradients: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        layout = self._runtime.weights.layout
        if layout.keeps_scaled_gradients:
            # None in autograd.grad() and with create_graph=True: autograd itself returns or accumulates gradients then.
            weights = {index: node.originals[index] for index in accumulating_edges(node, gradients)}
            layout.store_scaled_gradients(weights, gradients, inverse)  # removes those stored from `gradients`
