"""Working copies as inputs of compiled graphs, in the places of the casts that were traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import GraphModule, Node


def lift_casts(
    module: GraphModule, inputs: list[Any], dtype: torch.dtype, has_copy: Callable[[Tensor], bool], has_borders: bool
) -> tuple[GraphModule, list[int]]:
    """Have ``module`` take each cast to ``dtype`` of an input that has a working copy as an input of its own.

    A graph that casts its weights casts them in every forward. Each cast becomes one input, so that the gradients of
    the uses of a weight are still summed in FP32: at their borders, or where ``has_borders`` is False in the graph, as
    gradients of the input that was cast. ``inputs`` grows by the new ones.

    Returns:
        The module, and for each new input, in their order, the place in ``inputs`` of the one that was cast.
    """
    found: list[int] = []
    graph = copy.deepcopy(module.graph)  # the compiler counts the inputs of the one that it traced
    placeholders = graph.find_nodes(op="placeholder")
    for place, placeholder in enumerate(placeholders):
        if not isinstance(inputs[place], Tensor) or inputs[place].dtype is dtype or not has_copy(inputs[place]):
            continue
        for cast in [user for user in placeholder.users if _is_cast(user, dtype)]:
            with graph.inserting_after(placeholders[-1]):
                lifted = graph.placeholder(f"{placeholder.name}_rounded_{len(found)}")
            lifted.meta = {**cast.meta, "example_value": _fake_input(placeholder, dtype, has_borders)}
            lifted._dynamo_source = None  # made here: no guard looks it up
            if has_borders:
                cast.replace_all_uses_with(lifted)
                graph.erase_node(cast)
            else:
                cast.op, cast.target, cast.args = "call_function", rounded, (placeholder, lifted)
            placeholders.append(lifted)
            inputs.append(lifted.meta["example_value"])
            found.append(place)
    if not found:
        return module, found
    lifted_module = GraphModule(module, graph, module.__class__.__name__)
    vars(lifted_module).update({name: value for name, value in vars(module).items() if name not in vars(lifted_module)})
    lifted_module.meta = module.meta
    return lifted_module, found


def rounded(weight: Tensor, copy: Tensor) -> Tensor:
    """A working copy in the place of the cast of its weight, with the cast's gradient."""
    result: Tensor = _Rounded.apply(weight, copy)
    return result


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(torch.float32), None


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    is_call = node.op == "call_method" and node.target == "to"
    return is_call and node.args[1:] == (dtype,) and not node.kwargs


def _fake_input(placeholder: Any, dtype: torch.dtype, has_grad: bool) -> Tensor:
    wide: Any = placeholder.meta["example_value"]
    with wide.fake_mode, torch.no_grad():
        return wide.to(dtype).requires_grad_(has_grad and wide.requires_grad)
