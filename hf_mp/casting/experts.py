"""Stacked experts of Transformers' mixtures.

A module of stacked experts has one parameter of three dimensions for the weights of all experts. It multiplies them by
one grouped product of tokens that are sorted by expert, by a batched product of the weights that each token gathers, or
in a loop over the experts.
"""

from __future__ import annotations

from torch import nn

_FORWARD = "transformers.integrations.moe"  # its forward takes the place of that of every class of stacked experts
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def has_stacked_experts(module: nn.Module) -> bool:
    """Whether ``module`` is of a class of Transformers that stacks the weights of experts."""
    # Transformers' decorator gives the classes no base class or mark in common, only this forward.
    forward = getattr(type(module), "forward", None)  # a scripted module has none
    return getattr(forward, "__globals__", {}).get("__name__") == _FORWARD
