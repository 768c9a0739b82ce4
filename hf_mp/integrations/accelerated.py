"""What accelerate's wrapper around an optimizer is told: which steps were skipped. accelerate is not imported."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from hf_mp.casting.torch_patches import Patch, Patches, acquire


def as_accelerated(optimizer: Any) -> Any:
    """``optimizer`` if it is accelerate's wrapper around one, else None."""
    accelerate: Any = sys.modules.get("accelerate.optimizer")
    return optimizer if accelerate is not None and isinstance(optimizer, accelerate.AcceleratedOptimizer) else None


def tell_accelerate(optimizer: Any) -> weakref.finalize[..., Any] | None:
    """Have accelerate's wrappers, of which ``optimizer`` does not know, ask it whether its last step was skipped.

    Gives what ends that; None while accelerate has not been imported, so that there is no wrapper.
    """
    if "accelerate.optimizer" not in sys.modules:
        return None
    return weakref.finalize(optimizer, acquire(_WRAPPERS))


def _asking_the_inside(original: Any) -> property:
    def step_was_skipped(self: Any) -> bool:
        """Whether or not the optimizer step was skipped."""
        return bool(original.fget(self) or getattr(self.optimizer, "step_was_skipped", False))

    return property(step_was_skipped)


# accelerate and the Trainer hold LR schedulers back by it.
_WRAPPERS = Patches(
    (
        Patch(
            ("accelerate.optimizer:AcceleratedOptimizer.step_was_skipped",),
            _asking_the_inside,
            "LR schedulers advance on skipped steps",
        ),
    )
)
