"""Stacked experts of Transformers' mixtures.

One parameter of three dimensions contains the weights of all experts of a module. They are multiplied in one grouped
matmul of tokens sorted by expert, in a batched matmul of the weights gathered for each token, or in a loop.
"""

from __future__ import annotations

from torch import nn

_FORWARD = "transformers.integrations.moe"  # its forward replaces those of all classes of stacked experts
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether the class of ``module`` is one of Transformers that stack the weights of experts."""
    # The classes share no base class or mark, only the forward that Transformers' decorator sets.
    forward = getattr(type(module), "forward", None)  # scripted modules lack it
    return getattr(forward, "__globals__", {}).get("__name__") == _FORWARD
