"""What accelerate's wrapper around an optimizer is told: which steps were skipped. accelerate is not imported."""

from __future__ import annotations

import sys
from typing import Any

from hf_mp.casting.torch_patches import Patch, put_on


def as_accelerated(optimizer: Any) -> Any:
    """``optimizer`` if it is accelerate's wrapper around one, else None."""
    accelerate: Any = sys.modules.get("accelerate.optimizer")
    return optimizer if accelerate is not None and isinstance(optimizer, accelerate.AcceleratedOptimizer) else None


def tell_accelerate() -> bool:
    """Have accelerate's wrappers ask the optimizer inside, which does not know of them, whether its step was skipped.

    False while accelerate has not been imported, so that there is no wrapper.
    """
    is_imported = "accelerate.optimizer" in sys.modules
    if is_imported:
        put_on(_WRAPPERS)
    return is_imported


def _asking_the_inside(original: Any) -> property:
    def step_was_skipped(self: Any) -> bool:
        """Whether or not the optimizer step was skipped."""
        return bool(original.fget(self) or getattr(self.optimizer, "step_was_skipped", False))

    return property(step_was_skipped)


# accelerate and the Trainer hold LR schedulers back by it.
_PLACE = "accelerate.optimizer:AcceleratedOptimizer.step_was_skipped"
_WRAPPERS = (Patch((_PLACE,), _asking_the_inside, "LR schedulers advance on skipped steps"),)
