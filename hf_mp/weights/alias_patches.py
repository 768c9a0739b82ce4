"""Patches of torch for aliases in parameter slots: gradients with respect to weights, and tracing by Dynamo."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_mp.casting.autocast_stack import state
from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.weights.slots import WeightAlias


@around
def _differentiate_weights(original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute gradients in a forward with respect to weights and external tensors instead of their aliases."""
    grad_outputs, retain_graph, create_graph, inputs, *others = args
    # The backward of a custom function may recompute a part of a forward.
    forward = state.forward or (None if state.backward is None else state.backward.forward)
    if forward is not None and forward.weights is not None:
        # A matmul may use another alias of the weight, and some CPU matmuls accumulate into the weight itself.
        original_of = forward.weights.slots.original_of
        inputs = tuple(original_of(one) if isinstance(one, Tensor) else one for one in inputs)
    return original(outputs, grad_outputs, retain_graph, create_graph, inputs, *others, **kwargs)


@around
def _trace_as_tensor(original: Any, self: Any, value: Tensor, *args: Any) -> Any:
    # Dynamo accepts no tensor subclass in a higher-order operator. Later forwards have plain tensors in their slots.
    if type(value) is WeightAlias:
        value.__class__ = Tensor  # type: ignore[assignment]
    return original(self, value, *args)


# Called by torch.autograd.grad and backward, which a tensor's __torch_function__ compares by identity.
DIFFERENTIATE_WEIGHTS = Patch(
    ("torch.autograd:_engine_run_backward",),
    _differentiate_weights,
    "torch.autograd.grad finds no gradient of a weight inside of a forward",
)
ALIAS_PATCHES = Patches(
    (
        Patch(
            ("torch._dynamo.variables.builder:VariableBuilder.wrap_tensor",),
            _trace_as_tensor,
            "higher-order operators such as scan accept no weight of an attached model",
        ),
    )
)
