"""Optimizer step in backward: updates each parameter as soon as its gradient is complete, and frees the gradient.

At most one gradient exists at a time (LOMO, Lv et al. 2023, arXiv 2306.09782, section 3.1). As in other steps, an
overflow skips the whole step, and clipping uses the norm of this step's gradients. Both need all gradients before the
first update. So if the loss is scaled or gradients are clipped, ``loss.backward()`` runs two passes, as in LOMO: the
first measures and frees each gradient, the second updates. Otherwise one pass runs. It starts only if the loss is
finite, and raises at a gradient that overflows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hf_mp.kernels.gradient_scan import OVERFLOW_LIMIT, all_finite, norm_of
from hf_mp.model_index import optimizer_parameters
from hf_mp.scale_boundary import accumulating_edges
from hf_mp.scaling.rules import StepReport
from hf_mp.step.gradients import largest_unscaled_magnitude
from hf_mp.step.observers import StepController
from hf_mp.weights.fused_adamw import clip_factor
from hf_mp.weights.master_weight_optimizer import clip_grad_norm_, steps_by_parameter
from hf_mp.weights.split_parameter import (
    SplitParameter,
    gradient_and_factor,
    has_gradient,
    multiply_gradients,
)


@dataclass
class _Backward:
    """State of the running backward, or of the last one before its step."""

    task: int  # autograd's number
    own: set[int]  # ids of the optimizer's parameters
    phase: Literal["measure", "update", "discard"] = "measure"
    norms: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    largest: Tensor | None = None
    done: set[nn.Parameter] = field(default_factory=set)  # in this phase
    clip_factor: Tensor | None = None


class OptimizerInBackward(StepController):
    """Updates the parameters of one optimizer during backward.

    Clips the gradients to the global 2-norm ``max_grad_norm``; ``inf`` only measures it, None neither.
    """

    def __init__(self, runtime: Any, max_grad_norm: float | None) -> None:
        self.max_grad_norm = max_grad_norm
        self._runtime = runtime
        self._is_scaled = False
        self._optimizer: Any = None  # a MasterWeightOptimizer
        # AccumulateGrad nodes and their hooks, which run when a gradient is complete. A hook is freed with its node. A
        # node keeps its parameter alive, so the next forward replaces them.
        self._hook_handles: list[tuple[Any, RemovableHandle]] = []
        self._backward: _Backward | None = None

    def on_attach_optimizer(self, optimizer: Any) -> None:
        """Set the optimizer; a ValueError for a second one, or one that cannot step single parameters."""
        if self._optimizer is not None and self._optimizer is not optimizer:
            raise ValueError("free_gradients='backward' works with one optimizer: give it all parameters as groups")
        if not steps_by_parameter(optimizer.optimizer):
            raise ValueError(
                f"free_gradients='backward' steps one parameter at a time, and hf_mp does not know whether "
                f"{type(optimizer.optimizer).__name__} allows that: use an optimizer of torch.optim or bitsandbytes "
                "(in the Trainer: optim='adamw_torch'), or free_gradients='step'"
            )
        self._optimizer = optimizer

    def on_forward_begin(self, forward: Any, args: Any, kwargs: Any) -> None:
        """Register the hooks for this forward: autograd may have replaced nodes (``model.to``)."""
        runtime = forward.runtime
        self._is_scaled, parameters = runtime.check.is_scaled, list(runtime.model.parameters())
        if any(p.requires_grad and p.is_floating_point() and not isinstance(p, SplitParameter) for p in parameters):
            raise ValueError(
                "free_gradients='backward' needs every trainable parameter in 16 bits, and weights of normalizations "
                "with running statistics (BatchNorm) are FP32: use free_gradients='step', or freeze them"
            )
        self._register_hooks(parameters)

    def _register_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        for _, handle in self._hook_handles:
            handle.remove()
        # Hooks of parameters would make gradients FP32, and run at each use.
        split = [p for p in parameters if isinstance(p, SplitParameter) and p.requires_grad]
        nodes = [(get_gradient_edge(parameter).node, weakref.ref(parameter)) for parameter in split]
        self._hook_handles = [(node, node.register_hook(partial(self._complete, of))) for node, of in nodes]

    def on_detach(self) -> None:
        self._register_hooks([])
        self._optimizer, self._backward = None, None

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        """Begin a backward, if it is not ``torch.autograd.grad``."""
        if self._optimizer is None:
            return
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs free_gradients='step': 'backward' leaves no gradients")
        if accumulating_edges(node, [0]):
            self._begin(GradientEdge(*node.next_functions[0]), gradient, node.value)

    def _begin(self, edge: GradientEdge, gradient: Tensor, value: Tensor | None) -> None:
        """Begin a backward from a model output (``value`` if a scalar); run the first pass if there are two."""
        task = torch._C._current_graph_task_id()
        needs_first_pass = self._is_scaled or self.max_grad_norm is not None
        if self._backward is not None:
            self._check_second_output(self._backward.task == task, needs_first_pass)
            return
        backward = self._backward = _Backward(task, set(map(id, optimizer_parameters(self._optimizer))))
        if not needs_first_pass:
            is_finite = all_finite([gradient]) and (value is None or all_finite([value]))
            backward.phase = "update" if is_finite else "discard"
            return
        try:
            # The outer backward is the second pass.
            torch.autograd.backward([edge], [gradient], retain_graph=True)
        except BaseException:
            self._backward = None  # nothing was changed
            raise
        self._decide_second_pass(backward)

    @staticmethod
    def _check_second_output(is_same_backward: bool, needs_first_pass: bool) -> None:
        if not is_same_backward:
            raise RuntimeError(
                "a second backward() before optimizer.step(): with free_gradients='backward' the first one has "
                "updated the parameters already. To accumulate gradients, use free_gradients='step'"
            )
        if needs_first_pass:
            raise RuntimeError(
                "gradients enter the model through several outputs: with free_gradients='backward' they cannot be "
                "measured before they are used. Make one loss in the model, or use free_gradients='step'"
            )

    def _decide_second_pass(self, backward: _Backward) -> None:
        """Set the norm, clip factor and phase (update or discard) of the second pass."""
        backward.done = set()
        magnitudes = [] if backward.largest is None else [backward.largest]
        if self.max_grad_norm is not None:
            # in the order of the optimizer's sum
            in_order = [parameter for parameter in optimizer_parameters(self._optimizer) if parameter in backward.norms]
            self._runtime.grad_norm = norm = norm_of([backward.norms[parameter] for parameter in in_order])
            magnitudes.append(norm)  # if it exceeds FP32, clipping would set all gradients to 0
            if math.isfinite(self.max_grad_norm):
                backward.clip_factor = clip_factor(norm, self.max_grad_norm)
        if backward.largest is not None:
            self._runtime.on_backward_end(backward.largest)
        backward.phase = "update" if all_finite(magnitudes, OVERFLOW_LIMIT) else "discard"

    @torch.no_grad()
    def _complete(self, reference: weakref.ref[SplitParameter], *hook_arguments: Any) -> None:
        """Measure, use or discard the complete gradient of a parameter, and free it."""
        parameter, backward = reference(), self._backward
        if parameter is None or backward is None or not has_gradient(parameter):
            return
        if backward.phase != "measure" and id(parameter) not in backward.own:
            return  # no optimizer has it: its gradient stays
        if backward.phase != "discard":
            self._use_gradient(parameter, backward)
        parameter.grad = None

    def _use_gradient(self, parameter: SplitParameter, backward: _Backward) -> None:
        if parameter in backward.done:
            raise RuntimeError(
                "a parameter got gradients twice in one backward, and free_gradients='backward' has used the "
                "first: checkpoint with use_reentrant=False "
                "(gradient_checkpointing_kwargs={'use_reentrant': False}), or use free_gradients='step'"
            )
        # In both passes, because a user's hook may return other gradients in the second.
        largest = largest_unscaled_magnitude([gradient_and_factor(parameter)])  # type: ignore[list-item]
        if backward.phase == "update":
            self._update(parameter, largest.item(), backward)
        else:
            self._measure(parameter, largest, backward)
        backward.done.add(parameter)

    def _measure(self, parameter: SplitParameter, largest: Tensor, backward: _Backward) -> None:
        before = backward.largest
        backward.largest = largest if before is None else torch.maximum(before, largest.to(before.device))
        if self.max_grad_norm is not None and id(parameter) in backward.own:
            backward.norms[parameter] = clip_grad_norm_([parameter], math.inf)

    def _update(self, parameter: SplitParameter, largest: float, backward: _Backward) -> None:
        """Clip and step ``parameter``; a RuntimeError if its gradient overflows."""
        if not largest < OVERFLOW_LIMIT:
            raise RuntimeError(
                f"the largest gradient of a parameter of shape {tuple(parameter.shape)} is {largest:g}; "
                f"{len(backward.done)} parameters are updated already. Go back to a checkpoint, and use "
                "free_gradients='step', or max_grad_norm=inf where gradients may become inf or NaN"
            )
        if backward.clip_factor is not None:
            multiply_gradients([parameter], backward.clip_factor)
        self._optimizer.step_on([parameter])

    def report_from_backward(self) -> StepReport | None:
        """Return the report of the backward since the last step, or None without one. Reads the device."""
        backward = self._backward
        if backward is None:
            return None
        overflow, largest = backward.phase == "discard", None
        if self._is_scaled and backward.largest is not None and not overflow:
            largest = backward.largest.item()
        return StepReport(overflow, largest, not overflow or self._runtime.check.losses_are_finite())

    def on_step_finished(self, report: StepReport) -> None:
        self._backward = None
