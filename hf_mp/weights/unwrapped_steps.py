"""What a lean layout cannot let happen: steps of an optimizer that knows nothing of the masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook as register

from hf_mp.weights.split_parameter import SplitParameter


def refuse_unwrapped_steps() -> Callable[[], None]:
    """Have optimizers without a wrapper raise a RuntimeError at ``step()`` for weights of a lean model.

    Returns what ends that.
    """
    return register(_refuse).remove


def has_hooks(optimizer: Any) -> bool:
    """Whether a step of ``optimizer`` calls hooks of anybody else."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    before_all = [hook for hook in _global_optimizer_pre_hooks.values() if hook is not _refuse]
    return any((*own, before_all, _global_optimizer_post_hooks))


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "keeps_masters", False):
        return
    for group in optimizer.param_groups:
        if any(isinstance(parameter, SplitParameter) and parameter.is_saved_in_full for parameter in group["params"]):
            raise RuntimeError(
                f"this {type(optimizer).__name__} would round its updates to the 16 bits in which a lean layout stores "
                "weights: give it to attach_optimizer(optimizer), or to prepare(model, optimizer, ...), and step what "
                "that returns"
            )
