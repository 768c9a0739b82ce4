"""Optimizer-in-backward: each parameter is updated as soon as its own gradient is complete.

Never more than one gradient is there (LOMO, Lv et al. 2023, arXiv 2306.09782, section 3.1), and a step keeps what it
always keeps: one that overflows changes nothing, and clipping is by the norm of this step's gradients.

Skipping and clipping depend on the last gradient of a backward, when the first ones are used up, and undoing an update
would take more memory than the gradient that is saved. So where the loss is scaled or gradients are clipped, backward
runs twice inside ``loss.backward()``, as LOMO's does: the first pass measures each gradient and drops it, the second
updates. Without loss scale and clipping, one pass will do: it starts only if the loss is finite, and stops with an
error at a gradient that is not.
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

from hf_mp.borders import accumulating_edges
from hf_mp.kernels.gradient_scan import SQUARES_BELOW, all_finite, norm_of
from hf_mp.model_walk import optimizer_parameters
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
    """What one backward has found so far."""

    task: int
    own: set[int]  # the optimizer's parameters, by identity
    phase: Literal["measure", "update", "discard"] = "measure"
    norms: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    largest: Tensor | None = None
    done: set[nn.Parameter] = field(default_factory=set)  # in this phase
    clip_factor: Tensor | None = None


class OptimizerInBackward(StepController):
    """Updates the parameters of one optimizer inside backward.

    Clips the global 2-norm of the gradients to ``max_grad_norm``; ``inf`` only measures it, None does not. After a
    first pass, ``runtime`` has the norm, and its observers are told the largest magnitude.
    """

    def __init__(self, runtime: Any, max_grad_norm: float | None) -> None:
        self.max_grad_norm = max_grad_norm
        self._runtime = runtime
        self._is_scaled = False
        self._optimizer: Any = None  # a MasterWeightOptimizer
        # Where the gradients of parameters are complete, and our hooks there. Nobody else may hold these nodes, and a
        # hook goes with its node; a node keeps its parameter alive, so these are let go of at the next forward.
        self._hook_handles: list[tuple[Any, RemovableHandle]] = []
        self._backward: _Backward | None = None

    def on_attach_optimizer(self, optimizer: Any) -> None:
        """The optimizer to update with; a ValueError for a second one, or one that looks at all parameters at once."""
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
        """Watch the parameters' nodes in the graph, again where autograd has made a node anew (``model.to``)."""
        self._is_scaled, parameters = forward.runtime.check.is_scaled, list(forward.runtime.model.parameters())
        if any(p.requires_grad and p.is_floating_point() and not isinstance(p, SplitParameter) for p in parameters):
            raise ValueError(
                "free_gradients='backward' needs every trainable parameter in 16 bits, and weights of normalizations "
                "with running statistics (BatchNorm) are FP32: use free_gradients='step', or freeze them"
            )
        self._register_hooks(parameters)

    def _register_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        for _, handle in self._hook_handles:
            handle.remove()
        # The nodes that accumulate: a hook on a parameter itself would make gradients FP32, and runs once a use.
        split = [p for p in parameters if isinstance(p, SplitParameter) and p.requires_grad]
        nodes = [(get_gradient_edge(parameter).node, weakref.ref(parameter)) for parameter in split]
        self._hook_handles = [(node, node.register_hook(partial(self._complete, of))) for node, of in nodes]

    def on_detach(self) -> None:
        self._register_hooks([])
        self._optimizer, self._backward = None, None

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        """Measure the gradients in a first pass where that is needed, before anything of the model's backward runs."""
        if self._optimizer is None:
            return
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs free_gradients='step': 'backward' leaves no gradients")
        if accumulating_edges(node, [0]):  # not in torch.autograd.grad, which leaves no gradients behind
            self._begin(GradientEdge(*node.next_functions[0]), gradient, node.value)

    def _begin(self, edge: GradientEdge, gradient: Tensor, value: Tensor | None) -> None:
        """Begin a backward, by its first pass if there are two; a RuntimeError for a second backward or output."""
        task = torch._C._current_graph_task_id()
        measures = self._is_scaled or self.max_grad_norm is not None
        if self._backward is not None:
            if self._backward.task != task:
                raise RuntimeError(
                    "a second backward() before optimizer.step(): with free_gradients='backward' the first one has "
                    "updated the parameters already. To accumulate gradients, use free_gradients='step'"
                )
            if measures:
                raise RuntimeError(
                    "gradients enter the model through several outputs: with free_gradients='backward' they cannot be "
                    "measured before they are used. Make one loss in the model, or use free_gradients='step'"
                )
            return
        backward = self._backward = _Backward(task, set(map(id, optimizer_parameters(self._optimizer))))
        if not measures:
            starts = all_finite([gradient]) and (value is None or all_finite([value]))
            backward.phase = "update" if starts else "discard"
            return
        try:
            # Inside of the outer backward, so that a loop's one loss.backward() does both passes.
            torch.autograd.backward([edge], [gradient], retain_graph=True)
        except BaseException:
            self._backward = None  # nothing was changed
            raise
        self._decide_second_pass(backward)

    def _decide_second_pass(self, backward: _Backward) -> None:
        """Decide what the second pass does."""
        backward.phase, backward.done = "update", set()
        found = [] if backward.largest is None else [backward.largest]
        if self.max_grad_norm is not None:
            # in the optimizer's order, as it adds them up itself
            in_order = [parameter for parameter in optimizer_parameters(self._optimizer) if parameter in backward.norms]
            self._runtime.grad_norm = norm = norm_of([backward.norms[parameter] for parameter in in_order])
            found.append(norm)  # one that leaves FP32 would clip everything to nothing
            if math.isfinite(self.max_grad_norm):
                backward.clip_factor = clip_factor(norm, self.max_grad_norm)
        if backward.largest is not None:
            self._runtime.on_backward_end(backward.largest)
        if not all_finite(found, SQUARES_BELOW):
            backward.phase = "discard"

    @torch.no_grad()
    def _complete(self, reference: weakref.ref[SplitParameter], *given: Any) -> None:
        """A parameter has its gradient, of all its uses."""
        parameter, backward = reference(), self._backward
        if parameter is None or backward is None or not has_gradient(parameter):
            return
        if backward.phase != "measure" and id(parameter) not in backward.own:
            return  # what no optimizer here has comes again in the second pass, and stays
        if backward.phase != "discard":
            if parameter in backward.done:
                raise RuntimeError(
                    "a parameter got gradients twice in one backward, and free_gradients='backward' has used the "
                    "first: checkpoint with use_reentrant=False "
                    "(gradient_checkpointing_kwargs={'use_reentrant': False}), or use free_gradients='step'"
                )
            # In both passes: a hook may make the second one's gradients others than those that were measured.
            largest = largest_unscaled_magnitude([gradient_and_factor(parameter)])  # type: ignore[list-item]
            if backward.phase == "update":
                self._update(parameter, largest.item(), backward)
            else:
                self._measure(parameter, largest, backward)
            backward.done.add(parameter)
        parameter.grad = None

    def _measure(self, parameter: SplitParameter, largest: Tensor, backward: _Backward) -> None:
        known = backward.largest
        backward.largest = largest if known is None else torch.maximum(known, largest.to(known.device))
        if self.max_grad_norm is not None and id(parameter) in backward.own:
            backward.norms[parameter] = clip_grad_norm_([parameter], math.inf)

    def _update(self, parameter: SplitParameter, largest: float, backward: _Backward) -> None:
        """Step ``parameter`` alone; a RuntimeError for an inf or NaN gradient, when others are updated already."""
        if not largest < SQUARES_BELOW:
            raise RuntimeError(
                f"the largest gradient of a parameter of shape {tuple(parameter.shape)} is {largest:g}; "
                f"{len(backward.done)} parameters are updated already. Go back to a checkpoint, and use "
                "free_gradients='step', or max_grad_norm=inf where gradients may become inf or NaN"
            )
        if backward.clip_factor is not None:
            multiply_gradients([parameter], backward.clip_factor)
        self._optimizer.step_on([parameter])

    def report_from_backward(self) -> StepReport | None:
        """What the gradients of the last backward were like; None without a backward since the last step."""
        backward = self._backward
        if backward is None:
            return None
        overflow = backward.phase == "discard"
        is_known = self._is_scaled and backward.largest is not None and not overflow
        largest = backward.largest.item() if is_known else None  # type: ignore[union-attr]
        return StepReport(overflow, largest, not overflow or self._runtime.check.losses_are_finite())

    def on_step_finished(self, report: StepReport) -> None:
        self._backward = None
