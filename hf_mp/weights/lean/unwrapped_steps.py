"""What a lean layout cannot let happen: steps of an optimizer that knows nothing of the masters."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from hf_mp.weights.working_copies import WatchedParameter

_ORDINARY = (Tensor, nn.Parameter, WatchedParameter)


@functools.cache
def refuse_unwrapped_steps() -> None:
    """Have a step on weights of a lean model raise a RuntimeError where no ``MasterWeightOptimizer`` has their masters.

    Once and for good: torch iterates over these hooks, and must not meet a garbage collection that removes one.
    """
    register_optimizer_step_pre_hook(_refuse)


def has_hooks(optimizer: Any) -> bool:
    """Whether a step of ``optimizer`` calls hooks of anybody else."""
    # torch has no public way to list hooks, neither an optimizer's own nor those of all optimizers.
    before = (*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values())
    after = optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
    return bool(after) or not all([hasattr(hook, "only_refuses") for hook in before])


def _refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "keeps_masters", False):
        return
    for group in optimizer.param_groups:
        # Every step of any optimizer comes here: no call for ordinary parameters.
        if any([type(p) not in _ORDINARY and not getattr(p, "has_optimizer", True) for p in group["params"]]):
            raise RuntimeError(
                f"this {type(optimizer).__name__} would round its updates to the 16 bits in which a lean layout stores "
                "weights: step what attach_optimizer(optimizer) or prepare(model, optimizer, ...) returns, or call "
                "hf_mp.detach(model)"
            )


_refuse.only_refuses = True  # type: ignore[attr-defined]
